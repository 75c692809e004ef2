"""Measure launches of one mask on one backend: correctness, times, counters, results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wavealign._version import __version__
from wavealign.gpu.backend import Backend
from wavealign.gpu.correctness import check_launch, check_poke
from wavealign.gpu.counters import Counters
from wavealign.gpu.execution import Execution, resident
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.reference import reference_attention
from wavealign.gpu.registry import find_backend
from wavealign.gpu.rig import Rig
from wavealign.gpu.sizes import Sizes
from wavealign.gpu.telemetry import Telemetry
from wavealign.gpu.timing import SteadyTime, time_call, time_single, time_steady
from wavealign.masks.block_mask import BlockMask
from wavealign.order.policies import build_schedule
from wavealign.order.schedule import Schedule
from wavealign.runs.launch import Launch
from wavealign.runs.result import CacheControl, Environment, Outcome, Result

_NOT_COUNTED = Counters(kernel="")
_RESIDENT_BYTES = 6 * 2**20  # K/V of the compute limit: a tenth of an H200's L2
_TOKEN_BYTES = 4  # K and V in two bytes each, per element of head_dim

# Fields of an outcome: what counters say, by the same names, and what may stay unknown.
_COUNTED = (
    "l2_hit_frac", "lts_sector_hit_frac", "fabric_bytes", "hbm_read_bytes", "hbm_write_bytes",
    "tensor_active_frac", "clock_ghz",
)  # fmt: skip
_UNKNOWN = ("belady_bytes", "imbalance_frac", "energy_j", "gap", "roofline", "bound")


@dataclass(frozen=True)
class Options:
    """What is measured, and how long.

    Attributes:
        repeats: launches per schedule in the single regime.
        settle_s, measure_s: of the steady state, per schedule.
        check: compare each launch with the float32 reference, and poke it.
        limit: also the compute limit of each schedule.
        dense: also the backend's dense attention.
        cache_control: the profiler's: ``"all"`` flushes L2 first, as the simulator assumes.
    """

    repeats: int = 7
    settle_s: float = 1.0
    measure_s: float = 2.0
    check: bool = True
    limit: bool = True
    dense: bool = True
    cache_control: CacheControl = "all"


@dataclass
class _Candidate:
    """A schedule that is measured, and what is known of it so far."""

    schedule: Schedule
    execution: Execution
    counters: Counters
    limit: Execution | None = None
    error_frac: float | None = None
    gather_ms: float = 0.0
    scatter_ms: float = 0.0


def sizes_of(launch: Launch, mask: BlockMask) -> Sizes:
    """A launch as backends see it; what it doesn't say is what is usual."""
    said = {"batch": launch.batch, "kv_heads": launch.kv_heads, "head_dim": launch.head_dim}
    known: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    return Sizes.of(mask, **known, dtype=launch.dtype or "bf16")


def measure(
    launches: Sequence[Launch], mask: BlockMask, rig: Rig, telemetry: Telemetry,
    options: Options | None = None, *, backend: Backend | None = None,
    schedules: Mapping[str, Schedule] | None = None, counters: Mapping[str, Counters] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Result]:  # fmt: skip
    """Measure launches of one mask that differ in policy and regime alone, timed in turns.

    Args:
        launches: what runs: one kernel, one seed, one shape.
        mask: the heads that run.
        rig, telemetry: of the device that runs them.
        options: what is measured.
        backend: the one of the launches' kernel; by default it is found by that name.
        schedules: by policy, where they are at hand; else they are built.
        counters: by policy, from `count_launches`, where they were read.
        progress: called with a word on each step.

    Returns:
        A result a launch as it is known, single launches before those in the steady state.

    Raises:
        InputError: the backend can't compute this.
        WrongResultError: a launch computed something else.
    """
    options, first = options or Options(), launches[0]
    backend = backend or find_backend(first.kernel)
    sizes = sizes_of(first, mask)
    backend.check(sizes, rig.compute_capability)
    if schedules is None:
        of_policy = {launch.policy: launch for launch in launches}
        schedules = {p: build_schedule(mask, p, x.wave, x.seed) for p, x in of_policy.items()}
    inputs = Inputs.random(sizes, rig.device, first.seed)
    candidates = {
        policy: _Candidate(
            schedule,
            Execution.of(backend, sizes, schedule, inputs),
            (counters or {}).get(policy, _NOT_COUNTED),
        )
        for policy, schedule in schedules.items()
    }
    if options.check:
        reference = reference_attention(mask, inputs)
        progress("reference")
        for policy, candidate in candidates.items():
            name = f"{backend.name}, {first.mask}, {policy}"
            found = check_launch(candidate.execution, reference, name)
            candidate.error_frac = found.error_frac
            check_poke(candidate.execution, mask, name)
            progress(f"checked {policy}")
    for candidate in candidates.values():
        execution = candidate.execution
        execution.run()
        if execution.moves_rows:
            candidate.gather_ms = time_call(execution.gather, rig)
            candidate.scatter_ms = time_call(execution.scatter, rig)
    if options.limit:
        blocks = _RESIDENT_BYTES // (mask.block_kv * sizes.head_dim * _TOKEN_BYTES)
        for candidate in candidates.values():
            folded = resident(candidate.schedule, blocks)
            candidate.limit = Execution.of(backend, sizes, folded, inputs)
    dense_ms = None
    if options.dense:
        dense = backend.bind_dense(sizes, inputs)
        dense_ms = time_single({"dense": dense.launch}, 3, rig)["dense"].median_ms
        progress("dense")
    results = _Results(backend, mask, sizes, options, telemetry)
    single = [launch for launch in launches if launch.regime == "single"]
    if single:
        runs = {policy: candidate.execution.run for policy, candidate in candidates.items()}
        runs |= {f"{p} in L2": c.limit.run for p, c in candidates.items() if c.limit is not None}
        times = time_single(runs, options.repeats, rig)
        for launch in single:
            policy = launch.policy
            time, limit = times[policy], times.get(f"{policy} in L2")
            yield results.of(
                launch, candidates[policy],
                time_ms=time.median_ms, time_spread_frac=time.spread_frac,
                repeats=len(time.times_ms), dense_ms=dense_ms,
                limit_ms=None if limit is None else limit.median_ms,
                gap=time.median_ms / dense_ms / mask.density if dense_ms and mask.nnz else None,
            )  # fmt: skip
            progress(f"timed {policy}")

    def settled(execution: Execution) -> SteadyTime:
        return time_steady(execution.run, options.settle_s, options.measure_s, rig, telemetry)

    for launch in launches:
        if launch.regime == "steady":
            candidate = candidates[launch.policy]
            steady = vars(settled(candidate.execution))
            in_l2 = None if candidate.limit is None else settled(candidate.limit).time_ms
            yield results.of(launch, candidate, **steady, limit_ms=in_l2)
            progress(f"timed {launch.policy}, steady")


