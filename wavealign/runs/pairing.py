"""Rows of A and B that should be equal, paired; and how far they differ.

A pair is two launches that agree in everything but what is being compared. Ratios are averaged
as logarithms, so the mean of B/A is the inverse of the mean of A/B; shares (the L2 hit ratio) are
subtracted, in points.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavealign.errors import InputError
from wavealign.runs.files import Row
from wavealign.runs.launch import KEY_FIELDS, LaunchKeys, but
from wavealign.runs.metrics import Metric
from wavealign.runs.result import Result

ABOUT_FIELDS = ("version", "gpu", "driver", "backend_version")
"""What may differ, and is said where it does: often the very thing that was changed."""

_CONFIDENCE = 0.95
_FEWEST_MASKS = 5  # with fewer, masks are too few to resample and pairs count on their own
_IQR_SIGMAS = 1.349  # interquartile range of a normal distribution / its standard deviation
_MEDIAN_COST = 1.253  # standard error of a normal sample's median / that of its mean


@dataclass(frozen=True)
class PairedValue:
    """One pair.

    Attributes:
        of: a row of A, for its names.
        policy_b: the policy of B's row.
        a, b: the metric, averaged over repeated rows.
        difference: see `Metric.difference`.
        noise: standard error of `difference` by the repeats; 0 in simulation, None where unknown.
    """

    of: Result
    policy_b: str
    a: float
    b: float
    difference: float
    noise: float | None


@dataclass(frozen=True)
class Summary:
    """Several pairs as one figure.

    Attributes:
        count: pairs.
        mean: of their differences.
        low, high: 95 % confidence interval of `mean` over pairs (masks); None for a single one.
        noise_floor: what `mean` would exceed in one of twenty comparisons without any difference;
            None where the noise isn't known.
        larger, smaller: pairs in which B's value is the larger, the smaller one.
        beyond: pairs that exceed their own noise, B's value being the larger and the smaller one;
            None where it isn't known.
        by_mask: the interval takes masks, not pairs, as independent.
    """

    count: int
    mean: float
    low: float | None
    high: float | None
    noise_floor: float | None
    larger: int
    smaller: int
    beyond: tuple[int, int] | None
    by_mask: bool


@dataclass(frozen=True)
class Comparison:
    """A against B.

    Attributes:
        metric: what was compared.
        pairs: every pair.
        only_a, only_b: launches without a partner, as rows.
        unusable: pairs whose value is missing or 0.
        noise_degrees: repeated rows behind the noise; 0 where it is from the launches' own spread.
        noise_origin: where the noise is from, in words.
        noise_whole: nothing but that noise lies between A and B: they are simulated, or rows of
            the same campaigns. Between campaigns a card's temperature and clock differ too.
        differs: of `ABOUT_FIELDS`, the values in A and in B, where they differ.
    """

    metric: Metric
    pairs: tuple[PairedValue, ...]
    only_a: tuple[Result, ...]
    only_b: tuple[Result, ...]
    unusable: int
    noise_degrees: int
    noise_origin: str
    noise_whole: bool
    differs: Mapping[str, tuple[str, str]]

    def summary(self, pairs: Sequence[PairedValue] | None = None) -> Summary:
        """All pairs, or these, as one figure: the mean difference with its confidence interval.

        The interval is Student's t over pairs; over masks where there are five or more, because
        the policies of one mask tend to differ together (cluster-robust standard error; with one
        pair a mask both are the paired t-test).
        """
        from scipy.stats import t as student

        pairs = self.pairs if pairs is None else pairs
        values = np.array([pair.difference for pair in pairs])
        masks = [pair.of.mask_digest for pair in pairs]
        by_mask = _FEWEST_MASKS <= len(set(masks)) < len(masks)
        mean = float(values.mean())
        low = high = None
        if len(values) > 1:
            error, degrees = _standard_error(values, masks if by_mask else range(len(values)))
            half = float(student.ppf(0.5 + _CONFIDENCE / 2, degrees)) * error
            low, high = mean - half, mean + half
        noises = [pair.noise for pair in pairs if pair.noise is not None]
        floor = beyond = None
        if len(noises) == len(pairs):
            factor = float(student.ppf(0.5 + _CONFIDENCE / 2, self.noise_degrees or math.inf))
            floor = factor * math.hypot(*noises) / len(pairs)
            limits = factor * np.array(noises)
            beyond = int((values > limits).sum()), int((values < -limits).sum())
        return Summary(
            len(values), mean, low, high, floor, int((values > 0).sum()), int((values < 0).sum()),
            beyond, by_mask,
        )  # fmt: skip


def compare_rows(
    rows_a: Sequence[Row],
    rows_b: Sequence[Row],
    metric: Metric,
    ignore: Collection[str] = (),
) -> Comparison:
    """Pair the rows of A and B.

    Args:
        rows_a, rows_b: the runs.
        metric: what to compare.
        ignore: of `KEY_FIELDS`, what a pair may differ in.

    Raises:
        InputError: no pairs (with the field that keeps them apart), or pairs of several sources
            or regimes, whose figures mean different things.
    """
    fields = [*but(KEY_FIELDS, *ignore), *(["cache_control"] if metric.counted else [])]
    keys = LaunchKeys(row.result.launch for row in (*rows_a, *rows_b))
    a, b = _by_key(rows_a, fields, keys), _by_key(rows_b, fields, keys)
    both = [key for key in a if key in b]
    if not both:
        raise InputError(
            "no row of A has a partner in B" + _why_apart(rows_a, rows_b, fields, keys)
        )
    for name in ("source", "regime"):
        found = sorted({str(getattr(a[key][0], name)) for key in both})
        if len(found) > 1:
            raise InputError(
                f"the pairs mix {' and '.join(found)} rows, whose {metric.title} means different "
                f"things; choose one, e.g. --where {name}={found[0]}."
            )
    good = ((_usable(a[key], metric), _usable(b[key], metric)) for key in both)
    usable = [pair for pair in good if all(pair)]
    if not usable:
        raise InputError(
            f"{len(both)} pairs, but none has a usable '{metric.name}' on both sides; choose "
            "another --metric."
        )
    noise = _Noise([_values(rows, metric) for pair in usable for rows in pair], metric)
    pairs = tuple(_pair(*pair, metric, noise) for pair in usable)
    return Comparison(
        metric=metric,
        pairs=pairs,
        only_a=tuple(r for key in a if key not in b for r in a[key]),
        only_b=tuple(r for key in b if key not in a for r in b[key]),
        unusable=len(both) - len(usable),
        noise_degrees=noise.degrees,
        noise_origin=noise.origin(pairs),
        noise_whole=pairs[0].of.source == "simulated"
        or {r.origin for r in rows_a} == {r.origin for r in rows_b},
        differs=_differences(*([row for pair in usable for row in pair[i]] for i in (0, 1))),
    )


def _standard_error(
    values: npt.NDArray[np.float64], clusters: Iterable[object]
) -> tuple[float, int]:
    """Standard error of the mean where the values of a cluster depend on each other."""
    sums: defaultdict[object, float] = defaultdict(float)
    for value, cluster in zip(values - values.mean(), clusters, strict=True):
        sums[cluster] += float(value)
    count = len(sums)
    variance = count / (count - 1) * sum(s * s for s in sums.values()) / len(values) ** 2
    return math.sqrt(variance), count - 1


class _Noise:
    """The standard deviation of repeated rows, or what the launches' own spread says."""

    def __init__(self, groups: Sequence[Sequence[float]], metric: Metric) -> None:
        self._metric = metric
        squares = 0.0
        self.degrees = 0
        for values in groups:
            centre = metric.mean(values)
            squares += sum(metric.difference(centre, value) ** 2 for value in values)
            self.degrees += len(values) - 1
        self._deviation = math.sqrt(squares / self.degrees) if self.degrees else None

    def of_pair(self, rows_a: Sequence[Result], rows_b: Sequence[Result]) -> float | None:
        if self._deviation is not None:
            return self._deviation * math.sqrt(1 / len(rows_a) + 1 / len(rows_b))
        if rows_a[0].source == "simulated":
            return 0.0
        a, b = _launch_error(rows_a[0]), _launch_error(rows_b[0])
        if self._metric.name != "time_ms" or a is None or b is None:
            return None
        return math.hypot(a, b)

    def origin(self, pairs: Sequence[PairedValue]) -> str:
        if self.degrees:
            return f"from rows that are repeated within A or B ({self.degrees} degrees of freedom)"
        if pairs[0].of.source == "simulated":
            return "the simulator has none: the same input gives the same row"
        if any(pair.noise is not None for pair in pairs):
            return "from the spread of each row's own launches; between campaigns it is larger"
        return "not known: no row is repeated within A or B"


