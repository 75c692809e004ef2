"""`wavealign report`: what is gathered, the figures, and a page that is safe and complete."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from helpers import DATA, measured_result, random_mask, run_result, trial, write_lines
from hypothesis import given
from hypothesis import strategies as st

from wavealign.cli import main
from wavealign.masks import save_mask
from wavealign.order import build_schedule
from wavealign.report.page.answers import answer, best_rows
from wavealign.report.page.figures import (
    FrontPoint,
    cost_against_gain,
    head_tables,
    heat_rows,
    pareto_front,
    shown_policies,
)
from wavealign.report.page.gather import blocks
from wavealign.report.page.html import render
from wavealign.report.page.prediction import predictions
from wavealign.report.page.svg import Axis
from wavealign.runs.files import Loaded, Row
from wavealign.sim.setup import Setup
from wavealign.sim.simulate import run_schedule

EVIL = "<script>alert('x')</script>\"&"


def loaded(*results, origin="a.jsonl"):
    return Loaded(rows=[Row(result, origin) for result in results])


def only(data):
    (block,) = blocks(data)
    return block


def policies(times, **fields):
    return [run_result(policy=p, time_ms=t, **fields) for p, t in times.items()]


def report(*arguments):
    return CliRunner().invoke(main, ["report", "--quiet", *(str(a) for a in arguments)])


class Page(HTMLParser):
    """Elements, text and scripts of a page."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self.scripts, self._open = [], [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif not self._open or self._open[-1] != "style":
            self.text += data


def test_speedups_compare_within_a_campaign():
    """Two days, the second 10 % slower: a policy that ran on the second day alone isn't."""
    first = [Row(measured_result(time_ms=10.0), "mon.jsonl")]
    second = [Row(measured_result(time_ms=11.0), "tue.jsonl")]
    second += [Row(measured_result(policy="nnz", time_ms=10.0), "tue.jsonl")]
    block = only(Loaded(rows=first + second))
    cells = block.cells["m"]
    assert cells["nnz"].speedup == pytest.approx(1.1)
    assert cells["original"].speedup == pytest.approx(1.0)
    assert cells["original"].time_ms == pytest.approx(math.sqrt(110))


def test_the_best_is_a_geometric_mean_over_masks():
    rows = []
    for i, times in enumerate([{"nnz": 5.0, "svd": 8.0}, {"nnz": 16.1, "svd": 8.0}]):
        rows += policies({"original": 10.0, **times}, mask=f"m{i}", mask_digest=f"d{i}")
    block = only(loaded(*rows))
    assert dict(block.ranking) == pytest.approx(
        {"svd": 1.25, "nnz": (20 / 16.1) ** 0.5, "original": 1.0}
    )
    found = answer(block)
    assert (found.policy, found.masks, found.good) == ("svd", 2, 1)
    assert [row.cell.policy for row in best_rows(block)] == ["nnz", "svd"]
    heat = heat_rows(block, shown_policies(block, 9))
    assert [row.policy for row in heat] == ["svd", "nnz", "original"]
    assert [cell.text for cell in heat[1].cells] == ["2.00", "0.62"]
    assert [cell.side for cell in heat[1].cells] == ["up", "down"]
    assert [cell.best for cell in heat[1].cells] == [True, False]


def test_a_policy_that_ran_on_some_masks_is_judged_on_these():
    rows = policies({"original": 10.0, "nnz": 8.0, "resync": 7.0})
    rows += policies({"original": 10.0, "nnz": 5.0}, mask="n", mask_digest="d1")
    block = only(loaded(*rows))
    found = answer(block)
    assert found.policy == "nnz"
    assert found.challenger.policy == "resync"
    assert found.challenger.ratio == pytest.approx(8 / 7)
    assert heat_rows(block, shown_policies(block, 9))[0].policy == "resync"
    assert heat_rows(block, shown_policies(block, 9))[0].mean is None


