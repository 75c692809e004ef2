"""What a sweep found, for people: the best policy of each condition, and progress in a line."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from wavealign.report.tables import or_dash, table_frame
from wavealign.runs.launch import Launch
from wavealign.runs.result import Result
from wavealign.runs.trial import TrialRecord
from wavealign.sweep.run import best_by_condition
from wavealign.units import decimal_size, decimals, format_size

_ALWAYS = ("mask", "device")
_WHERE_SEVERAL = (
    "heads", "kernel", "l2_bytes", "wave", "model", "regime", "seed", "head_dim", "dtype",
)  # fmt: skip


def best_table(records: Sequence[TrialRecord], field: str) -> Table:
    """The best trial of each condition beside `original`, one row a condition.

    Args:
        records: of one source.
        field: of the result row, minimised.
    """
    best = best_by_condition(records, field)
    several = [name for name in _WHERE_SEVERAL if _varies(best, name)]
    table = table_frame()
    for name in (*_ALWAYS, *several):
        table.add_column({"l2_bytes": "L2"}.get(name, name))
    table.add_column("best policy")
    for heading in ("time", "speedup", "HBM reads", "change", "energy", "change", "L2 hit",
                    "over limit", "planning"):  # fmt: skip
        table.add_column(heading, justify="right")
    for condition, (record, base) in best.items():
        row = record.result
        assert row is not None
        before = base.result if base is not None else None
        table.add_row(
            *(_cell(condition, name) for name in (*_ALWAYS, *several)),
            row.policy,
            _figure(row.time_ms, "{:.3f} ms"),
            _ratio(before, row, "time_ms"),
            or_dash(row.hbm_read_bytes, lambda v: decimal_size(v)(v)),
            _change(before, row, "hbm_read_bytes"),
            or_dash(row.energy_j, lambda v: decimals(v, "J")(v)),
            _change(before, row, "energy_j"),
            _figure(row.l2_hit_frac, "{:.1f} %", 0.01),
            "-" if not (row.time_ms and row.limit_ms) else f"{row.time_ms / row.limit_ms:.3f}x",
            _figure(record.planning_ms, "{:.0f} ms"),
        )
    return table


class Pace:
    """The words beside a sweep's progress: what failed, how fast, the best so far.

    Args:
        field: of the result row, minimised.
    """

    def __init__(self, field: str) -> None:
        self._field, self._start = field, time.monotonic()
        self._ran = self.failed = 0
        self._bases: dict[tuple[Any, ...], float] = {}
        self._lowest: dict[tuple[Any, ...], TrialRecord] = {}

    def line(self, record: TrialRecord, ran: bool) -> str:
        """Take one more trial into account, and say how things stand."""
        self._ran += ran
        self.failed += record.status == "failed"
        self._take(record)
        minutes = max(time.monotonic() - self._start, 1e-9) / 60
        parts = [f"{self.failed} failed", f"{self._ran / minutes:.0f} trials/min", *self._best()]
        return ", ".join(parts) + f"; {record.spec.policy}"

    def _take(self, record: TrialRecord) -> None:
        value = self._value(record)
        if value is None:
            return
        key = _condition_key(record.spec)
        if record.spec.policy == "original":
            self._bases[key] = value
        lowest = self._lowest.get(key)
        if lowest is None or value < (self._value(lowest) or 0):
            self._lowest[key] = record

    def _best(self) -> list[str]:
        """The condition with the largest gain over its baseline."""
        gains = [
            (self._bases[key] / value, record)
            for key, record in self._lowest.items()
            if key in self._bases and (value := self._value(record))
        ]
        if not gains:
            return []
        gain, record = max(gains, key=lambda pair: pair[0])
        return [f"best {gain:.3f}x ({record.spec.policy}, {record.spec.mask})"]

    def _value(self, record: TrialRecord) -> float | None:
        found: float | None = getattr(record.result, self._field) if record.result else None
        return found


def _varies(conditions: Iterable[Launch], name: str) -> bool:
    """Whether a field has more values than its mask and device decide."""
    pairs = {(c.mask if name == "heads" else "", c.device, getattr(c, name)) for c in conditions}
    return len(pairs) > len({pair[:2] for pair in pairs})


def _condition_key(spec: Launch) -> tuple[Any, ...]:
    return (spec.source, *(getattr(spec, name) for name in ("mask_digest", "device")),
            *(getattr(spec, name) for name in _WHERE_SEVERAL))  # fmt: skip


def _cell(condition: Launch, name: str) -> str:
    value = getattr(condition, name)
    if name == "l2_bytes":
        return "own" if value is None else format_size(value)
    return str(value)


def _figure(value: float | None, text: str, unit: float = 1.0) -> str:
    return "-" if value is None else text.format(value / unit)


def _ratio(before: Result | None, after: Result, field: str) -> str:
    base, value = getattr(before, field, None), getattr(after, field)
    return f"{base / value:.3f}x" if base and value else "-"


def _change(before: Result | None, after: Result, field: str) -> str:
    base, value = getattr(before, field, None), getattr(after, field)
    return f"{100 * (value / base - 1):+.1f} %" if base and value is not None else "-"
