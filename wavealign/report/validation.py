"""Tables for people: predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from wavealign.report.tables import table_frame
from wavealign.runs.ranking import rank
from wavealign.runs.result import Result

Pair = tuple[Result, Result | None]
"""A measured row, and what was predicted for it; None without a profile of device and kernel."""


def validation_table(pairs: Sequence[Pair]) -> Table:
    """Policy × (measured, predicted, difference) of time, hit ratio and HBM reads, one regime."""
    table = table_frame()
    table.add_column("policy")
    for heading in (
        "time", "spread", "predicted", "off", "speedup", "predicted", "L2 hit", "predicted", "off",
        "HBM reads", "predicted", "limit", "clock", "energy",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    base = next((pair for pair in pairs if pair[0].policy == "original"), None)
    for measured, predicted in pairs:
        table.add_row(
            measured.policy,
            _cell(measured.time_ms, "{:.2f} ms"),
            _cell(measured.time_spread_frac, "{:.1%}"),
            _cell(predicted.time_ms if predicted else None, "{:.2f} ms"),
            _cell(_ratio(predicted, measured), "{:+.1%}"),
            _cell(_speedup(base and base[0], measured), "{:.3f}x"),
            _cell(_speedup(base and base[1], predicted), "{:.3f}x"),
            _cell(measured.l2_hit_frac, "{:.1%}"),
            _cell(predicted.l2_hit_frac if predicted else None, "{:.1%}"),
            _cell(_points(predicted, measured), "{:+.1f} pt"),
            _cell(_giga(measured.hbm_read_bytes), "{:.2f} GB"),
            _cell(_giga(predicted.hbm_read_bytes) if predicted else None, "{:.2f} GB"),
            _cell(measured.limit_ms, "{:.2f} ms"),
            _cell(measured.clock_ghz, "{:.2f} GHz"),
            _cell(measured.energy_j, "{:.2f} J"),
        )
    return table


def verdict_line(pairs: Sequence[Pair]) -> str:
    """Whether the prediction picks the right policy, in a sentence."""
    both = [(p.time_ms, m.time_ms, m.policy) for m, p in pairs if p is not None]
    if not both:
        return "No prediction."
    predicted = [p for p, _, _ in both if p is not None]
    measured = [m for _, m, _ in both if m is not None]
    if len(both) < 2 or len(predicted) < len(both) or len(measured) < len(both):
        return "One policy has no ranking."
    ranking = rank(predicted, measured)
    chosen, fastest = both[ranking.chosen][2], both[ranking.fastest][2]
    tau = ranking.kendall_tau
    pairs_text = (
        "no two policies differ by more than 1 %"
        if tau is None
        else f"Kendall tau {tau:.2f} over {ranking.agree + ranking.disagree} pairs that differ by "
        "more than 1 %"
    )
    choice = (
        f"predicted and measured best: {chosen}"
        if chosen == fastest
        else f"predicted best: {chosen}, measured best: {fastest}, which is "
        f"{100 * ranking.regret_frac:.2f} % faster"
    )
    return f"{choice}; {pairs_text}."


def costs_line(rows: Sequence[Result]) -> str:
    """What applying the schedules cost beside the kernel, and how right the output is."""
    gather = max(row.gather_ms or 0.0 for row in rows)
    scatter = max(row.scatter_ms or 0.0 for row in rows)
    moved = (
        f"moving Q into launch order takes {gather:.3f} ms, O and LSE back {scatter:.3f} ms, "
        "in no time above"
        if gather
        else "nothing is moved: the kernel takes the row order as a table"
    )
    errors = [row.error_frac for row in rows if row.error_frac is not None]
    checked = (
        f"relative error against float32 at most {max(errors):.1e}"
        if errors
        else "not checked against float32"
    )
    return f"{moved}; {checked}."


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def _ratio(predicted: Result | None, measured: Result) -> float | None:
    if predicted is None or not predicted.time_ms or not measured.time_ms:
        return None
    return predicted.time_ms / measured.time_ms - 1


def _points(predicted: Result | None, measured: Result) -> float | None:
    if predicted is None or predicted.l2_hit_frac is None or measured.l2_hit_frac is None:
        return None
    return 100 * (predicted.l2_hit_frac - measured.l2_hit_frac)


def _speedup(base: Result | None, row: Result | None) -> float | None:
    if base is None or row is None or not base.time_ms or not row.time_ms:
        return None
    return base.time_ms / row.time_ms