@pytest.mark.parametrize("nnz_ms", [9.95, 10.0, 12.0])
def test_where_nothing_gains_the_page_says_so(nnz_ms):
    block = only(loaded(*policies({"original": 10.0, "nnz": nnz_ms})))
    assert answer(block).policy is None
    assert best_rows(block)[0].nothing
    assert "No policy gains more than 1" in Page(render(block_loaded(block), {}, [], "t")).text


def block_loaded(block):
    return Loaded(rows=block.rows)


def test_without_original_no_speedup_is_made_up():
    block = only(loaded(*policies({"nnz": 9.0, "svd": 8.0})))
    assert not answer(block).known
    assert heat_rows(block, shown_policies(block, 9)) == []
    assert "No speedup is known" in Page(render(block_loaded(block), {}, [], "t")).text


def test_settings_are_kept_apart_and_told_apart():
    rows = [
        run_result(),
        run_result(device="a40"),
        run_result(l2_capacity_bytes=10 << 20),
        run_result(regime="steady"),
        measured_result(),
        run_result(wave=264),
    ]
    labels = [block.label for block in blocks(loaded(*rows))]
    assert labels[0] == "measured · h200 · fa4"
    assert len(set(labels)) == 6
    assert any(label.startswith("simulated · h200 · fa4 · W = 264 · full") for label in labels)
    assert any(label.endswith("L2 10.0 MiB") for label in labels)


def test_launches_that_differ_are_not_averaged():
    rows = [measured_result(head_dim=128), measured_result(head_dim=64, kv_block_bytes=32768)]
    rows += [measured_result(batch=2), measured_result(kv_heads=1), measured_result(kv_heads=2)]
    labels = {block.label for block in blocks(loaded(*rows))}
    ends = ("", " · head_dim 64", " · batch 2", " · kv_heads 1")
    assert labels == {f"measured · h200 · fa4{end}" for end in ends}
    block = only(loaded(run_result(), run_result(kv_block_bytes=32768, time_ms=1.0)))
    assert len(block.cells) == len(block.columns) == 2


def test_masks_of_one_name_in_two_folders_are_two():
    rows = [Row(run_result(heads="0"), "x/runs.jsonl")]
    rows += [Row(run_result(heads=h, mask_digest=f"e{h}"), "y/runs.jsonl") for h in "01"]
    block = only(Loaded(rows=rows))
    assert [column.label for column in block.columns] == ["m (x)", "m (y)"]
    assert [len(column.units) for column in block.columns] == [1, 2]


def test_heads_on_their_own():
    rows = []
    for h, times in enumerate([{"nnz": 5.0, "svd": 8.0}, {"nnz": 8.0, "svd": 5.0}]):
        rows += policies({"original": 10.0, **times}, heads=str(h), mask_digest=f"d{h}")
    block = only(loaded(*rows))
    (table,) = head_tables(block)
    assert [row.best for row in table.rows] == ["nnz", "svd"]
    assert table.chosen_gain == pytest.approx(2.0)
    assert table.single_gain == pytest.approx(math.sqrt(2 * 1.25))
    (column,) = block.columns
    assert block.cells[column.label]["nnz"].time_ms == pytest.approx(13.0)
    # Beside the launch of all heads, the heads are detail only.
    block = only(loaded(*rows, *policies({"original": 20.0, "nnz": 10.0}, mask_digest="all")))
    assert [len(column.units) for column in block.columns] == [1]
    assert block.cells["m"]["nnz"].speedup == pytest.approx(2.0)
    assert len(head_tables(block)) == 1


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.5, 2)), min_size=1, max_size=20))
def test_the_front_against_all_pairs(points):
    made = [FrontPoint(str(i), cost, gain) for i, (cost, gain) in enumerate(points)]
    front = pareto_front(made)
    for point in made:
        beaten = any(
            other.planning_ms <= point.planning_ms
            and other.speedup >= point.speedup
            and (other.planning_ms, other.speedup) != (point.planning_ms, point.speedup)
            for other in made
        )
        same = any((p.planning_ms, p.speedup) == (point.planning_ms, point.speedup) for p in front)
        assert same == (not beaten)