class _Results:
    """Results of one mask on one backend."""

    def __init__(
        self,
        backend: Backend, mask: BlockMask, sizes: Sizes, options: Options, telemetry: Telemetry,
    ) -> None:  # fmt: skip
        state = telemetry.read()
        token_bytes = _TOKEN_BYTES * sizes.head_dim
        block_bytes, blocks = mask.block_kv * token_bytes, mask.nnz * sizes.batch
        self._cache_control = options.cache_control
        self._flops = 4.0 * mask.block_q * mask.block_kv * sizes.head_dim * blocks
        self._requested_bytes = blocks * block_bytes
        self._compulsory_bytes = _compulsory_tokens(mask, sizes) * token_bytes * sizes.batch
        self._said: dict[str, Any] = {  # of the launch
            "source": "measured", "mask_digest": mask.digest, "kernel": backend.name,
            "model": None, "l2_bytes": None, "l2_capacity_bytes": None,
            "kv_block_bytes": block_bytes, "batch": sizes.batch,
            "kv_heads": sizes.kv_heads or mask.H, "head_dim": sizes.head_dim,
            "dtype": sizes.dtype, "tokens_kv": mask.tokens_kv, "density": mask.density,
        }  # fmt: skip
        self._environment = Environment(
            __version__, gpu=state.name, driver=state.driver, backend_version=backend.version()
        )

    def of(self, launch: Launch, candidate: _Candidate, **timed: Any) -> Result:
        counters, schedule = candidate.counters, candidate.schedule
        read, requested = counters.hbm_read_bytes, counters.l2_requested_bytes
        known: dict[str, Any] = dict.fromkeys(_UNKNOWN)
        known |= {name: getattr(counters, name) for name in _COUNTED}
        outcome = Outcome(
            **known | timed,
            l2_requested_bytes=self._requested_bytes if requested is None else requested,
            compulsory_bytes=self._compulsory_bytes,
            intensity_flop_per_byte=self._flops / read if read else None,
            counters_ms=counters.time_ms, gather_ms=candidate.gather_ms,
            scatter_ms=candidate.scatter_ms, error_frac=candidate.error_frac,
            ragged_kv_first=candidate.execution.lists.layout.ragged_kv_first,
        )  # fmt: skip
        control = None if counters is _NOT_COUNTED else self._cache_control
        return Result(
            dataclasses.replace(launch, **self._said, policy=schedule.policy),
            outcome,
            dataclasses.replace(self._environment, cache_control=control),
        )


def _compulsory_tokens(mask: BlockMask, sizes: Sizes) -> int:
    """Distinct K/V tokens that the launch reads, over the K/V heads."""
    shared = sizes.heads_per_kv_head
    touched = np.zeros((mask.H // shared, mask.N), dtype=np.bool_)
    for h, head in enumerate(mask.heads()):
        touched[h // shared, head.indices] = True
    absent = mask.N * mask.block_kv - mask.tokens_kv  # of a ragged last block
    return int(touched.sum()) * mask.block_kv - int(touched[:, -1].sum()) * absent
