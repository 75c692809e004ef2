"""Predicted beside measured: launches that were both simulated and run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from wavealign.report.page.cells import geometric_mean
from wavealign.report.page.svg import Axis, Mark, chart, span
from wavealign.runs.files import Row
from wavealign.runs.ranking import rank
from wavealign.runs.result import Result

_KEY = ("mask_digest", "heads", "policy", "device", "kernel", "wave", "regime", "seed")


@dataclass(frozen=True)
class Prediction:
    """How well the simulator foretold a card.

    Attributes:
        label: device, kernel and model.
        count: launches.
        hit_points: mean absolute error of the L2 hit ratio, in points; None where not counted.
        time_frac: mean absolute relative error of the time.
        regret_frac: mean over masks of how much slower the policy that simulation picks is than
            the one measured to be the fastest; None where no mask ran several policies.
        masks: behind it.
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


def predictions(rows: Sequence[Row]) -> list[Prediction]:
    """One for each device, kernel, regime and model with launches of both sources."""
    measured: defaultdict[tuple[object, ...], list[Result]] = defaultdict(list)
    simulated: dict[tuple[object, ...], dict[str, Result]] = {}
    for row in rows:
        key = tuple(getattr(row.result, name) for name in _KEY)
        if row.result.time_ms is None:
            continue
        if row.result.source == "measured":
            measured[key].append(row.result)
        else:
            simulated.setdefault(key, {})[str(row.result.model)] = row.result
    groups: defaultdict[str, list[tuple[Result, list[Result]]]] = defaultdict(list)
    for key, models in simulated.items():
        for model, result in models.items():
            if key in measured:
                label = f"{result.device} · {result.kernel} · {result.regime}, {model} model"
                groups[label].append((result, measured[key]))
    return [_prediction(label, pairs) for label, pairs in groups.items()]


def _prediction(label: str, pairs: list[tuple[Result, list[Result]]]) -> Prediction:
    hits, times = [], []
    by_mask: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    hit_errors, time_errors = [], []
    for predicted, runs in pairs:
        where = f"{predicted.policy} on {predicted.mask} [{predicted.heads}]"
        was_ms = geometric_mean(run.time_ms for run in runs if run.time_ms)
        will_ms = predicted.time_ms or 0.0
        by_mask[predicted.mask_digest].append((will_ms, was_ms))
        time_errors.append(abs(will_ms / was_ms - 1))
        times.append(
            (was_ms, will_ms, f"{where}: measured {was_ms:.2f} ms, predicted {will_ms:.2f}")
        )
        known = [run.l2_hit_frac for run in runs if run.l2_hit_frac is not None]
        if known and predicted.l2_hit_frac is not None:
            was, will = sum(known) / len(known), predicted.l2_hit_frac
            hit_errors.append(100 * abs(will - was))
            hits.append(
                (was, will, f"{where}: measured {100 * was:.1f} %, predicted {100 * will:.1f} %")
            )
    regrets = [
        rank([p for p, _ in mask], [m for _, m in mask]).regret_frac
        for mask in by_mask.values()
        if len(mask) > 1
    ]
    return Prediction(
        label,
        len(pairs),
        sum(hit_errors) / len(hit_errors) if hit_errors else None,
        sum(time_errors) / len(time_errors),
        sum(regrets) / len(regrets) if regrets else None,
        len(regrets),
        _chart("L2 hit ratio (%)", hits, True) if hits else None,
        _chart("time (ms)", times, False),
    )


def _chart(title: str, points: list[tuple[float, float, str]], percent: bool) -> Markup:
    ends = span([value for x, y, _ in points for value in (x, y)], log=not percent)
    x = Axis(f"measured {title}", *ends, log=not percent, percent=percent)
    y = Axis(f"predicted {title}", *ends, log=not percent, percent=percent)
    marks = [Mark(a, b, "dot", "best", tip) for a, b, tip in points]
    return chart(x, y, f"Predicted against measured {title}", marks, diagonal=True)