def test_planning_costs_come_from_trials():
    times = {"original": (10.0, 1.0), "nnz": (8.0, 2.0), "svd": (9.0, 50.0)}
    rows = [
        Row(run_result(policy=policy, time_ms=time_ms), "s", planning_ms)
        for policy, (time_ms, planning_ms) in times.items()
    ]
    chart, front = cost_against_gain(only(Loaded(rows=rows)))
    assert [(p.policy, p.planning_ms) for p in front] == [("original", 1.0), ("nnz", 2.0)]
    assert "svd: 1.111× original, planned in 50.00 ms" in chart
    assert cost_against_gain(only(loaded(*policies({"original": 1.0, "nnz": 2.0})))) is None


def test_predicted_against_measured():
    rows = []
    for policy, was, will in (("original", 10.0, 11.0), ("nnz", 8.0, 7.0), ("svd", 7.0, 8.0)):
        rows.append(measured_result(policy=policy, time_ms=was, l2_hit_frac=0.5))
        rows.append(run_result(policy=policy, time_ms=will, l2_hit_frac=0.52))
    (found,) = predictions([Row(row, "a") for row in rows])
    assert found.count == 3
    assert found.hit_points == pytest.approx(2.0)
    assert found.time_frac == pytest.approx((1 / 10 + 1 / 8 + 1 / 7) / 3)
    assert found.regret_frac == pytest.approx(8 / 7 - 1)  # nnz is chosen, svd was faster
    assert predictions([Row(rows[0], "a")]) == []


