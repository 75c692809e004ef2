"""What a policy gains on a mask: means over repeats, over the heads of a mask, over campaigns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from wavealign.runs.baseline import mean_of, mean_speedup
from wavealign.runs.files import Row
from wavealign.runs.metrics import geometric_mean

# How the heads of a mask come to one figure.
_OVER_HEADS: dict[str, Callable[[Any], Any]] = {
    "time_ms": sum, "hit_frac": fmean, "hbm_read_bytes": sum, "energy_j": sum,
    "speedup": geometric_mean, "read_ratio": geometric_mean, "planning_ms": sum,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A policy on a unit or a column, in one setting; means over repeats, seeds and campaigns.

    Attributes:
        policy: the recipe.
        time_ms, hit_frac, hbm_read_bytes, energy_j: None where a row doesn't say.
        speedup: time of `original` in the same campaign / time.
        read_ratio: HBM reads / those of `original`.
        planning_ms: making the schedule.
    """

    policy: str
    time_ms: float | None
    hit_frac: float | None
    hbm_read_bytes: float | None
    energy_j: float | None
    speedup: float | None
    read_ratio: float | None
    planning_ms: float | None


def unit_cell(policy: str, rows: Sequence[Row], base: Sequence[Row]) -> Cell:
    """A policy's cell on one launch.

    Args:
        policy: its name.
        rows, base: of the policy, and of `original`.
    """
    planning = [row.planning_ms for row in rows if row.planning_ms is not None]
    reads = mean_speedup(base, rows, "hbm_read_bytes")
    return Cell(
        policy, mean_of(rows, "time_ms"), mean_of(rows, "l2_hit_frac"),
        mean_of(rows, "hbm_read_bytes"), mean_of(rows, "energy_j"), mean_speedup(base, rows),
        1 / reads if reads is not None else None, fmean(planning) if planning else None,
    )  # fmt: skip


def column_cells(units: Sequence[Mapping[str, Cell]]) -> dict[str, Cell]:
    """Cells of a column: those of its unit, or the mean over the units that ran the policy."""
    if len(units) == 1:
        return dict(units[0])
    found = {}
    for policy in dict.fromkeys(policy for cells in units for policy in cells):
        cells = [unit[policy] for unit in units if policy in unit]
        if len(cells) < len(units):
            continue  # a mean over some of the heads can't be compared with one over all
        values = {name: [getattr(cell, name) for cell in cells] for name in _OVER_HEADS}
        means = {n: None if None in v else _OVER_HEADS[n](v) for n, v in values.items()}
        found[policy] = Cell(policy, **means)
    return found
