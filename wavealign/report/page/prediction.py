"""Predicted beside measured: launches that were both simulated and run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup

from wavealign.report.page.l2 import has_own_l2
from wavealign.report.page.svg import Axis, Mark, chart, span
from wavealign.runs.baseline import mean_of
from wavealign.runs.files import Row, in_order
from wavealign.runs.launch import ORDER, SHARED, LaunchKeys, but
from wavealign.runs.ranking import rank

_Key = tuple[object, ...]


@dataclass(frozen=True)
class Prediction:
    """How well the simulator foretold a card.

    Attributes:
        label: device, kernel, regime and model; the profile where several predicted.
        count: launches.
        hit_points: mean absolute error of the L2 hit ratio, in points; None where not counted.
        time_frac: mean absolute relative error of the time.
        regret_frac: mean over masks of how much slower the policy that simulation picks is than
            the one measured to be the fastest; None where no mask ran several policies.
        masks: behind it. One that ran under several conditions is ranked in each.
        hit_chart, time_chart: predicted against measured.
    """

    label: str
    count: int
    hit_points: float | None
    time_frac: float
    regret_frac: float | None
    masks: int
    hit_chart: Markup | None
    time_chart: Markup


@dataclass(frozen=True)
class _Pair:
    """What was predicted of a launch, and what was measured; repeats of each."""

    condition: _Key
    predicted: list[Row]
    measured: list[Row]


def predictions(rows: Iterable[Row]) -> list[Prediction]:
    """One for each device, kernel, regime and model with launches of both sources.

    A prediction belongs to a launch where they agree in all that they share, and the L2 that was
    modelled is the device's own. Several profiles of one name predict on their own.
    """
    rows = in_order(rows)
    keys = LaunchKeys(row.result.launch for row in rows)
    timed = [row for row in rows if row.result.outcome.time_ms]
    measured: defaultdict[_Key, list[Row]] = defaultdict(list)
    simulated: defaultdict[tuple[_Key, str | None, object], list[Row]] = defaultdict(list)
    own_l2 = has_own_l2(r.result.launch for r in timed if r.result.launch.source != "measured")
    profiles: defaultdict[str, set[object]] = defaultdict(set)
    for row in timed:
        launch = row.result.launch
        shared = keys.key(launch, SHARED)
        if launch.source == "measured":
            measured[shared].append(row)
        elif own_l2(launch):
            _, digest = keys.key(launch, ("source", "device_digest"))
            simulated[shared, launch.model, digest].append(row)
            profiles[launch.device].add(digest)
    groups: defaultdict[str, list[_Pair]] = defaultdict(list)
    for (shared, model, digest), predicted in simulated.items():
        if shared in measured:
            launch = predicted[0].result.launch
            label = f"{launch.device} · {launch.kernel} · {launch.regime}, {model} model"
            if len(profiles[launch.device]) > 1:
                label += f", profile {str(digest)[:6]}"
            condition = keys.key(launch, but(SHARED, *ORDER))
            groups[label].append(_Pair(condition, predicted, measured[shared]))
    return [_prediction(label, pairs) for label, pairs in sorted(groups.items())]


def _prediction(label: str, pairs: list[_Pair]) -> Prediction:
    hits, times = [], []
    by_condition: defaultdict[_Key, list[tuple[float, float]]] = defaultdict(list)
    for pair in pairs:
        launch = pair.predicted[0].result.launch
        where = f"{launch.policy} on {launch.mask} [{launch.heads}]"
        sides = (pair.measured, pair.predicted)
        was_ms, will_ms = (mean_of(side, "time_ms") or 0.0 for side in sides)
        by_condition[pair.condition].append((will_ms, was_ms))
        tip = f"{where}: measured {was_ms:.2f} ms, predicted {will_ms:.2f}"
        times.append((was_ms, will_ms, tip))
        was, will = (mean_of(side, "l2_hit_frac") for side in sides)
        if was is not None and will is not None:
            tip = f"{where}: measured {100 * was:.1f} %, predicted {100 * will:.1f} %"
            hits.append((was, will, tip))
    regrets = {
        condition: rank(*zip(*runs, strict=True)).regret_frac
        for condition, runs in by_condition.items()
        if len(runs) > 1
    }
    return Prediction(
        label, len(pairs), fmean(100 * abs(will - was) for was, will, _ in hits) if hits else None,
        fmean(abs(will / was - 1) for was, will, _ in times),
        fmean(regrets.values()) if regrets else None, len({digest for digest, *_ in regrets}),
        _chart("L2 hit ratio (%)", hits, True) if hits else None, _chart("time (ms)", times, False),
    )  # fmt: skip


def _chart(title: str, points: list[tuple[float, float, str]], percent: bool) -> Markup:
    ends = span([value for x, y, _ in points for value in (x, y)], log=not percent)
    x = Axis(f"measured {title}", *ends, log=not percent, percent=percent)
    y = Axis(f"predicted {title}", *ends, log=not percent, percent=percent)
    marks = [Mark(a, b, "dot", "best", tip) for a, b, tip in points]
    return chart(x, y, f"Predicted against measured {title}", marks, diagonal=True)
