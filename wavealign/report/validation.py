"""Tables for people: predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from wavealign.report.tables import figure, table_frame
from wavealign.runs.baseline import baseline_of, change, speedup
from wavealign.runs.ranking import rank
from wavealign.runs.result import Result

Pair = tuple[Result, Result | None]
"""A measured row, and what was predicted for it; None without a profile of device and kernel."""


def validation_table(pairs: Sequence[Pair]) -> Table:
    """Policy × (measured, predicted, difference) of time, hit ratio and HBM reads, one regime."""
    table = table_frame("policy", right=(
        "time", "spread", "predicted", "off", "speedup", "predicted", "L2 hit", "predicted", "off",
        "HBM reads", "predicted", "limit", "clock", "energy",
    ))  # fmt: skip
    base = baseline_of(measured for measured, _ in pairs)
    base_predicted = next((predicted for measured, predicted in pairs if measured is base), None)
    for measured, predicted in pairs:
        was = measured.outcome
        table.add_row(
            measured.policy, figure(was.time_ms, "{:.2f} ms"),
            figure(was.time_spread_frac, "{:.1%}"),
            figure(getattr(predicted, "time_ms", None), "{:.2f} ms"),
            figure(change(measured, predicted), "{:+.1%}"),
            figure(speedup(base, measured), "{:.3f}x"),
            figure(speedup(base_predicted, predicted), "{:.3f}x"),
            figure(was.l2_hit_frac, "{:.1%}"),
            figure(getattr(predicted, "l2_hit_frac", None), "{:.1%}"),
            figure(_points(predicted, measured), "{:+.1f} pt"),
            figure(was.hbm_read_bytes, "{:.2f} GB", 1e-9),
            figure(getattr(predicted, "hbm_read_bytes", None), "{:.2f} GB", 1e-9),
            figure(was.limit_ms, "{:.2f} ms"), figure(was.clock_ghz, "{:.2f} GHz"),
            figure(was.energy_j, "{:.2f} J"),
        )  # fmt: skip
    return table


def verdict_line(pairs: Sequence[Pair]) -> str:
    """Whether the prediction picks the right policy, in a sentence."""
    both = [(m, p) for m, p in pairs if p is not None]
    if not both:
        return "No prediction."
    predicted = [p.time_ms for _, p in both if p.time_ms is not None]
    measured = [m.time_ms for m, _ in both if m.time_ms is not None]
    if len(both) < 2 or len(predicted) < len(both) or len(measured) < len(both):
        return "One policy has no ranking."
    ranking = rank(predicted, measured)
    chosen, fastest = (both[i][0].policy for i in (ranking.chosen, ranking.fastest))
    tau, count = ranking.kendall_tau, ranking.agree + ranking.disagree
    pairs_text = "no two policies differ by more than 1 %"
    if tau is not None:
        pairs_text = f"Kendall tau {tau:.2f} over {count} pairs that differ by more than 1 %"
    choice = f"predicted and measured best: {chosen}"
    if chosen != fastest:
        won = f"which is {100 * ranking.regret_frac:.2f} % faster"
        choice = f"predicted best: {chosen}, measured best: {fastest}, {won}"
    return f"{choice}; {pairs_text}."


def costs_line(rows: Sequence[Result]) -> str:
    """What applying the schedules cost beside the kernel, and how right the output is."""
    gather = max(row.gather_ms or 0.0 for row in rows)
    scatter = max(row.scatter_ms or 0.0 for row in rows)
    moved = "nothing is moved: the kernel takes the row order as a table"
    if gather:
        moved = (
            f"moving Q into launch order takes {gather:.3f} ms, O and LSE back {scatter:.3f} ms, "
            "in no time above"
        )
    errors = [row.error_frac for row in rows if row.error_frac is not None]
    checked = "not checked against float32"
    if errors:
        checked = f"relative error against float32 at most {max(errors):.1e}"
    return f"{moved}; {checked}."


def _points(predicted: Result | None, measured: Result) -> float | None:
    was = measured.outcome.l2_hit_frac
    will = predicted.outcome.l2_hit_frac if predicted is not None else None
    return None if was is None or will is None else 100 * (will - was)