def test_a_prediction_that_picks_the_fastest_says_so():
    rows = [make(policy=p, time_ms=t) for make in (run_result, measured_result)
            for p, t in (("original", 2.0), ("nnz", 1.0))]  # fmt: skip
    text = Page(render(loaded(*rows), {}, [], "t")).text
    assert "The policy that simulation picks is the fastest measured one." in text


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (Axis("", 0.0, 1.0, percent=True), ["0", "20", "40", "60", "80", "100"]),
        (Axis("", 0.95, 1.05, suffix="×"), ["0.96×", "0.98×", "1.00×", "1.02×", "1.04×"]),
        (Axis("", 1.0, 40.0, binary=True), ["1", "2", "4", "8", "16", "32"]),
        (Axis("", 2.0, 600.0, log=True), ["3", "10", "30", "100", "300"]),
        (Axis("", 3.1, 4.2, log=True), ["3.2", "3.4", "3.6", "3.8", "4.0", "4.2"]),
    ],
)  # fmt: skip
def test_ticks(axis, labels):
    assert [text for _, text in axis.ticks()] == labels
    assert all(0 <= axis.place(value) <= 1 for value, _ in axis.ticks())


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_lie_on_the_axis(low, width):
    axis = Axis("", low, low + width)
    if width > 1e-9 * abs(low):  # narrower, and doubles are too coarse for places
        places = [axis.place(value) for value, _ in axis.ticks()]
        assert all(-1e-6 <= place <= 1 + 1e-6 for place in places)
        assert len(places) <= 9


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A small real sweep: two masks, heads of one of them, four policies, two devices."""
    folder = tmp_path_factory.mktemp("sweep")
    records, masks = [], {}
    for name, seed in (("alpha", 1), ("beta", 2)):
        masks[name] = random_mask(seed, (2, 60, 60))
        save_mask(folder / f"{name}.npz", masks[name])
    scopes = [("alpha", [0, 1]), ("beta", [0, 1]), ("beta", [0]), ("beta", [1])]
    for name, heads in scopes:
        mask = masks[name].select_heads(heads) if len(heads) == 1 else masks[name]
        for device in ("h200", "a40"):
            setup = Setup.make(device, l2_bytes=2 << 20, wave=8)
            for policy in ("original", "nnz", "svd+nnz", "lockstep"):
                schedule = build_schedule(mask, policy, setup.wave)
                text = "0-1" if len(heads) == 2 else str(heads[0])
                result = run_schedule(mask, schedule, setup, name=name, heads=text)
                records.append(trial(result, planning_ms=1.0 + len(policy), l2_bytes=2 << 20))
    records.append(trial(error=f"ArpackError: {EVIL}", policy="spectral+nnz", mask="beta"))
    write_lines(folder / "s/trials/w1.jsonl", records)
    manifest = {"schema": "wavealign.sweep/1", "paths": {"alpha": "../alpha.npz"}}
    (folder / "s/sweep.json").write_text(json.dumps(manifest))
    return folder


def test_the_page_of_a_sweep(sweep, tmp_path):
    out = tmp_path / "r.html"
    result = report(sweep / "s", "-o", out, "--mask", sweep / "beta.npz", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["rows"], said["failed"], said["curves"]) == (32, 1, 4)
    text = out.read_text()
    assert said["bytes"] == len(text.encode()) < 2_000_000
    page = Page(text)
    for heading in (
        "Which order is the fastest?", "The best on each mask", "Policies on masks",
        "Hit ratio against time.", "Planning cost against gain.", "Miss ratio at every L2 size",
        "Predicted against measured", "Head by head", "All runs", "Failed trials",
        "How each figure was obtained",
    ):  # fmt: skip
        assert heading in page.text
    assert "ArpackError" in page.text
    assert "NVIDIA H200 SXM 141 GB" in page.text
    assert "an estimate; trust hit ratios before times" in page.text  # the A40
    assert page.text.count("best policies first") == 2  # a heat map a device
    data = json.loads(page.scripts[0])
    assert len(data["rows"]) == 32
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html"]


def test_the_page_asks_for_nothing(sweep, tmp_path):
    out = tmp_path / "r.html"
    report(sweep / "s", "-o", out, "--no-curves")
    page = Page(out.read_text())
    assert "link" in page.tags
    links = [v for k, v in page.attributes if k in ("href", "src", "action", "srcset", "data")]
    assert all(link.startswith(("#", "data:,")) for link in links), links
    assert "url(" not in out.read_text()
    assert "@import" not in out.read_text()
    policy = next(v for k, v in page.attributes if k == "content" and "default-src" in v)
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_every_chart_is_well_formed(sweep, tmp_path):
    out = tmp_path / "r.html"
    report(sweep / "s", "-o", out)
    charts = re.findall(r'<svg viewBox="0 0 360.*?</svg>', out.read_text(), re.DOTALL)
    assert len(charts) == 6  # hits and costs for two devices, curves of alpha for two
    for chart in charts:
        assert "nan" not in chart
        assert "inf" not in chart
        ET.fromstring(chart)


def test_names_from_data_are_only_text(tmp_path):
    """A mask, a policy, an error, a title and a path that try to be HTML."""
    fields = {"mask": EVIL, "device": EVIL, "kernel": EVIL, "version": EVIL}
    rows = [run_result(policy=p, **fields) for p in ("original", EVIL)]
    rows += [measured_result(policy=p, gpu=EVIL, driver=EVIL, **fields) for p in ("original", EVIL)]
    heads = [run_result(heads=str(h), mask_digest=f"d{h}", **fields) for h in range(2)]
    path = write_lines(tmp_path / "a&b<i>.jsonl", [*rows, *heads, trial(error=EVIL, mask=EVIL)])
    out = tmp_path / "r.html"
    assert report(path, "-o", out, "--title", EVIL).exit_code == 0
    page = Page(out.read_text())
    assert page.tags.count("script") == 2  # the data and the page's own
    assert "i" in page.tags  # the page's own emphasis
    assert page.tags.count("i") == out.read_text().count("<i>Measured</i>") + 1
    assert EVIL in page.text
    assert EVIL in {v for row in json.loads(page.scripts[0])["rows"] for v in row}


def test_the_same_results_make_the_same_page(sweep, tmp_path):
    for name in ("a.html", "b.html"):
        report(sweep / "s", "-o", tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_measured_rows_that_ship(tmp_path):
    out = tmp_path / "r.html"
    result = report(DATA / "h200", DATA / "paper", DATA / "gsrs", "-o", out, "--no-curves")
    assert result.exit_code == 0, result.output
    page = Page(out.read_text())
    assert "NVIDIA H200" in page.text
    assert "580.159.04" in page.text
    assert "flash-attn-4 4.0.0b36" in page.text
    assert "Passed over: " in page.text  # gsrs/sessions.jsonl has another schema
    assert "No planning cost" in page.text


def test_thousands_of_trials_stay_under_two_megabytes():
    """300 policies with long names on 30 masks: the best are shown, what is left out is counted."""
    rows = [
        run_result(
            policy="original" if p == 0 else f"nnz-bucket+svd(bucket={p},rank=4)/shuffled+phased",
            mask=f"a_mask_with_quite_a_name_{m}",
            mask_digest=f"d{m}",
            time_ms=10.0 - p / 100,
        )
        for m in range(30)
        for p in range(300)
    ]
    text = render(loaded(*rows), {}, [], "t")
    assert 1_500_000 < len(text.encode()) < 2_000_000
    page = Page(text)
    kept = len(json.loads(page.scripts[0])["rows"])
    assert 0 < kept < 9000
    assert f"The first {kept} runs; {9000 - kept} more are in the files" in page.text
    assert "The 81 best policies; 219 more are in the table" in page.text
    assert "is the best, or within 1\xa0% of the best, on 30 of 30 masks" in page.text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gone.jsonl"], 2, "gone.jsonl: can't be read"),
        (["other.jsonl"], 2, "line 1: a row has schema 'wavealign.curve/1'"),
        (["good.jsonl", "good.jsonl"], 2, "is named twice"),
        (["good.jsonl", "--mask", "gone.npz"], 2, "gone.npz: holds no masks"),
        (["good.jsonl", "--mask", "good.jsonl"], 2, "good.jsonl"),
        (["good.jsonl", "old"], 2, "sweep.json: has schema 'wavealign.sweep/0'"),
        (["good.jsonl", "-o", "no/r.html"], 2, "the folder no doesn't exist"),
        ([], 2, "Missing argument"),
    ],
)
def test_bad_usage_writes_nothing(tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "good.jsonl", [run_result()])
    (tmp_path / "other.jsonl").write_text('{"schema": "wavealign.curve/1"}\n')
    (tmp_path / "old").mkdir()
    (tmp_path / "old/sweep.json").write_text('{"schema": "wavealign.sweep/0"}')
    before = sorted(tmp_path.iterdir())
    result = report(*arguments)
    assert result.exit_code == code
    assert message in result.output
    assert sorted(tmp_path.iterdir()) == before


def test_without_jinja2_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    path = write_lines(tmp_path / "a.jsonl", [run_result()])
    result = report(path, "-o", tmp_path / "r.html")
    assert result.exit_code == 3
    assert "pip install 'wavealign[report]'" in result.output


def test_a_mask_that_did_not_run_is_said(sweep, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", policies({"original": 2.0, "nnz": 1.0}))
    out = tmp_path / "r.html"
    assert report(path, "-o", out, "--mask", sweep / "beta.npz").exit_code == 0
    assert "None of the masks given by --mask is one that ran." in Page(out.read_text()).text


def test_only_failed_trials_still_make_a_page(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [trial(error="out of memory")])
    out = tmp_path / "r.html"
    result = report(path, "-o", out)
    assert result.exit_code == 0, result.output
    assert "out of memory" in Page(out.read_text()).text
