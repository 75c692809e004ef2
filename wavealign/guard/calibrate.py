"""Fit the guard's constants to runs, simulated and measured.

Three of them, one after the other: the capacity of the snapshots' LRU from hit ratios; how often
``resync`` reads its working set (``phased_sweeps``), so that choosing between it and
``nnz/shuffled+sawtooth`` loses least time, and among equals from hit ratios; what a miss adds from
the ratios of times between policies of one mask. Planning times are measured elsewhere
(benchmarks/production.py) and kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wavealign.errors import InputError
from wavealign.guard.model import CANDIDATES, RESYNC, CostModel
from wavealign.guard.statistics import HeadStatistics, mask_statistics_for
from wavealign.masks.block_mask import BlockMask
from wavealign.order.policies import build_schedule
from wavealign.runs.launch import Launch
from wavealign.sim.power import FloatArray
from wavealign.sim.recordings import Recording
from wavealign.sim.simulate import run_schedule

_SHORT = {"resync": RESYNC}  # an alias among the candidates
CAPACITY_FRACS = tuple(round(0.5 + 0.05 * i, 2) for i in range(17))
_STALLS = tuple(0.005 * i for i in range(61))


@dataclass(frozen=True)
class GuardCase:
    """What a launch did.

    Attributes:
        launch: what ran; its policy is one of `CANDIDATES`.
        mask: all of it ran in one launch.
        hit: L2 hit ratio; None where it isn't known.
        time_ms: kernel time.
        campaign: runs of one campaign may be compared with each other.
    """

    launch: Launch
    mask: BlockMask
    hit: float | None
    time_ms: float
    campaign: str = ""

    @property
    def source(self) -> str:
        """``"measured"`` or ``"simulated"``."""
        return self.launch.source


@dataclass(frozen=True)
class FitErrors:
    """Predicted minus observed.

    Attributes:
        hit_points: mean absolute difference of the hit ratio, in points.
        speedup_percent: mean absolute difference of the speedup over ``original``, in percent.
        cases: launches behind it.
    """

    hit_points: float
    speedup_percent: float
    cases: int


def simulated_cases(mask: BlockMask, model: CostModel, seed: int = 0) -> list[GuardCase]:
    """Every candidate on a mask, in the simulator.

    Args:
        mask: of one launch.
        model: whose setup is simulated.
        seed: of the shuffled visits.
    """
    found = []
    for policy in CANDIDATES:
        schedule = build_schedule(mask, policy, model.setup.wave, seed)
        run = run_schedule(mask, schedule, model.setup, seed=seed)
        found.append(GuardCase(run.launch, mask, run.l2_hit_frac, run.time_ms))
    return found


def measured_cases(recordings: Sequence[Recording]) -> list[GuardCase]:
    """Those of the recorded runs that ran a candidate."""
    found = []
    for r in recordings:
        launch = dataclasses.replace(r.launch, policy=_SHORT.get(r.launch.policy, r.launch.policy))
        if launch.policy in CANDIDATES and r.measured.time_ms is not None:
            hit, time_ms = r.measured.l2_hit_frac, r.measured.time_ms
            found.append(GuardCase(launch, r.mask, hit, time_ms, r.campaign))
    return found


def fit_guard(
    cases: Sequence[GuardCase],
    model: CostModel,
    note: str,
    progress: Callable[[str], None] = lambda _: None,
) -> CostModel:
    """The model with its constants fitted.

    Args:
        cases: launches; measured and simulated ones count alike.
        model: where to start from.
        note: what the profile says of its origin.
        progress: called with a line from time to time.

    Raises:
        InputError: too few cases: at least two masks that ran ``original`` and another candidate.
    """
    statistics = _statistics(cases, model, progress)
    groups = _by_launch(cases)
    if sum(len(group) > 1 for group in groups) < 2:
        raise InputError(
            "fitting the guard needs at least two masks that ran 'original' and one of "
            f"{', '.join(CANDIDATES[1:])}."
        )

    model = min(
        (_with(model, capacity_frac=frac) for frac in CAPACITY_FRACS),
        key=lambda m: _squares(_hit_errors(cases, m, statistics, CANDIDATES[:2])),
    )
    model = min(
        (_with(model, phased_sweeps=round(0.5 + 0.05 * i, 2)) for i in range(41)),
        key=lambda m: (
            round(_regret(groups, m, statistics), 6),
            _squares(_hit_errors(cases, m, statistics, (RESYNC,))),
        ),
    )
    model = min(
        (_with(model, miss_stall_frac=stall) for stall in _STALLS),
        key=lambda m: _squares(_speedup_errors(groups, m, statistics)),
    )
    measured = any(case.source == "measured" for case in cases)
    return _with(model, source="measured" if measured else "simulated", calibrated_on=note)


def fit_errors(cases: Sequence[GuardCase], model: CostModel) -> FitErrors:
    """How far the model is from these launches."""
    statistics = _statistics(cases, model, lambda _: None)
    hits = np.abs(_hit_errors(cases, model, statistics, CANDIDATES))
    speedups = np.abs(_speedup_errors(_by_launch(cases), model, statistics))
    return FitErrors(
        100 * float(hits.mean()) if hits.size else 0.0,
        100 * float(speedups.mean()) if speedups.size else 0.0,
        len(cases),
    )


def _with(model: CostModel, **figures: Any) -> CostModel:
    """The model with these constants in its profile."""
    return dataclasses.replace(model, profile=dataclasses.replace(model.profile, **figures))


Statistics = dict[tuple[str, float], list[HeadStatistics]]


def _statistics(
    cases: Sequence[GuardCase], model: CostModel, progress: Callable[[str], None]
) -> Statistics:
    """By mask (its digest) and share of the capacity."""
    fracs = sorted({*CAPACITY_FRACS, model.profile.capacity_frac})
    found: Statistics = {}
    masks = {case.mask.digest: case.mask for case in cases}
    for count, (key, mask) in enumerate(masks.items(), 1):
        capacities = [
            _with(model, capacity_frac=frac).capacity_blocks(mask.block_kv) for frac in fracs
        ]
        rows = mask_statistics_for(mask, model.setup.wave, capacities)
        found.update({(key, frac): heads for frac, heads in zip(fracs, rows, strict=True)})
        progress(f"statistics of mask {count} of {len(masks)}")
    return found


def _by_launch(cases: Sequence[GuardCase]) -> list[dict[str, GuardCase]]:
    """Runs that can be compared, by policy: launches of one campaign, `original` among them."""
    groups: dict[tuple[Launch, str], dict[str, GuardCase]] = {}
    for case in cases:
        groups.setdefault((case.launch.baseline, case.campaign), {})[case.launch.policy] = case
    return [group for group in groups.values() if "original" in group]


def _hit_errors(
    cases: Sequence[GuardCase], model: CostModel, statistics: Statistics, policies: Sequence[str]
) -> FloatArray:
    errors = []
    for case in cases:
        if case.launch.policy not in policies or case.hit is None:
            continue
        heads = statistics[case.mask.digest, model.profile.capacity_frac]
        capacity = model.capacity_blocks(case.mask.block_kv)
        nnz = sum(head.nnz for head in heads)
        hit = sum(head.nnz * model.hit(head, case.launch.policy, capacity) for head in heads)
        errors.append(hit / nnz - case.hit if nnz else 0.0)
    return np.array(errors)


def _speedup_errors(
    groups: Sequence[dict[str, GuardCase]], model: CostModel, statistics: Statistics
) -> FloatArray:
    errors = []
    for group in groups:
        times = _times_ms(group, model, statistics)
        for policy, case in group.items():
            if policy != "original" and case.time_ms and times[policy]:
                observed = group["original"].time_ms / case.time_ms
                errors.append(times["original"] / times[policy] / observed - 1.0)
    return np.array(errors)


def _regret(
    groups: Sequence[dict[str, GuardCase]], model: CostModel, statistics: Statistics
) -> float:
    """Time lost by the predicted choice among the planned policies, summed over launches."""
    lost = 0.0
    for group in groups:
        planned = [p for p in CANDIDATES[1:] if p in group]
        if len(planned) < 2:
            continue
        chosen = min(planned, key=_times_ms(group, model, statistics).__getitem__)
        best = min(group[p].time_ms for p in planned)
        lost += group[chosen].time_ms / best - 1.0 if best else 0.0
    return lost


def _times_ms(
    group: Mapping[str, GuardCase], model: CostModel, statistics: Statistics
) -> dict[str, float]:
    """What the model expects of the launch under each candidate."""
    mask = group["original"].mask
    heads = statistics[mask.digest, model.profile.capacity_frac]
    rows = model.predict(heads, mask.block_q, mask.block_kv)
    return {p: sum(row[i].time_ms for row in rows) for i, p in enumerate(CANDIDATES)}


def _squares(errors: FloatArray) -> float:
    return float((errors**2).sum())
