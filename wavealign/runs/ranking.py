"""Does a prediction choose well? Its order of the policies against the measured one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_TIE_FRAC = 0.01  # pairs measured closer than this have no order


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
            if abs(measured_a / measured_ms[b] - 1) <= _TIE_FRAC:
                continue
            same = (measured_a - measured_ms[b]) * (predicted_ms[a] - predicted_ms[b]) > 0
            agree, disagree = agree + same, disagree + (not same)
    chosen, fastest = int(np.argmin(predicted_ms)), int(np.argmin(measured_ms))
    regret_frac = measured_ms[chosen] / measured_ms[fastest] - 1
    return Ranking(agree, disagree, chosen, fastest, regret_frac)
