"""Against `original`, ranking, means: closed forms."""

from __future__ import annotations

import math

import pytest
from helpers import measured_result, run_result, trial
from hypothesis import given
from hypothesis import strategies as st

from wavealign.runs.baseline import (
    baseline_of,
    best_by_condition,
    change,
    mean_of,
    mean_speedup,
    speedup,
)
from wavealign.runs.files import Row, in_order
from wavealign.runs.metrics import METRICS, geometric_mean
from wavealign.runs.ranking import as_good, ranked, standings

TIMES = st.lists(st.floats(0.1, 100), min_size=1, max_size=8)


def test_speedup_and_change_by_hand():
    base, run = run_result(time_ms=10.0, energy_j=4.0), run_result(time_ms=8.0, energy_j=5.0)
    assert speedup(base, run) == 1.25
    assert change(base, run) == pytest.approx(-0.2)
    assert change(base, run, "energy_j") == 0.25
    assert speedup(base, run, "belady_bytes") is None
    assert speedup(None, run) is speedup(base, None) is change(None, run) is None
    nothing = run_result(hbm_read_bytes=0)
    assert change(run, nothing, "hbm_read_bytes") == -1.0  # a launch may read nothing
    assert speedup(run, nothing, "hbm_read_bytes") is None
    assert change(nothing, run, "hbm_read_bytes") is None


def test_the_baseline_is_the_first_original():
    runs = [run_result(policy="nnz"), run_result(time_ms=1.0), run_result(time_ms=2.0)]
    assert baseline_of(runs) is runs[1]
    assert baseline_of(runs[:1]) is None


@given(TIMES)
def test_means(times):
    rows = [Row(run_result(time_ms=t, l2_hit_frac=t / 100), "a") for t in times]
    assert mean_of(rows, "time_ms") == pytest.approx(math.prod(times) ** (1 / len(times)))
    assert mean_of(rows, "l2_hit_frac") == pytest.approx(sum(times) / len(times) / 100)
    assert mean_of(rows, "energy_j") is None
    assert geometric_mean(times[:1]) == times[0]
    assert METRICS["hbm_read_bytes"].mean([0.0, 4.0]) == 2.0  # no logarithm of 0


@given(st.floats(0.5, 2), TIMES, TIMES)
def test_a_day_that_is_slower_cancels(slower, first, second):
    """Every time of a campaign times a constant: the speedup is the same."""

    def campaign(origin, factor):
        base = [Row(measured_result(time_ms=factor * t), origin) for t in first]
        runs = [Row(measured_result(policy="nnz", time_ms=factor * t), origin) for t in second]
        return base, runs

    base, runs = campaign("mon", 1.0)
    more_base, more_runs = campaign("tue", slower)
    alone = mean_speedup(base, runs)
    assert alone == pytest.approx(geometric_mean(first) / geometric_mean(second))
    assert mean_speedup([*base, *more_base], [*runs, *more_runs]) == pytest.approx(alone)
    assert mean_speedup([], runs) is None


def test_the_best_by_condition():
    done = [
        trial(run_result(policy=policy, time_ms=time_ms, wave=wave))
        for wave, times in ((64, {"original": 9.0, "svd": 7.0, "nnz": 7.0}), (132, {"nnz": 5.0}))
        for policy, time_ms in times.items()
    ]
    found = best_by_condition([*done, trial(error="lost")], "time_ms")
    assert [(c.wave, best.spec.policy) for c, (best, _) in found.items()] == [
        (64, "nnz"), (132, "nnz"),
    ]  # fmt: skip
    assert [base and base.result.time_ms for _, base in found.values()] == [9.0, None]


def test_ranking_by_hand():
    """`b` ran on one mask only: it is judged against the first there, and isn't ranked."""
    speedups = {"a": {"x": 2.0, "y": 0.5}, "b": {"y": 1.5}, "c": {"x": 1.2, "y": 1.2}}
    order = ranked(speedups)
    assert order == [("c", pytest.approx(1.2)), ("a", pytest.approx(1.0))]
    found = {s.policy: (s.ratio, s.columns) for s in standings(speedups, "c")}
    assert found == {
        "b": (pytest.approx(1.25), 1),
        "c": (pytest.approx(1.0), 2),
        "a": (pytest.approx(1 / 1.2), 2),
    }
    assert [s.policy for s in standings(speedups, "c")] == ["b", "c", "a"]
    assert ranked({}) == []


@pytest.mark.parametrize(
    ("gain", "best", "good"),
    [(1.3, 1.3, True), (1.29, 1.3, True), (1.28, 1.3, False), (None, 1.3, False)],
)
def test_within_one_percent_is_as_good(gain, best, good):
    assert as_good(gain, best) is good


@given(st.permutations(range(5)))
def test_rows_in_order_whatever_the_order(order):
    rows = [
        Row(run_result(policy="nnz"), "a"), Row(run_result(), "b"), Row(run_result(seed=1), "a"),
        Row(run_result(heads="10"), "a"), Row(run_result(heads="9"), "a", 1.0),
    ]  # fmt: skip
    found = in_order(rows[i] for i in order)
    assert found == [rows[1], rows[2], rows[0], rows[4], rows[3]]
