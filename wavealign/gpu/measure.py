"""Measure schedules of one launch on one backend: correctness, times, counters, result rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from wavealign._version import __version__
from wavealign.gpu.backend import Backend
from wavealign.gpu.correctness import check_launch, check_poke
from wavealign.gpu.counted import count_launches
from wavealign.gpu.counters import Counters
from wavealign.gpu.execution import Execution, resident
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.reference import reference_attention
from wavealign.gpu.sizes import Sizes
from wavealign.gpu.telemetry import Telemetry
from wavealign.gpu.timing import SingleTime, SteadyTime, time_call, time_single, time_steady
from wavealign.masks.block_mask import BlockMask
from wavealign.order.schedule import Schedule
from wavealign.runs.result import Result

Regime = Literal["single", "steady"]

_NOT_COUNTED = Counters(kernel="")
_RESIDENT_BYTES = 6 * 2**20  # K/V of the compute limit: a tenth of an H200's L2


@dataclass(frozen=True)
class Options:
    """What is measured, and how long.

    Attributes:
        regimes: ``"single"``, ``"steady"`` or both.
        repeats: launches per schedule in the single regime.
        settle_s, measure_s: of the steady state, per schedule.
        check: compare each launch with the float32 reference, and poke it.
        limit: also the compute limit of each schedule.
        dense: also the backend's dense attention.
        cache_control: the profiler's: ``"all"`` flushes L2 first, as the simulator assumes.
        seed: of Q, K and V.
    """

    regimes: tuple[Regime, ...] = ("single",)
    repeats: int = 7
    settle_s: float = 1.0
    measure_s: float = 2.0
    check: bool = True
    limit: bool = True
    dense: bool = True
    cache_control: str = "all"
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One launch to measure under several schedules, and what its result rows say of it.

    Attributes:
        mask: for every sequence.
        sizes: of it, of Q, K and V.
        schedules: with distinct policies.
        mask_name: in the result rows.
        heads, head: see `Result`.
        device: the profile's name, or the GPU's.
        wave: rows in flight that the schedules were made for.
        schedule_files: policy → file, for schedules that were read.
    """

    mask: BlockMask
    sizes: Sizes
    schedules: Sequence[Schedule]
    mask_name: str
    heads: str
    head: int | None
    device: str
    wave: int
    schedule_files: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass
class _Facts:
    """What is known of one schedule so far."""

    ragged_kv_first: bool
    counters: Counters
    error_frac: float | None = None
    gather_ms: float = 0.0
    scatter_ms: float = 0.0


