"""The page's figures of one setting: heat map, hit ratio against time, costs, heads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from wavealign.report.page.cells import Cell
from wavealign.report.page.gather import Block, Unit
from wavealign.report.page.svg import Axis, Line, Mark, chart, span
from wavealign.runs.launch import BASELINE
from wavealign.runs.metrics import geometric_mean
from wavealign.runs.ranking import TIE_FRAC

PAPER = "svd+nnz"  # the order of the WaveAlign paper
_FULL_TINT = 0.25  # a gain (or loss) of this share has the strongest colour


@dataclass(frozen=True)
class HeatCell:
    """A cell of the heat map: text, tint from 0 to 1, ``"up"``, ``"down"`` or ``""``."""

    text: str
    tint: float
    side: str
    best: bool
    tip: str


@dataclass(frozen=True)
class HeatRow:
    """A policy: its mean and a cell a column, None where it didn't run."""

    policy: str
    mean: HeatCell | None
    cells: list[HeatCell | None]


@dataclass(frozen=True)
class FrontPoint:
    """A policy that no other beats at both cost and gain."""

    policy: str
    planning_ms: float
    speedup: float


@dataclass(frozen=True)
class HeadRow:
    """What the best policy does for a head alone."""

    head: str
    best: str
    speedup: float | None
    hit_before: float | None
    hit_after: float | None
    read_ratio: float | None


@dataclass(frozen=True)
class HeadTable:
    """The heads of a mask, and whether they want different policies.

    Attributes:
        mask: the file.
        rows: one a head.
        single: the one policy that is best for all heads together.
        single_gain: geometric mean of its speedups.
        chosen_gain: of each head's own best.
    """

    mask: str
    rows: list[HeadRow]
    single: str
    single_gain: float
    chosen_gain: float


def shown_policies(block: Block, most: int) -> list[str]:
    """The best policies, best first, with `original` and the paper's order in any case."""
    names = [standing.policy for standing in block.standings]
    kept = names[:most]
    return kept + [name for name in names[most:] if name in (BASELINE, PAPER)]


def heat_rows(block: Block, policies: Sequence[str]) -> list[HeatRow]:
    """Policies against the setting's columns."""
    best = {column.label: block.best(column) for column in block.columns}
    means = dict(block.ranking) if len(block.columns) > 1 else {}
    rows = []
    for policy in policies:
        cells: list[HeatCell | None] = []
        for column in block.columns:
            cell, top = block.cells[column.label].get(policy), best[column.label]
            if cell is None or cell.speedup is None:
                cells.append(None)
                continue
            wins = top is not None and top.policy == policy and (top.speedup or 0) > 1 + TIE_FRAC
            tip = f"{cell.policy} on {column.label}: {describe(cell)}"
            cells.append(_tinted(cell.speedup, wins, tip))
        mean_cell = None
        if policy in means:
            first = policy == block.ranking[0][0]
            mean_cell = _tinted(means[policy], first, f"{policy}: geometric mean over all masks")
        rows.append(HeatRow(policy, mean_cell, cells))
    return rows


def _tinted(speedup: float, best: bool, tip: str) -> HeatCell:
    gain = speedup - 1
    tint = min(1.0, abs(gain) / _FULL_TINT)
    side = "" if abs(gain) < 0.005 else "up" if gain > 0 else "down"
    return HeatCell(f"{speedup:.2f}", round(tint, 3), side, best, tip)


def describe(cell: Cell) -> str:
    """A cell's figures in a line."""
    parts = (
        (cell.speedup, "{:.3f}× original", 1), (cell.time_ms, "{:.2f} ms", 1),
        (cell.hit_frac, "L2 hit {:.1f} %", 100), (cell.hbm_read_bytes, "HBM reads {:.2f} GB", 1e-9),
        (cell.planning_ms, "planned in {:.1f} ms", 1),
    )  # fmt: skip
    return ", ".join(form.format(scale * v) for v, form, scale in parts if v is not None)


def kind_of(policy: str, best: str | None) -> tuple[str, str]:
    """Shape and class of a policy's mark; shape and colour say the same."""
    kinds = {BASELINE: ("square", "base"), PAPER: ("triangle", "paper"), best: ("circle", "best")}
    return kinds.get(policy, ("dot", "other"))


