"""Which policy is the best: over many masks, and as a prediction has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wavealign.runs.metrics import geometric_mean

TIE_FRAC = 0.01
"""Times closer than this have no order."""


@dataclass(frozen=True)
class Ranking:
    """Runs of one mask, predicted and measured.

    Attributes:
        agree, disagree: pairs that differ by more than 1 % measured, and are predicted in that
            order or in the other one.
        chosen: index of the run that is predicted to be the fastest.
        fastest: index of the run that is.
        regret_frac: measured time of `chosen` / the fastest, minus 1.
    """

    agree: int
    disagree: int
    chosen: int
    fastest: int
    regret_frac: float

    @property
    def kendall_tau(self) -> float | None:
        """(agree - disagree) / pairs; None without pairs."""
        pairs = self.agree + self.disagree
        return (self.agree - self.disagree) / pairs if pairs else None


def rank(predicted_ms: Sequence[float], measured_ms: Sequence[float]) -> Ranking:
    """Compare two lists of times of the same runs, at least one."""
    agree = disagree = 0
    for a, measured_a in enumerate(measured_ms):
        for b in range(a):
            if abs(measured_a / measured_ms[b] - 1) <= TIE_FRAC:
                continue
            same = (measured_a - measured_ms[b]) * (predicted_ms[a] - predicted_ms[b]) > 0
            agree, disagree = agree + same, disagree + (not same)
    chosen, fastest = int(np.argmin(predicted_ms)), int(np.argmin(measured_ms))
    regret_frac = measured_ms[chosen] / measured_ms[fastest] - 1
    return Ranking(agree, disagree, chosen, fastest, regret_frac)


@dataclass(frozen=True)
class Standing:
    """A policy against the first of the ranking, on the masks that both ran on.

    Attributes:
        policy: the recipe.
        ratio: geometric mean of its speedups / those of the first; above 1 where it is faster.
        columns: how many masks.
    """

    policy: str
    ratio: float
    columns: int


def ranked(speedups: Mapping[str, Mapping[str, float]]) -> list[tuple[str, float]]:
    """Policies that ran on every mask, by the geometric mean of their speedups, best first.

    Args:
        speedups: by policy and mask.
    """
    whole = max(map(len, speedups.values()), default=0)
    means = [(p, geometric_mean(own.values())) for p, own in speedups.items() if len(own) == whole]
    return sorted(means, key=lambda item: -item[1])


def standings(speedups: Mapping[str, Mapping[str, float]], first: str) -> list[Standing]:
    """Every policy that shares a mask with the `first` of the ranking, best first."""
    leader, found = speedups[first], []
    for policy, own in speedups.items():
        ratios = [value / leader[mask] for mask, value in own.items() if mask in leader]
        if ratios:
            found.append(Standing(policy, geometric_mean(ratios), len(ratios)))
    return sorted(found, key=lambda standing: -standing.ratio)


def as_good(gain: float | None, best: float | None) -> bool:
    """Whether a speedup is the best one, or within 1 % of it."""
    return gain is not None and best is not None and gain >= best / (1 + TIE_FRAC)