def _launch_error(row: Result) -> float | None:
    """Relative standard error of a row's time, from the launches behind it."""
    spread_frac, repeats = row.outcome.time_spread_frac, row.outcome.repeats
    if spread_frac is None or not repeats:
        return None
    error = spread_frac / _IQR_SIGMAS / math.sqrt(repeats)
    return error * (_MEDIAN_COST if row.launch.regime == "single" else 1.0)


def _pair(
    rows_a: Sequence[Result], rows_b: Sequence[Result], metric: Metric, noise: _Noise
) -> PairedValue:
    a, b = (metric.mean(_values(rows, metric)) for rows in (rows_a, rows_b))
    return PairedValue(
        rows_a[0], rows_b[0].policy, a, b, metric.difference(a, b), noise.of_pair(rows_a, rows_b)
    )


def _usable(rows: Sequence[Result], metric: Metric) -> list[Result]:
    return [row for row in rows if metric.usable(getattr(row, metric.name))]


def _values(rows: Sequence[Result], metric: Metric) -> list[float]:
    return [float(getattr(row, metric.name)) for row in rows]


def _by_key(
    rows: Sequence[Row], fields: Sequence[str], keys: LaunchKeys
) -> dict[tuple[object, ...], list[Result]]:
    """Rows that agree in these fields: of a launch, or how the counters treated the cache."""
    groups: dict[tuple[object, ...], list[Result]] = {}
    for row in rows:
        key = keys.key(row.result.launch, but(fields, "cache_control"))
        if "cache_control" in fields:
            key += (row.result.environment.cache_control,)
        groups.setdefault(key, []).append(row.result)
    return groups


