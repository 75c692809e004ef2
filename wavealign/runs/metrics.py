"""Figures of a row that can be compared, and how a difference is told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MOST_LOG = 700.0  # of what a float holds


def geometric_mean(values: Iterable[float]) -> float:
    """Of at least one positive value; a lone one is its own mean, to the last digit."""
    values = list(values)
    if len(values) == 1:
        return values[0]
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True)
class Metric:
    """A figure of a row.

    Attributes:
        name: of the field.
        title: for people.
        unit, scale: a value / scale is shown in this unit.
        ratio: compared as B/A; otherwise as B - A in points.
        more_is_better: of the value itself.
        counted: read by hardware counters where measured, so the cache's state matters.
        better, worse: ``"{}"`` stands for the amount.
    """

    name: str
    title: str
    unit: str
    scale: float
    ratio: bool
    more_is_better: bool
    counted: bool
    better: str
    worse: str

    def difference(self, a: float, b: float) -> float:
        """log(b / a), or b - a in points; above 0 where b is larger."""
        if not self.ratio:
            return 100 * (b - a)
        ratio = b / a
        return math.log(ratio) if 0 < ratio < math.inf else math.log(b) - math.log(a)

    def told(self, difference: float) -> float:
        """A difference in percent of a, or in points."""
        return 100 * math.expm1(min(difference, _MOST_LOG)) if self.ratio else difference

    def written(self, difference: float) -> float:
        """A difference as b / a, or in points."""
        return math.exp(min(difference, _MOST_LOG)) if self.ratio else difference

    def mean(self, values: Sequence[float]) -> float:
        """Of repeats: geometric for ratios, unless one of them is 0."""
        if self.ratio and min(values) > 0:
            return geometric_mean(values)
        return sum(values) / len(values)

    def usable(self, value: float | None) -> bool:
        """Whether a value can be compared."""
        return value is not None and (value > 0 or not self.ratio)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("time_ms", "time", "ms", 1.0, True, False, False, "is {} faster", "is {} slower"),
        Metric(
            "hbm_read_bytes", "HBM reads", "GB", 1e9, True, False, True, "reads {} less from HBM",
            "reads {} more from HBM",
        ),
        Metric(
            "l2_hit_frac", "L2 hit ratio", "%", 0.01, False, True, True,
            "has an L2 hit ratio {} higher", "has an L2 hit ratio {} lower",
        ),
        Metric(
            "energy_j", "energy", "J", 1.0, True, False, False, "takes {} less energy",
            "takes {} more energy",
        ),
    )
}  # fmt: skip