def measure(
    backend: Backend,
    case: Case,
    options: Options,
    telemetry: Telemetry,
    counters: Mapping[str, Counters] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Result]:
    """Measured rows, one a schedule and regime, as they are known.

    Args:
        backend: what runs.
        case: what is run.
        options: what is measured.
        telemetry: of the GPU that runs.
        counters: by policy, from `count_cases`, where they were read.
        progress: called with a word on each step.

    Raises:
        InputError: the backend can't compute this sizes.
        WrongResultError: a launch computed something else.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    backend.check(case.sizes, torch.cuda.get_device_capability(device))
    inputs = Inputs.random(case.sizes, device, options.seed)
    launches = {s.policy: Execution.of(backend, case.sizes, s, inputs) for s in case.schedules}
    facts = {
        s.policy: _Facts(
            launches[s.policy].lists.layout.ragged_kv_first,
            (counters or {}).get(s.policy, _NOT_COUNTED),
        )
        for s in case.schedules
    }
    if options.check:
        reference = reference_attention(case.mask, inputs)
        progress("reference")
        for schedule in case.schedules:
            label = f"{backend.name}, {case.mask_name}, {schedule.policy}"
            launch = launches[schedule.policy]
            verdict = check_launch(launch, reference, label)
            check_poke(launch, case.mask, label)
            facts[schedule.policy].error_frac = verdict.error_frac
            progress(f"checked {schedule.policy}")
        del reference
    for policy, launch in launches.items():
        launch.run()
        if launch.moves_rows:
            facts[policy].gather_ms = time_call(launch.gather)
            facts[policy].scatter_ms = time_call(launch.scatter)
    limits: dict[str, Execution] = {}
    if options.limit:
        block_bytes = 2 * case.sizes.block_kv * case.sizes.head_dim * inputs.k.itemsize
        limits = {
            s.policy: Execution.of(
                backend, case.sizes, resident(s, _RESIDENT_BYTES // block_bytes), inputs
            )
            for s in case.schedules
        }
    dense_ms = None
    if options.dense:
        dense = backend.bind_dense(case.sizes, inputs)
        dense_ms = time_single({"dense": dense.launch}, 3, device)["dense"]
        progress("dense")
    rows = _Rows(backend, case, options, facts, telemetry, dense_ms)
    if "single" in options.regimes:
        runs = {policy: launch.run for policy, launch in launches.items()}
        runs |= {f"{policy} in L2": launch.run for policy, launch in limits.items()}
        times = time_single(runs, options.repeats, device)
        for policy in launches:
            yield rows.single(policy, times[policy], times.get(f"{policy} in L2"))
            progress(f"timed {policy}")
    if "steady" in options.regimes:
        for policy, launch in launches.items():
            steady = time_steady(launch.run, options.settle_s, options.measure_s, telemetry)
            limit = None
            if policy in limits:
                limit = time_steady(
                    limits[policy].run, options.settle_s, options.measure_s, telemetry
                )
            yield rows.steady(policy, steady, limit)
            progress(f"timed {policy}, steady")


def count_cases(
    backend: Backend, cases: Sequence[Case], options: Options
) -> list[dict[str, Counters]]:
    """Counters of several cases from one child process: per case, policy → counters.

    Raises:
        MissingCapabilityError: counters can't be read, or can't be trusted.
    """
    work = [(case.mask, case.sizes, case.schedules) for case in cases]
    counted = count_launches(backend, work, options.seed, options.cache_control)
    return [
        dict(zip((s.policy for s in case.schedules), launches, strict=True))
        for case, launches in zip(cases, counted, strict=True)
    ]


class _Rows:
    """Result rows of one case."""

    def __init__(
        self,
        backend: Backend,
        case: Case,
        options: Options,
        facts: dict[str, _Facts],
        telemetry: Telemetry,
        dense: SingleTime | None,
    ) -> None:
        self._case = case
        self._options = options
        self._facts = facts
        self._dense_ms = None if dense is None else dense.median_ms
        self._telemetry = telemetry
        self._backend = backend

    def single(self, policy: str, time: SingleTime, limit: SingleTime | None) -> Result:
        return self._row(
            policy, "single", time.median_ms, limit.median_ms if limit else None
        ).replaced(
            repeats=len(time.times_ms),
            time_spread_frac=time.spread_frac,
        )

    def steady(self, policy: str, time: SteadyTime, limit: SteadyTime | None) -> Result:
        return self._row(policy, "steady", time.time_ms, limit.time_ms if limit else None).replaced(
            repeats=time.launches,
            clock_ghz=time.clock_ghz,
            energy_j=time.energy_j,
            power_w=time.power_w,
            temperature_c=time.temperature_c,
            throttle=time.throttle,
        )

    def _row(self, policy: str, regime: Regime, time_ms: float, limit_ms: float | None) -> Result:
        case, sizes, facts = self._case, self._case.sizes, self._facts[policy]
        mask = case.mask
        counters = facts.counters
        kv_token_bytes = 4 * sizes.head_dim  # K and V in two bytes each
        read = counters.hbm_read_bytes
        flops = 4.0 * mask.block_q * mask.block_kv * sizes.head_dim * mask.nnz * sizes.batch
        dense_ms = self._dense_ms if regime == "single" else None
        state = self._telemetry.read()
        requested = counters.l2_requested_bytes
        asked = mask.nnz * mask.block_kv * kv_token_bytes * sizes.batch
        return Result.of(
            source="measured",
            policy=policy,
            mask=case.mask_name,
            mask_digest=mask.digest,
            heads=case.heads,
            head=case.head,
            device=case.device,
            kernel=self._backend.name,
            seed=self._options.seed,
            wave=case.wave,
            model=None,
            regime=regime,
            l2_capacity_bytes=None,
            kv_block_bytes=mask.block_kv * kv_token_bytes,
            time_ms=time_ms,
            l2_hit_frac=counters.l2_hit_frac,
            lts_sector_hit_frac=counters.lts_sector_hit_frac,
            l2_requested_bytes=requested if requested is not None else asked,
            fabric_bytes=counters.fabric_bytes,
            hbm_read_bytes=read,
            compulsory_bytes=_compulsory_tokens(mask, sizes) * kv_token_bytes * sizes.batch,
            belady_bytes=None,
            imbalance_frac=None,
            clock_ghz=counters.clock_ghz if regime == "single" else None,
            energy_j=None,
            limit_ms=limit_ms,
            gap=time_ms / dense_ms / mask.density if dense_ms and mask.nnz else None,
            intensity_flop_per_byte=flops / read if read else None,
            roofline=None,
            bound=None,
            version=__version__,
            tokens_kv=mask.tokens_kv,
            density=mask.density,
            batch=sizes.batch,
            kv_heads=sizes.kv_heads or mask.H,
            head_dim=sizes.head_dim,
            dtype=sizes.dtype,
            counters_ms=counters.time_ms,
            tensor_active_frac=counters.tensor_active_frac,
            hbm_write_bytes=counters.hbm_write_bytes,
            cache_control=None if counters is _NOT_COUNTED else self._options.cache_control,
            gather_ms=facts.gather_ms,
            scatter_ms=facts.scatter_ms,
            dense_ms=dense_ms,
            error_frac=facts.error_frac,
            ragged_kv_first=facts.ragged_kv_first,
            schedule_file=case.schedule_files.get(policy),
            gpu=state.name,
            driver=state.driver,
            backend_version=self._backend.version(),
        )


def _compulsory_tokens(mask: BlockMask, sizes: Sizes) -> int:
    """Distinct K/V tokens that the launch reads, over the K/V heads."""
    shared = sizes.heads_per_kv_head
    tokens = 0
    for g in range(mask.H // shared):
        touched = np.zeros(mask.N, dtype=np.bool_)
        for h in range(g * shared, (g + 1) * shared):
            touched[mask.head(h).indices] = True
        tokens += int(touched.sum()) * mask.block_kv
        if touched[-1]:
            tokens -= mask.N * mask.block_kv - mask.tokens_kv
    return tokens