def _why_apart(
    rows_a: Sequence[Row], rows_b: Sequence[Row], fields: Sequence[str], keys: LaunchKeys
) -> str:
    """The single field without which most rows would pair."""

    def pairs(without: str) -> int:
        a, b = (_by_key(rows, but(fields, without), keys) for rows in (rows_a, rows_b))
        return len(a.keys() & b.keys())

    found = {field: pairs(field) for field in fields}
    name = max(fields, key=lambda field: found[field])
    if not found[name]:
        return f": they agree in no choice of {', '.join(fields)}. Are they runs of the same masks?"
    if name in ("mask_digest", "heads"):
        a, b = (
            _listed(f"{row.result.mask} [{row.result.heads}]" for row in rows)
            for rows in (rows_a, rows_b)
        )
        return f": they ran other masks (A: {a}; B: {b})."
    shown = [*(["source"] if "source" in fields else []), name]
    a, b = (_listed(key[-1] for key in _by_key(rows, shown, keys)) for rows in (rows_a, rows_b))
    return (
        f": {found[name]} would pair but for '{name}' (A: {a}; B: {b}). --ignore {name} pairs them "
        "regardless."
    )


def _differences(rows_a: Sequence[Result], rows_b: Sequence[Result]) -> dict[str, tuple[str, str]]:
    a, b = (
        {name: _listed(getattr(row, name) for row in rows) for name in ABOUT_FIELDS}
        for rows in (rows_a, rows_b)
    )
    return {name: (a[name], b[name]) for name in ABOUT_FIELDS if a[name] != b[name]}


def _listed(values: Iterable[object]) -> str:
    """What there is among them, in words."""
    return ", ".join(sorted(set(map(str, values))))
