"""The page keeps launches apart: which prediction belongs to which run, profiles, curves."""

from __future__ import annotations

import pytest
from helpers import measured_result, random_mask, run_result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wavealign.order import build_schedule
from wavealign.report.page import curves as curves_module
from wavealign.report.page.curves import curve_sets
from wavealign.report.page.gather import blocks, unit_of
from wavealign.report.page.html import render
from wavealign.report.page.l2 import given_l2
from wavealign.report.page.prediction import predictions
from wavealign.runs.files import Loaded, Row
from wavealign.sim.curve import hit_curve
from wavealign.sim.setup import Setup
from wavealign.sim.simulate import run_schedule

OWN = {"full": 60_964_209, "fast": Setup.make("h200", model="fast").l2_capacity_bytes}
LAUNCH = {"batch": 1, "kv_heads": 2, "head_dim": 128, "dtype": "bf16"}


def was(**changes):
    """A measured row of today: it says what was launched."""
    return measured_result(**{**LAUNCH, "time_ms": 10.0, **changes})


def will(**changes):
    """A simulated row of today: it names its profile."""
    return run_result(**{**LAUNCH, "device_digest": "aaaaaaaa", "time_ms": 11.0, **changes})


def will_earlier(**changes):
    """A simulated row of an earlier version."""
    return run_result(**{"time_ms": 11.0, **changes})


def found(*results):
    return predictions([Row(result, "a") for result in results])


def only(*results):
    (prediction,) = found(*results)
    assert prediction.count == 1
    return prediction.time_frac


def page(results):
    return render(Loaded(rows=[Row(result, "a") for result in results]), {}, [], "t")


@pytest.mark.parametrize("make", [will, will_earlier])
@pytest.mark.parametrize("model", ["full", "fast"])
def test_a_prediction_of_the_same_launch_belongs_to_it(make, model):
    assert only(was(), make(model=model, l2_capacity_bytes=OWN[model])) == pytest.approx(0.1)


OTHERS = [
    {"l2_capacity_bytes": 10 << 20, "l2_bytes": 10 << 20},
    {"head_dim": 64, "kv_block_bytes": 32768}, {"batch": 2}, {"kv_heads": 1},
    {"dtype": "fp16"}, {"wave": 264}, {"regime": "steady"},
    {"seed": 1}, {"heads": "0"}, {"schedule_file": "x.npz"}, {"kernel": "fa2"}, {"device": "a40"},
]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("first", [True, False])
def test_one_of_another_launch_does_not(other, first):
    """Whatever comes first: the perfect prediction isn't taken for 100 % off."""
    wrong, right = will(time_ms=20.0, **other), will(time_ms=10.0)
    assert found(was(), wrong) == []
    assert only(was(), *((wrong, right) if first else (right, wrong))) == pytest.approx(0)


@pytest.mark.parametrize(
    "other", [{"l2_capacity_bytes": 10 << 20}, {"kv_block_bytes": 32768}, {"wave": 264}]
)
@pytest.mark.parametrize("first", [True, False])
def test_nor_where_rows_of_an_earlier_version_only_show_it(other, first):
    wrong, right = will_earlier(time_ms=20.0, **other), will_earlier(time_ms=10.0)
    assert found(was(), wrong) == []
    assert only(was(), *((wrong, right) if first else (right, wrong))) == pytest.approx(0)


@pytest.mark.parametrize("other", [{"batch": 2}, {"kv_heads": 1},
                                   {"head_dim": 64, "kv_block_bytes": 32768}])  # fmt: skip
def test_a_run_of_another_launch_has_no_earlier_prediction(other):
    """The simulator knew one sequence and a K/V head a head."""
    assert found(was(**other), will_earlier()) == []


def test_without_a_profile_one_size_of_l2_is_the_devices_own():
    run, rows = was(device="mine"), [will_earlier(device="mine", l2_capacity_bytes=size)
                                     for size in (10 << 20, 20 << 20)]  # fmt: skip
    assert only(run, rows[0]) == pytest.approx(0.1)
    assert found(run, *rows) == []
    # A row that says so needs no profile.
    assert only(run, *rows, will(device="mine", l2_bytes=None)) == pytest.approx(0.1)


def test_each_profile_of_a_name_predicts_on_its_own():
    rows = [was(), will(time_ms=10.0), will(time_ms=12.0, device_digest="bbbbbbbb")]
    for order in (rows, rows[::-1]):
        labels = {p.label: (p.count, p.time_frac) for p in found(*order)}
        assert labels == {
            "h200 · fa4 · single, full model, profile aaaaaa": (1, 0.0),
            "h200 · fa4 · single, full model, profile bbbbbb": (1, pytest.approx(0.2)),
        }


