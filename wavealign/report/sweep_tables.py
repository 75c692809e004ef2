"""What a sweep found, for people: the best policy of each condition, and progress in a line."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.table import Table

from wavealign.report.tables import figure, table_frame
from wavealign.runs.baseline import best_by_condition, change, speedup
from wavealign.runs.launch import BASELINE, Launch
from wavealign.runs.trial import TrialRecord
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
    names = ["L2" if name == "l2_bytes" else name for name in (*_ALWAYS, *several)]
    table = table_frame(*names, "best policy", right=(
        "time", "speedup", "HBM reads", "change", "energy", "change", "L2 hit", "over limit",
        "planning",
    ))  # fmt: skip
    for condition, (record, base) in best.items():
        row = record.result
        assert row is not None
        before = base.result if base is not None else None
        took = row.outcome
        over = took.time_ms / took.limit_ms if took.time_ms and took.limit_ms else None
        table.add_row(
            *(_cell(condition, name) for name in (*_ALWAYS, *several)), row.policy,
            figure(took.time_ms, "{:.3f} ms"), figure(speedup(before, row), "{:.3f}x"),
            figure(took.hbm_read_bytes, lambda v: decimal_size(v)(v)),
            figure(change(before, row, "hbm_read_bytes"), "{:+.1f} %", 100),
            figure(took.energy_j, lambda v: decimals(v, "J")(v)),
            figure(change(before, row, "energy_j"), "{:+.1f} %", 100),
            figure(took.l2_hit_frac, "{:.1f} %", 100), figure(over, "{:.3f}x"),
            figure(record.planning_ms, "{:.0f} ms"),
        )  # fmt: skip
    return table


class Pace:
    """The words beside a sweep's progress: what failed, how fast, the best so far.

    Args:
        field: of the result row, minimised.
    """

    def __init__(self, field: str) -> None:
        self._field, self._start = field, time.monotonic()
        self._ran = self.failed = 0
        self._bases: dict[Launch, TrialRecord] = {}
        self._lowest: dict[Launch, TrialRecord] = {}

    def line(self, record: TrialRecord, ran: bool) -> str:
        """Take one more trial into account, and say how things stand."""
        self._ran += ran
        self.failed += record.status == "failed"
        self._take(record)
        minutes = max(time.monotonic() - self._start, 1e-9) / 60
        parts = [f"{self.failed} failed", f"{self._ran / minutes:.0f} trials/min", *self._best()]
        return ", ".join(parts) + f"; {record.spec.policy}"

    def _take(self, record: TrialRecord) -> None:
        value = getattr(record.result, self._field, None)
        if value is None:
            return
        condition = record.spec.baseline
        if record.spec.policy == BASELINE:
            self._bases[condition] = record
        lowest = self._lowest.get(condition)
        if lowest is None or value < getattr(lowest.result, self._field):
            self._lowest[condition] = record

    def _best(self) -> list[str]:
        """The condition with the largest gain over its baseline."""
        gains = [
            (gain, record)
            for condition, record in self._lowest.items()
            if condition in self._bases
            and (gain := speedup(self._bases[condition].result, record.result, self._field))
        ]
        if not gains:
            return []
        gain, record = max(gains, key=lambda pair: pair[0])
        return [f"best {gain:.3f}x ({record.spec.policy}, {record.spec.mask})"]


def _varies(conditions: Iterable[Launch], name: str) -> bool:
    """Whether a field has more values than its mask and device decide."""
    pairs = {(c.mask if name == "heads" else "", c.device, getattr(c, name)) for c in conditions}
    return len(pairs) > len({pair[:2] for pair in pairs})


def _cell(condition: Launch, name: str) -> str:
    value = getattr(condition, name)
    if name == "l2_bytes":
        return "own" if value is None else format_size(value)
    return str(value)
