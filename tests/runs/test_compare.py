"""`wavealign compare`: pairing, intervals against scipy's, verdicts, errors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import DATA, measured_result, run_result, trial, write_lines
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from wavealign.cli import main
from wavealign.errors import InputError
from wavealign.report.comparison import judge, outcome_of, records
from wavealign.runs.files import Row, load_rows
from wavealign.runs.folder import by_identity, read_records
from wavealign.runs.metrics import METRICS
from wavealign.runs.pairing import compare_rows

TIME, READS, HITS = (METRICS[name] for name in ("time_ms", "hbm_read_bytes", "l2_hit_frac"))


def rows(results, origin="a"):
    return [Row(result, origin) for result in results]


def timed(times, make=run_result, origin="a", **fields):
    """One row a time, each on a mask of its own."""
    return rows(
        [make(mask_digest=f"d{i}", mask=f"m{i}", time_ms=t, **fields) for i, t in enumerate(times)],
        origin,
    )


def run(*arguments):
    return CliRunner().invoke(main, ["compare", *(str(a) for a in arguments)])


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=12))
def test_with_a_pair_a_mask_the_interval_is_the_paired_t_test(ratios):
    a = timed([7.0] * len(ratios))
    b = timed([7.0 * r for r in ratios])
    found = compare_rows(a, b, TIME).summary()
    logs = np.log([7.0 * r / 7.0 for r in ratios])
    assert found.mean == pytest.approx(logs.mean(), abs=1e-12)
    if np.ptp(logs) > 1e-6:
        expected = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
        assert found.low == pytest.approx(expected.low, rel=1e-6, abs=1e-9)
        assert found.high == pytest.approx(expected.high, rel=1e-6, abs=1e-9)


def test_five_masks_with_policies_that_move_together_count_as_five():
    """Ten equal policies a mask hold no more than one: the interval is that of five pairs."""
    changes = [0.02, 0.05, -0.01, 0.04, 0.03]
    sides = []
    for factor in (0.0, 1.0):
        results = [
            run_result(mask_digest=f"d{i}", policy=f"p{j}", time_ms=math.exp(factor * change))
            for i, change in enumerate(changes)
            for j in range(10)
        ]
        sides.append(rows(results))
    comparison = compare_rows(*sides, TIME)
    found = comparison.summary()
    expected = stats.ttest_1samp(changes, 0).confidence_interval(0.95)
    assert found.by_mask
    assert found.count == 50
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert not comparison.summary(comparison.pairs[:40]).by_mask  # four masks


def test_swapping_a_and_b_turns_the_sign():
    a, b = timed([3.0, 4.0, 9.0]), timed([2.0, 5.0, 3.0])
    there, back = compare_rows(a, b, TIME).summary(), compare_rows(b, a, TIME).summary()
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low))
    assert (there.larger, there.smaller) == (1, 2) == (back.smaller, back.larger)


def test_rows_pair_only_where_all_terms_agree():
    a = rows([run_result(), run_result(seed=1), run_result(device="a40")])
    b = rows([run_result(time_ms=5.0), run_result(seed=2), run_result(model="fast")])
    found = compare_rows(a, b, TIME)
    assert len(found.pairs) == 1
    assert found.pairs[0].b == 5.0
    assert [r.seed for r in found.only_a] == [1, 0]
    assert [r.model for r in found.only_b] == ["full", "fast"]
    assert len(compare_rows(a, b, TIME, ignore=["seed"]).pairs) == 1  # seeds become repeats


def test_how_a_lone_head_was_written_does_not_matter():
    a = rows([run_result(heads="3", head=3)])
    b = rows([run_result(heads="3", head=None)])
    assert len(compare_rows(a, b, TIME).pairs) == 1


def test_counters_pair_only_where_the_cache_was_treated_alike():
    a = rows([measured_result()])
    b = rows([measured_result(cache_control="none")])
    assert len(compare_rows(a, b, TIME).pairs) == 1
    with pytest.raises(InputError, match="but for 'cache_control'"):
        compare_rows(a, b, READS)


def test_the_noise_of_repeats():
    """Two rows a side at ±d: s² = 4 d² / 2 degrees, a mean of two has s/√2, a difference s."""
    d = 0.01
    sides = [
        rows([measured_result(time_ms=t * math.exp(sign * d)) for sign in (-1, 1)])
        for t in (10.0, 10.1)
    ]
    comparison = compare_rows(*sides, TIME)
    assert comparison.noise_degrees == 2
    s = d * math.sqrt(2)
    assert comparison.pairs[0].noise == pytest.approx(s)
    assert comparison.summary().noise_floor == pytest.approx(stats.t.ppf(0.975, 2) * s)
    assert comparison.pairs[0].difference == pytest.approx(math.log(1.01))
    assert judge(comparison).outcome == "within noise"
    assert "no difference beyond noise" in judge(comparison).text


def test_without_repeats_the_noise_of_a_time_is_its_launches():
    comparison = compare_rows(rows([measured_result()]), rows([measured_result()]), TIME)
    one = 0.01 / 1.349 / 3 * 1.253  # IQR to sigma, 9 launches, a median
    assert comparison.pairs[0].noise == pytest.approx(one * math.sqrt(2))
    assert (
        compare_rows(rows([measured_result()]), rows([measured_result()]), READS).pairs[0].noise
        is None
    )


@pytest.mark.parametrize(
    ("times_b", "make", "origin_b", "outcome"),
    [
        ([10.0, 10.0, 10.0], run_result, "b", "equal"),
        ([9.8, 9.7, 9.8], run_result, "b", "better"),
        ([10.2, 10.3, 10.2], run_result, "b", "worse"),
        ([9.0, 11.0, 9.9], run_result, "b", "unclear"),
        ([9.9], run_result, "b", "better"),  # the simulator has no noise
        ([10.01], measured_result, "b", "within noise"),
        ([9.0], measured_result, "b", "better"),
        # All faster, unevenly: enough where nothing but known noise can have done it.
        ([9.9, 5.0, 9.9], measured_result, "a", "better"),
        ([9.9, 5.0, 9.9], measured_result, "b", "unclear"),
    ],
)
def test_verdicts(times_b, make, origin_b, outcome):
    a = timed([10.0] * len(times_b), make)
    comparison = compare_rows(a, timed(times_b, make, origin_b), TIME)
    assert judge(comparison).outcome == outcome == outcome_of(comparison, comparison.summary())


def test_a_single_pair_without_known_noise_proves_nothing():
    a = rows([measured_result(time_spread_frac=None)])
    comparison = compare_rows(a, rows([measured_result(time_ms=9.0)], "b"), TIME)
    assert judge(comparison).outcome == "unproven"
    assert judge(comparison).text.endswith("nothing says how much of that is noise.")


def test_the_sentence_of_each_metric():
    a = rows([run_result(energy_j=10.0)])
    b = rows([run_result(time_ms=8.0, hbm_read_bytes=500_000, l2_hit_frac=0.9, energy_j=11.0)])
    texts = {name: judge(compare_rows(a, b, metric)).text for name, metric in METRICS.items()}
    assert texts == {
        "time_ms": "B is 25.00 % faster than A (1 pair).",
        "hbm_read_bytes": "B reads 75.00 % less from HBM than A (1 pair).",
        "l2_hit_frac": "B has an L2 hit ratio 40.00 points higher than A (1 pair).",
        "energy_j": "B takes 10.00 % more energy than A (1 pair).",
    }
    slower = judge(compare_rows(b, a, TIME), ("new", "old")).text
    assert slower == "old is 25.00 % slower than new (1 pair)."


def test_a_hit_ratio_of_zero_is_a_value_and_zero_reads_are_not():
    a = rows([run_result(l2_hit_frac=0.0, hbm_read_bytes=0)])
    assert compare_rows(a, rows([run_result()]), HITS).summary().mean == 50.0
    with pytest.raises(InputError, match="none has a usable 'hbm_read_bytes'"):
        compare_rows(a, rows([run_result()]), READS)


def test_mixed_sources_and_regimes_are_refused():
    both = rows([run_result(), measured_result()])
    with pytest.raises(InputError, match=r"mix measured and simulated rows.*--where source="):
        compare_rows(both, both, TIME)
    both = rows([run_result(), run_result(regime="steady")])
    with pytest.raises(InputError, match="mix single and steady rows"):
        compare_rows(both, both, TIME)


def test_no_pairs_says_what_keeps_them_apart():
    with pytest.raises(InputError, match=r"1 would pair but for 'device' \(A: h200; B: a40\)"):
        compare_rows(rows([run_result()]), rows([run_result(device="a40")]), TIME)
    with pytest.raises(InputError, match=r"other masks \(A: m \[0-1\]; B: n \[0-1\]\)"):
        compare_rows(rows([run_result()]), rows([run_result(mask="n", mask_digest="d1")]), TIME)
    far = run_result(mask_digest="d1", policy="nnz", device="a40")
    with pytest.raises(InputError, match="agree in no choice"):
        compare_rows(rows([run_result()]), rows([far]), TIME)


def test_policies_of_one_measured_file():
    result = run(
        DATA / "paper/runs.jsonl", "--a-policy", "svd+nnz", "--b-policy", "resync", "--json"
    )
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    whole = lines[0]
    pairs = [line for line in lines if line["kind"] == "pair"]
    assert whole["pairs"] == len(pairs) == 4
    assert whole["mean_ratio"] == pytest.approx(
        math.exp(np.mean([math.log(p["b"] / p["a"]) for p in pairs]))
    )
    assert {(p["policy_a"], p["policy_b"]) for p in pairs} == {("svd+nnz", "resync")}
    assert {line["schema"] for line in lines} == {"wavealign.compare/1"}


def test_the_table(tmp_path):
    changes = [0.9, 0.92, 0.91]
    a = write_lines(tmp_path / "a.jsonl", [r.result for r in timed([10.0] * 3)])
    b = write_lines(
        tmp_path / "b.jsonl",
        [r.result for r in timed([10 * c for c in changes], version="0.2.0")],
    )
    result = run(a, b)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("B is 9.89 % faster than A (95 % CI ")
    assert "version: 0.1.0 in A, 0.2.0 in B" in result.stdout
    assert "3 rows, 0 without a partner" in result.stdout
    assert "best  pair  -10.00 %  10 -> 9 ms  m0 [0-1], original" in result.stdout
    assert "worst pair  -8.00 %" in result.stdout
    assert run(b, a, "--fail-over", "5").exit_code == 1
    assert run(b, a, "--fail-over", "20").exit_code == 0
    assert run(a, b, "--fail-over", "5").exit_code == 0


@pytest.mark.parametrize("name", ["run[cond]", "m:x[/attn1]", "a:smile:b"])
def test_names_are_shown_as_they_are(tmp_path, name):
    path = write_lines(tmp_path / "a.jsonl", [run_result(mask=name), run_result(mask="other")])
    result = run(path, path, "--by", "mask")
    assert result.exit_code == 0, result.output
    assert f" {name} [0-1] d0  " in result.stdout.partition("\nbest")[0]


def test_trials_and_sweep_folders(tmp_path):
    done = [trial(run_result(policy=p, time_ms=t)) for p, t in (("original", 10.0), ("nnz", 8.0))]
    write_lines(tmp_path / "sweep/trials/w1.jsonl", done)
    write_lines(tmp_path / "sweep/results.jsonl", [t.result for t in done])
    other = write_lines(tmp_path / "trials.jsonl", done)
    result = run(tmp_path / "sweep", other, "--json")
    assert json.loads(result.stdout.splitlines()[0])["outcome"] == "equal"
    assert len(load_rows([tmp_path / "sweep"]).rows) == 2  # not four
    result = run(tmp_path / "sweep", "--a-policy", "original", "--b-policy", "nnz")
    assert result.stdout.startswith("nnz is 25.00 % faster than original (1 pair).")


def test_a_trial_that_failed_and_was_done_later_counts_once(tmp_path):
    ok = trial(run_result())
    failed = trial(error="lost worker")
    gone = trial(error="out of memory", policy="nnz")
    write_lines(tmp_path / "s/trials/w1.jsonl", [failed, gone])
    write_lines(tmp_path / "s/trials/w2.jsonl", [ok, failed])
    loaded = load_rows([tmp_path / "s"])
    assert [row.result.policy for row in loaded.rows] == ["original"]
    assert [t.spec.policy for t in loaded.failed] == ["nnz"]


def test_a_trial_done_twice_is_the_one_the_sweep_keeps(tmp_path):
    once, again = trial(run_result(time_ms=10.0)), trial(run_result(time_ms=11.0))
    write_lines(tmp_path / "s/trials/w1.jsonl", [once])
    write_lines(tmp_path / "s/trials/w2.jsonl", [again])
    kept = by_identity(read_records(tmp_path / "s")).values()
    assert [t.result.time_ms for t in kept] == [10.0]
    assert [row.result.time_ms for row in load_rows([tmp_path / "s"]).rows] == [10.0]


def test_a_line_cut_off_in_a_running_sweep_is_passed_over(tmp_path):
    path = write_lines(tmp_path / "s/trials/w1.jsonl", [trial(run_result())])
    with path.open("a") as stream:
        stream.write(trial(run_result(policy="nnz")).to_json()[:100])
    loaded = load_rows([tmp_path / "s"])
    assert len(loaded.rows) == 1
    assert "cut off" in loaded.notes[0]
    with pytest.raises(InputError, match=r"w1.jsonl: line 2: is not JSON"):
        load_rows([path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ('{"schema": "wavealign.curve/1"}\n', "line 1: a row has schema 'wavealign.curve/1'"),
        ('{"time_ms": 3}\n', "line 1: a row has no schema"),
        ("[1, 2]\n", "line 1: is not a JSON object"),
        ("time\n", "line 1: is not JSON"),
        ('{"schema": "wavealign.run/1"}\n', "line 1: a result row lacks"),
    ],
)
def test_files_that_are_no_results(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    good = write_lines(tmp_path / "b.jsonl", [run_result()])
    result = run(path, good)
    assert result.exit_code == 2
    assert message in result.output
    assert str(path) in result.output


@pytest.mark.parametrize("figure", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("make", [lambda r: r, trial], ids=["run", "trial"])
@pytest.mark.parametrize("command", ["compare", "report"])
def test_figures_that_are_none_are_refused(tmp_path, command, make, figure):
    path, page = tmp_path / "a.jsonl", tmp_path / "r.html"
    good, bad = (make(run_result(time_ms=t)).to_json() for t in (1.0, 87.5))
    path.write_text(f"{good}\n{bad.replace('87.5', figure)}\n")
    second = ["-o", page] if command == "report" else [path]
    result = CliRunner().invoke(main, [command, str(path), *map(str, second)])
    assert result.exit_code == 2
    assert f"{path}: line 2: a " in result.output
    found = "Infinity" if figure == "1e999" else figure
    assert f"time_ms {found}; expected a number from 0 to 1e+15 or null." in result.output
    assert not page.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.jsonl", "b.jsonl"], "gone.jsonl: can't be read"),
        (["b.jsonl"], "give a second one, or two policies"),
        (["b.jsonl", "--a-policy", "nnz"], "belong together"),
        (["b.jsonl", "--a-policy", "nnz", "--b-policy", "nnz"], "are both 'nnz'"),
        (["b.jsonl", "--a-policy", "original", "--b-policy", "nzz"], "Did you mean 'nnz'?"),
        (["b.jsonl", "b.jsonl", "--where", "kernel"], "expected FIELD=VALUE"),
        (["b.jsonl", "b.jsonl", "--where", "kernl=fa4"], "Did you mean 'kernel'?"),
        (["b.jsonl", "b.jsonl", "--where", "kernel=fa5"], "Did you mean 'fa4'?"),
        (["b.jsonl", "b.jsonl", "--ignore", "sede"], "Did you mean 'seed'?"),
        (["b.jsonl", "b.jsonl", "--by", "masks"], "Did you mean 'mask'?"),
        (["b.jsonl", "b.jsonl", "--metric", "speed"], "Invalid value for '--metric'"),
        (["failed.jsonl", "b.jsonl"], "holds no runs (only failed trials)"),
        (["empty", "b.jsonl"], "empty: holds neither trials/ nor *.jsonl"),
    ],
)
def test_bad_usage(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "b.jsonl", [run_result(), run_result(policy="nnz")])
    write_lines(tmp_path / "failed.jsonl", [trial(error="no memory")])
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_records_are_plain_json():
    comparison = compare_rows(timed([1.0, 2.0]), timed([1.1, 2.0]), TIME)
    for record in records(comparison, ["mask", "seed"], judge(comparison)):
        json.dumps(record, allow_nan=False)


def test_the_noise_floor_is_that_of_a_mean_of_pairs():
    """Four pairs of two repeats each: pooled variance, Student's t, by n and not its root."""
    times = [[(1.0, 1.1), (2.0, 2.1)], [(3.0, 3.1), (3.0, 3.3)], [(4.0, 4.4), (5.0, 5.1)]]
    sides = [
        rows(
            measured_result(mask_digest=f"d{i}", time_ms=t)
            for i, pair in enumerate(times)
            for t in pair[side]
        )
        for side in (0, 1)
    ]
    found = compare_rows(*sides, TIME).summary()
    groups = [np.log(repeats) for pair in times for repeats in pair]
    variance = sum(((logs - logs.mean()) ** 2).sum() for logs in groups) / len(groups)
    of_a_pair = math.sqrt(variance * (1 / 2 + 1 / 2))
    factor = stats.t.ppf(0.975, len(groups))
    assert found.noise_floor == pytest.approx(factor * of_a_pair * math.sqrt(3) / 3)


@pytest.mark.parametrize(
    ("field", "other"),
    [("kv_block_bytes", 32768), ("batch", 2), ("seed", 1), ("wave", 8), ("regime", "steady")],
)
def test_what_differs_is_no_repeat(field, other):
    one, two = run_result(time_ms=1.0), run_result(time_ms=2.0, **{field: other})
    assert one.launch.key() != two.launch.key()
    with pytest.raises(InputError, match=f"would pair but for '{field}'"):
        compare_rows(rows([one]), rows([two]), TIME)
