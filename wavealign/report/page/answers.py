"""The answer first: which policy is best where, and what it wins, in sentences and rows."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from wavealign.report.page.cells import Cell
from wavealign.report.page.gather import Block
from wavealign.runs.launch import BASELINE
from wavealign.runs.ranking import TIE_FRAC, Standing, as_good


@dataclass(frozen=True)
class Answer:
    """What a setting comes to.

    Attributes:
        label: of the setting.
        source: ``"measured"`` or ``"simulated"``.
        policy: the best one over all masks; None where no policy gains, or nothing is known.
        gain: its geometric mean speedup over `original`.
        masks: how many it is a mean over.
        good: of these, on how many it is the best, or within 1 % of it.
        reads: change of its HBM reads against `original`, in words; empty where not known.
        rivals: policies within 1 % of it on average.
        challenger: a policy that is faster where it ran, but didn't run on every mask.
        known: whether any speedup is known.
    """

    label: str
    source: str
    policy: str | None
    gain: float
    masks: int
    good: int
    reads: str
    rivals: tuple[str, ...]
    challenger: Standing | None
    known: bool

    @property
    def text(self) -> str:
        """The answer as a sentence, for a terminal."""
        if not self.known:
            return f"no speedup is known: {BASELINE} didn't run, or there are no times."
        if self.policy is None:
            return f"no policy gains more than 1 % over {BASELINE} on {self.masks_text}."
        mean = f", geometric mean over {self.masks_text}" if self.masks > 1 else ""
        reads = f"; HBM reads {self.reads}" if self.reads else ""
        return f"{self.policy} is {self.gain:.2f}x as fast as {BASELINE}{mean}{reads}."

    @property
    def masks_text(self) -> str:
        """How many masks."""
        return f"{self.masks} mask{'s' if self.masks != 1 else ''}"


@dataclass(frozen=True)
class Best:
    """The best policy on one mask.

    Attributes:
        column: label of the mask.
        note: e.g. how many heads are averaged.
        cell: the best policy's figures.
        base: those of `original`, None where it didn't run.
        ties: policies as good as it, within 1 %.
        nothing: no policy gains more than 1 %.
    """

    column: str
    note: str
    cell: Cell
    base: Cell | None
    ties: tuple[str, ...]
    nothing: bool


def answer(block: Block) -> Answer:
    """What a setting comes to."""
    source, label = block.setting.source, block.label
    if not block.ranking:
        return Answer(label, source, None, 1.0, len(block.columns), 0, "", (), None, False)
    policy, gain = block.ranking[0]
    masks = [column for column in block.columns if policy in block.cells[column.label]]
    nothing = policy == BASELINE or gain < 1 + TIE_FRAC
    rivals = tuple(name for name, mean in block.ranking[1:] if as_good(mean, gain))
    own = [(block.cells[column.label][policy], block.best(column)) for column in masks]
    good = sum(best is not None and as_good(cell.speedup, best.speedup) for cell, best in own)
    reads = _reads([cell.read_ratio for cell, _ in own])
    return Answer(
        label, source, None if nothing else policy, gain, len(masks), good, reads, rivals,
        _challenger(block), True,
    )  # fmt: skip


def _challenger(block: Block) -> Standing | None:
    """The best policy that didn't run on every mask, if it beats the first of the ranking."""
    whole = {policy for policy, _ in block.ranking}
    first = block.standings[0]
    return first if first.policy not in whole and first.ratio > 1 else None


def _reads(ratios: list[float | None]) -> str:
    changes = sorted(100 * (ratio - 1) for ratio in ratios if ratio is not None)
    if not changes:
        return ""
    low, high = round(changes[0]), round(changes[-1])
    if low == high:
        return f"{low:+d} %" if low else "unchanged"
    return f"{round(median(changes)):+d} % (median; {low:+d} to {high:+d} %)"


def best_rows(block: Block) -> list[Best]:
    """The best policy of each mask of a setting."""
    found = []
    for column in block.columns:
        best = block.best(column)
        if best is None:
            continue
        note = f"{len(column.units)} heads, each on its own" if len(column.units) > 1 else ""
        base, ties = block.cells[column.label].get(BASELINE), tuple(block.as_good(column, best))
        nothing = best.speedup is not None and best.speedup < 1 + TIE_FRAC
        found.append(Best(column.label, note, best, base, ties, nothing))
    return found