def test_repeats_of_a_prediction_are_one():
    assert only(was(), will(time_ms=8.0), will(time_ms=12.5)) == pytest.approx(0)


def test_choosing_is_judged_within_a_condition():
    """Two seeds, each ranked alone: times of one seed say nothing about policies of the other."""
    rows = [
        make(policy=policy, seed=seed, time_ms=time_ms)
        for make in (was, will)
        for policy, seed, time_ms in (("original", 0, 9.0), ("nnz", 0, 8.0), ("original", 1, 5.0),
                                      ("nnz", 1, 4.0))
    ]  # fmt: skip
    (prediction,) = found(*rows)
    assert (prediction.count, prediction.regret_frac, prediction.masks) == (4, 0.0, 1)


def test_profiles_of_one_name_are_settings_of_their_own():
    rows = [will(), will(policy="nnz", time_ms=10.0)]
    rows += [row.replaced(device_digest="bbbbbbbb", time_ms=22.0) for row in rows]
    labels = {block.label: block.cells["m"]["original"].time_ms for block in blocks(of(rows))}
    assert labels == {
        "simulated · h200 · fa4 · profile aaaaaa": 11.0,
        "simulated · h200 · fa4 · profile bbbbbb": 22.0,
    }
    (block,) = blocks(of([*rows, will_earlier()]))  # which doesn't say whose it is
    assert block.label == "simulated · h200 · fa4"


def of(results):
    return Loaded(rows=[Row(result, "a") for result in results])


ROWS = [
    make(policy=policy, **other)
    for make in (was, will)
    for policy in ("original", "nnz", "svd+nnz")
    for other in ({}, {"batch": 2}, {"mask": "n", "mask_digest": "d1"}, {"seed": 1})
] + [will(device_digest="bbbbbbbb"), will_earlier(model="fast"), will(time_ms=12.0)]  # fmt: skip


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.permutations(ROWS))
def test_rows_in_any_order_give_the_same_page(rows):
    assert page(rows) == page(ROWS)


def test_the_l2_that_was_given():
    assert given_l2(will(l2_bytes=5).launch) == 5
    assert given_l2(will(l2_capacity_bytes=5).launch) is None  # it says: its profile's own
    assert given_l2(will_earlier().launch) is None
    assert given_l2(will_earlier(l2_capacity_bytes=5).launch) == 5
    assert given_l2(will_earlier(device="mine", l2_capacity_bytes=5).launch) is None
    assert given_l2(was().launch) is None


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize(("head_dim", "wave"), [(128, 8), (64, 8), (64, 16)])
def test_curves_are_those_of_the_launch(monkeypatch, says, head_dim, wave):
    mask = random_mask(3, (1, 60, 400))
    setup = Setup.make("h200", head_dim=head_dim, wave=wave, l2_bytes=8 << 20)
    schedule = build_schedule(mask, "original", wave)
    row = run_schedule(mask, schedule, setup, name="m")
    fields = {"head_dim": head_dim, "device_digest": "a", "l2_bytes": 8 << 20}
    row = row.replaced(**(fields if says else dict.fromkeys(fields)))
    drawn = []
    monkeypatch.setattr(curves_module, "chart", lambda *axes, **parts: drawn.append(parts) or "")
    (curves,) = curve_sets(blocks(of([row])), {unit_of(row): mask}, 1, True)
    assert ("head_dim 64" in curves.title) == (says and head_dim == 64)
    (parts,) = drawn
    assert parts["verticals"] == [(8.0, "given, 8 MiB")]
    line = next(line for line in parts["lines"] if line.tip == "original")
    sizes = [round(mib * 2**20) for mib, _ in line.points]
    assert 8 << 20 in sizes
    expected = hit_curve(mask, schedule, setup, sizes).hit_frac
    assert [miss for _, miss in line.points] == pytest.approx(list(1 - expected))


def test_settings_of_other_launches_have_curves_of_their_own():
    rows = [will(), will(head_dim=64, kv_block_bytes=32768), will(batch=2), was(),
            will(l2_bytes=5 << 20, l2_capacity_bytes=5 << 20)]  # fmt: skip
    sets = {s.title: (len(s.labels), s.l2_bytes) for s in curve_sets(blocks(of(rows)), {}, 1, True)}
    assert sets == {
        "h200 · fa4": (3, {None, 5 << 20}),
        "h200 · fa4 · head_dim 64": (1, {None}),
        "h200 · fa4 · batch 2": (1, {None}),
    }