def hit_against_time(block: Block, policies: Collection[str]) -> Markup | None:
    """These policies on every mask: L2 hit ratio, and time relative to `original`."""
    best = block.ranking[0][0] if block.ranking else None
    marks = []
    for column in block.columns:
        for cell in block.cells[column.label].values():
            if cell.hit_frac is None or not cell.speedup or cell.policy not in policies:
                continue
            shape, kind = kind_of(cell.policy, best)
            tip = f"{cell.policy} on {column.label}: {describe(cell)}"
            marks.append(Mark(cell.hit_frac, 1 / cell.speedup, shape, kind, tip))
    if len(marks) < 2:
        return None
    order = {"other": 0, "base": 1, "paper": 2, "best": 3}
    marks.sort(key=lambda mark: order[mark.kind])
    x = Axis("L2 hit ratio (%)", *span([m.x for m in marks]), percent=True)
    y = Axis("time / time of original", *span([m.y for m in marks]))
    label = f"L2 hit ratio against time relative to original, {len(marks)} points, {block.label}"
    return chart(x, y, label, marks)


def cost_against_gain(block: Block) -> tuple[Markup, list[FrontPoint]] | None:
    """Planning cost and gain of each policy (means over masks), and the Pareto front."""
    points = []
    for policy, mean in block.ranking:
        ran = [cells[policy] for cells in block.cells.values() if policy in cells]
        if costs := [cell.planning_ms for cell in ran if cell.planning_ms]:
            points.append(FrontPoint(policy, geometric_mean(costs), mean))
    if len(points) < 2:
        return None
    front = pareto_front(points)
    best = block.ranking[0][0]
    marks = []
    for point in points:
        shape, kind = kind_of(point.policy, best)
        number = front.index(point) + 1 if point in front else None
        cost, gain = point.planning_ms, point.speedup
        tip = f"{point.policy}: {gain:.3f}× original, planned in {cost:.2f} ms"
        marks.append(Mark(cost, gain, shape, kind, tip, number))
    x = Axis("planning, one mask (ms)", *span([p.planning_ms for p in points], log=True), log=True)
    y = Axis("speedup over original", *span([p.speedup for p in points]), suffix="×")
    stairs = Line([(p.planning_ms, p.speedup) for p in front], "front", steps=True)
    return chart(x, y, f"Planning cost against speedup, {block.label}", marks, [stairs]), front


def pareto_front(points: list[FrontPoint]) -> list[FrontPoint]:
    """Points that no other matches at no more cost and no less gain, cheapest first."""
    front: list[FrontPoint] = []
    for point in sorted(points, key=lambda p: (p.planning_ms, -p.speedup)):
        if not front or point.speedup > front[-1].speedup:
            front.append(point)
    return front


def head_tables(block: Block) -> list[HeadTable]:
    """Masks of which at least two heads ran on their own."""
    by_mask: defaultdict[str, list[Unit]] = defaultdict(list)
    for unit in block.units:
        if unit.single:
            by_mask[block.families[unit]].append(unit)
    tables = []
    for mask, units in by_mask.items():
        if len(units) < 2 or len({unit.heads for unit in units}) < len(units):
            continue  # one head, or several files of that name
        if all(any(cell.speedup for cell in block.units[u].values()) for u in units):
            tables.append(_head_table(block, mask, units))
    return tables


def _head_table(block: Block, mask: str, units: list[Unit]) -> HeadTable:
    rows, chosen = [], []
    gains: defaultdict[str, list[float]] = defaultdict(list)
    for unit in sorted(units, key=lambda u: int(u.heads)):
        cells = block.units[unit]
        timed = [cell for cell in cells.values() if cell.speedup is not None]
        best = max(timed, key=lambda cell: cell.speedup or 0)
        for cell in timed:
            gains[cell.policy].append(cell.speedup or 1)
        chosen.append(best.speedup or 1)
        base = cells.get(BASELINE)
        hits = (base.hit_frac if base else None, best.hit_frac)
        rows.append(HeadRow(unit.heads, best.policy, best.speedup, *hits, best.read_ratio))
    means = {p: geometric_mean(v) for p, v in gains.items() if len(v) == len(units)}
    single = max(means, key=lambda policy: means[policy])
    return HeadTable(mask, rows, single, means[single], geometric_mean(chosen))
