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
        """All pairs, or these, as one figure."""
        return summarise(self.pairs if pairs is None else pairs, self.noise_degrees)


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
    good_a, good_b = (
        {key: [r for r in side[key] if metric.usable(getattr(r, metric.name))] for key in both}
        for side in (a, b)
    )
    usable = [key for key in both if good_a[key] and good_b[key]]
    if not usable:
        raise InputError(
            f"{len(both)} pairs, but none has a usable '{metric.name}' on both sides; choose "
            "another --metric."
        )
    groups = [_values(side[key], metric) for key in usable for side in (good_a, good_b)]
    noise = _Noise(groups, metric)
    pairs = tuple(_pair(good_a[key], good_b[key], metric, noise) for key in usable)
    return Comparison(
        metric,
        pairs,
        tuple(r for key in a if key not in b for r in a[key]),
        tuple(r for key in b if key not in a for r in b[key]),
        len(both) - len(usable),
        noise.degrees,
        noise.origin(pairs),
        pairs[0].of.source == "simulated"
        or {r.origin for r in rows_a} == {r.origin for r in rows_b},
        _differences(*([r for key in usable for r in side[key]] for side in (good_a, good_b))),
    )


def summarise(pairs: Sequence[PairedValue], noise_degrees: int = 0) -> Summary:
    """The mean difference with its confidence interval.

    The interval is Student's t over pairs; over masks where there are five or more, because the
    policies of one mask tend to differ together (cluster-robust standard error; with one pair a
    mask both are the paired t-test).

    Args:
        pairs: at least one.
        noise_degrees: degrees of freedom of the pairs' noise; 0 for many.
    """
    from scipy.stats import t as student

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
        factor = float(student.ppf(0.5 + _CONFIDENCE / 2, noise_degrees or math.inf))
        floor = factor * math.hypot(*noises) / len(pairs)
        limits = factor * np.array(noises)
        beyond = int((values > limits).sum()), int((values < -limits).sum())
    return Summary(
        len(values), mean, low, high, floor, int((values > 0).sum()), int((values < 0).sum()),
        beyond, by_mask,
    )  # fmt: skip


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
        errors = [_launch_error(row) for row in (rows_a[0], rows_b[0])]
        if self._metric.name != "time_ms" or None in errors:
            return None
        return math.hypot(*(error for error in errors if error is not None))

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
    best, name = 0, ""
    for field in fields:
        rest = but(fields, field)
        b = _by_key(rows_b, rest, keys)
        found = sum(key in b for key in _by_key(rows_a, rest, keys))
        if found > best:
            best, name = found, field
    if name in ("mask_digest", "heads"):
        masks_a, masks_b = (
            ", ".join(sorted({f"{row.result.mask} [{row.result.heads}]" for row in rows}))
            for rows in (rows_a, rows_b)
        )
        return f": they ran other masks (A: {masks_a}; B: {masks_b})."
    if not best:
        return f": they agree in no choice of {', '.join(fields)}. Are they runs of the same masks?"
    shown = [*(["source"] if "source" in fields else []), name]
    in_a, in_b = (
        ", ".join(sorted({str(key[-1]) for key in _by_key(rows, shown, keys)}))
        for rows in (rows_a, rows_b)
    )
    return (
        f": {best} would pair but for '{name}' (A: {in_a}; B: {in_b}). --ignore {name} pairs them "
        "regardless."
    )


def _differences(rows_a: Sequence[Result], rows_b: Sequence[Result]) -> dict[str, tuple[str, str]]:
    found = {}
    for name in ABOUT_FIELDS:
        a, b = (
            ", ".join(sorted({str(getattr(row, name)) for row in rows}))
            for rows in (rows_a, rows_b)
        )
        if a != b:
            found[name] = (a, b)
    return found
