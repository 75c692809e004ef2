"""What a policy gains on a mask: means over repeats, over the heads of a mask, over campaigns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from wavealign.runs.files import Row


@dataclass(frozen=True)
class Cell:
    """A policy on a unit or a column, in one setting; means over repeats, seeds and campaigns.

    Attributes:
        policy: the recipe.
        time_ms, hit_frac, hbm_read_bytes, energy_j: None where a row doesn't say.
        speedup: time of `original` in the same campaign / time.
        read_ratio: HBM reads / those of `original`.
        planning_ms: making the schedule.
        rows: behind the figures.
    """

    policy: str
    time_ms: float | None
    hit_frac: float | None
    hbm_read_bytes: float | None
    energy_j: float | None
    speedup: float | None
    read_ratio: float | None
    planning_ms: float | None
    rows: int


def geometric_mean(values: Iterable[float]) -> float:
    """Of at least one positive value."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def unit_cell(policy: str, rows: Sequence[Row], base: Sequence[Row]) -> Cell:
    """A policy's cell on one launch, from its rows and those of `original`.

    Args:
        policy: its name.
        rows: of the policy.
        base: of `original`.
    """
    return Cell(
        policy,
        _mean(rows, "time_ms"),
        _mean(rows, "l2_hit_frac", logarithmic=False),
        _mean(rows, "hbm_read_bytes"),
        _mean(rows, "energy_j"),
        _against(base, rows, "time_ms"),
        _inverse(_against(base, rows, "hbm_read_bytes")),
        _average([row.planning_ms for row in rows if row.planning_ms is not None]),
        len(rows),
    )


def column_cells(units: Sequence[Mapping[str, Cell]]) -> dict[str, Cell]:
    """Cells of a column: those of its unit, or the mean over the units that ran the policy."""
    if len(units) == 1:
        return dict(units[0])
    found = {}
    for policy in dict.fromkeys(policy for cells in units for policy in cells):
        cells = [unit[policy] for unit in units if policy in unit]
        if len(cells) < len(units):
            continue  # a mean over some of the heads can't be compared with one over all

        def total(name: str, members: Sequence[Cell] = tuple(cells)) -> float | None:
            values = [getattr(cell, name) for cell in members]
            return None if None in values else sum(values)

        def mean(name: str, members: Sequence[Cell] = tuple(cells)) -> float | None:
            values = [getattr(cell, name) for cell in members]
            return None if None in values else geometric_mean(values) if min(values) > 0 else 0.0

        hits = [cell.hit_frac for cell in cells if cell.hit_frac is not None]
        found[policy] = Cell(
            policy,
            total("time_ms"),
            _average(hits) if len(hits) == len(cells) else None,
            total("hbm_read_bytes"),
            total("energy_j"),
            mean("speedup"),
            mean("read_ratio"),
            total("planning_ms"),
            sum(cell.rows for cell in cells),
        )
    return found


def _against(base: Sequence[Row], rows: Sequence[Row], name: str) -> float | None:
    """Value of `original` / value, each row against its own campaign where that has one."""
    if not base:
        return None
    logs = []
    for row in rows:
        value = getattr(row.result, name)
        own = [other for other in base if other.origin == row.origin]
        reference = _mean(own, name) or _mean(base, name)
        if value and reference:
            logs.append(math.log(reference / value))
    return math.exp(sum(logs) / len(logs)) if logs else None


def _mean(rows: Sequence[Row], name: str, logarithmic: bool = True) -> float | None:
    values = [v for row in rows if (v := getattr(row.result, name)) is not None]
    if not values:
        return None
    if not logarithmic or min(values) <= 0:
        return _average(values)
    return geometric_mean(values)


def _average(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value
