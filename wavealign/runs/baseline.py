"""Against `original`: what an order wins, run by run and over a campaign."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wavealign.runs.files import Row
from wavealign.runs.launch import BASELINE, Launch
from wavealign.runs.metrics import METRICS, geometric_mean
from wavealign.runs.result import Result
from wavealign.runs.trial import TrialRecord


def speedup(base: Result | None, run: Result | None, field: str = "time_ms") -> float | None:
    """How many times as large the baseline's figure is; None where either is missing or 0.

    Args:
        base, run: results of two policies.
        field: the figure.
    """
    before, after = getattr(base, field, None), getattr(run, field, None)
    return before / after if before and after else None


def change(base: Result | None, run: Result | None, field: str = "time_ms") -> float | None:
    """How much larger a run's figure is, as a share of the baseline's; None where not known.

    Args:
        base, run, field: see `speedup`.
    """
    before, after = getattr(base, field, None), getattr(run, field, None)
    return after / before - 1 if before and after is not None else None


def baseline_of(runs: Iterable[Result]) -> Result | None:
    """The first of them that ran in today's order."""
    return next((run for run in runs if run.launch.policy == BASELINE), None)


def mean_of(rows: Iterable[Row], field: str) -> float | None:
    """The mean of a figure of `METRICS` over repeats; None where no row knows it."""
    values = [v for row in rows if (v := getattr(row.result, field)) is not None]
    return METRICS[field].mean(values) if values else None


def mean_speedup(base: Sequence[Row], rows: Sequence[Row], field: str = "time_ms") -> float | None:
    """The mean of the baseline's figure / a row's.

    Args:
        base: rows of `original`.
        rows: of another order. Each is compared with the baseline of its own campaign, so that a
            card's day cancels; with all of `base` where its campaign has none.
        field: of the row.
    """
    found = []
    for row in rows:
        value = getattr(row.result, field)
        own = [other for other in base if other.origin == row.origin]
        reference = mean_of(own, field) or mean_of(base, field)
        if value and reference:
            found.append(reference / value)
    return geometric_mean(found) if found else None


def best_by_condition(
    records: Sequence[TrialRecord], field: str
) -> dict[Launch, tuple[TrialRecord, TrialRecord | None]]:
    """Per condition, the best trial that is done and its baseline.

    Args:
        records: of a sweep.
        field: of the result row, minimised; rows where it isn't known are left out.

    Returns:
        Baseline spec → (best, baseline or None where it failed), in the order of `records`.
    """
    groups: dict[Launch, list[TrialRecord]] = {}
    for record in records:
        if getattr(record.result, field, None) is not None:
            groups.setdefault(record.spec.baseline, []).append(record)
    return {
        condition: (
            min(group, key=lambda r: (getattr(r.result, field), r.spec.policy)),
            next((r for r in group if r.spec.policy == BASELINE), None),
        )
        for condition, group in groups.items()
    }
