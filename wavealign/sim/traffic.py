"""What a launch moves and how many cycles it takes, by either model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavealign.masks.block_mask import BlockMask
from wavealign.order.schedule import Schedule
from wavealign.sim.power import Work
from wavealign.sim.setup import Setup

FAST_TICKS = 128
"""Ticks of a block in the fast model: a row start is rounded to whole ticks."""

FULL_TICKS = 32
"""Ticks of a block in the full model, where times are fixed-point fractions of a tick. Only the
order of events inside a tick is coarse; finer ticks change reads by 0.3 % and cost a quarter."""

_DRIFT_SEED = 4  # which worker has which speed; docs/fidelity.md says what that is worth
_HBM_ROUNDS = 4
_HBM_MATTERS = 0.005  # share of the cycles from which HBM's bandwidth is worth another round
_SETTLED = 0.005  # relative change of the clock


@dataclass(frozen=True)
class Traffic:
    """One launch's traffic and cycles.

    Attributes:
        hbm_read_bytes: K/V bytes read from HBM.
        requested_bytes: K/V bytes that rows asked of L2.
        crossing_bytes: bytes that crossed between L2 partitions; None in the fast model.
        sector_hit_frac: hits / lookups as a profiler counts them, where a request that crosses
            is looked up twice; None in the fast model.
        cycles: SM cycles from start to end.
        idle_frac: share of the workers' time lost waiting for the last one to end.
        l2_cycles: cycles that L2 bandwidth added.
        hbm_cycles: cycles that HBM bandwidth added.
    """

    hbm_read_bytes: int
    requested_bytes: int
    crossing_bytes: int | None
    sector_hit_frac: float | None
    cycles: float
    idle_frac: float
    l2_cycles: float
    hbm_cycles: float

    def work(self, mask: BlockMask, setup: Setup) -> Work:
        """The launch as the power budget sees it."""
        return Work(
            self.cycles, setup.flops(mask, mask.nnz), self.hbm_read_bytes,
            self.requested_bytes + (self.crossing_bytes or 0),
        )  # fmt: skip


def launch_traffic(mask: BlockMask, schedule: Schedule, setup: Setup) -> Traffic:
    """Play a launch in the setup's model.

    Args:
        mask, schedule, setup: of the launch.
    """
    return _full(mask, schedule, setup) if setup.model == "full" else _fast(mask, schedule, setup)


def block_bytes(mask: BlockMask, setup: Setup, blocks: int, last_blocks: int) -> int:
    """Bytes of `blocks` K/V blocks of which `last_blocks` are the (ragged) last one.

    Args:
        mask, setup: of the launch.
        blocks, last_blocks: how many.
    """
    full = setup.kv_bytes(mask.block_kv)
    return (blocks - last_blocks) * full + last_blocks * setup.kv_bytes(mask.last_kv_tokens)


def requested_bytes(mask: BlockMask, setup: Setup) -> int:
    """K/V bytes that all rows ask of L2."""
    return block_bytes(mask, setup, mask.nnz, mask.last_kv_block_nnz)


def step_times(setup: Setup) -> npt.NDArray[np.uint64]:
    """Fixed-point ticks of a block for each worker, uint64 ``(W,)``.

    SMs of one card keep slightly different paces. Their speeds are the quantiles of a normal
    distribution, dealt out to the workers once and for all.
    """
    from statistics import NormalDist

    spread = setup.kernel.sm_spread_frac if setup.model == "full" else 0.0
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / setup.wave) for i in range(setup.wave)])
    dealt = np.random.default_rng(_DRIFT_SEED).permutation(quantiles)
    return _fixed(FULL_TICKS * np.maximum(1.0 + spread * dealt, 0.5))


def start_time(setup: Setup) -> np.uint64:
    """Fixed-point ticks to start a row."""
    return np.uint64(_fixed(np.array(setup.kernel.row_start_blocks * FULL_TICKS)))


def _fixed(ticks: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
    from wavealign.sim._partition_kernels import FRACTION_BITS

    return np.rint(ticks * (1 << FRACTION_BITS)).astype(np.uint64)


def _fast(mask: BlockMask, schedule: Schedule, setup: Setup) -> Traffic:
    from wavealign.sim._kernels import stream_lru

    misses, last_block_misses, end_ticks = stream_lru(
        schedule.row_order, schedule.indptr, schedule.indices, mask.N, setup.wave,
        setup.capacity_blocks(mask), FAST_TICKS, FAST_TICKS,
        round(setup.kernel.row_start_blocks * FAST_TICKS),
    )  # fmt: skip
    last = int(end_ticks.max())
    return Traffic(
        hbm_read_bytes=block_bytes(mask, setup, int(misses.sum()), int(last_block_misses.sum())),
        requested_bytes=requested_bytes(mask, setup), crossing_bytes=None, sector_hit_frac=None,
        cycles=last * setup.step_cycles(mask) / FAST_TICKS,
        idle_frac=1.0 - float(end_ticks.mean()) / last if last else 0.0, l2_cycles=0.0,
        hbm_cycles=0.0,
    )  # fmt: skip


def _full(mask: BlockMask, schedule: Schedule, setup: Setup) -> Traffic:
    """The partition model; HBM's bytes per cycle depend on the clock, which depends on them."""
    clock_ghz = setup.timing(_guess(mask, setup)).clock_ghz
    for _ in range(_HBM_ROUNDS):
        traffic = _full_at(mask, schedule, setup, clock_ghz)
        settled = setup.timing(traffic.work(mask, setup)).clock_ghz
        matters = traffic.hbm_cycles > _HBM_MATTERS * traffic.cycles
        if not matters or abs(settled / clock_ghz - 1.0) < _SETTLED:
            break
        clock_ghz = settled
    return traffic


def _guess(mask: BlockMask, setup: Setup) -> Work:
    """The launch if every second request came from HBM and all workers ended together."""
    requested = requested_bytes(mask, setup)
    cycles = setup.step_cycles(mask) * mask.nnz / setup.wave
    return Work(cycles, setup.flops(mask, mask.nnz), requested / 2, requested)


def _full_at(mask: BlockMask, schedule: Schedule, setup: Setup, clock_ghz: float) -> Traffic:
    from wavealign.sim import _partition_kernels as kernels

    setup.capacity_blocks(mask)
    device, step_cycles = setup.device, setup.step_cycles(mask)
    half_bytes = setup.kv_bytes(mask.block_kv) / 2
    hbm_bytes_per_cycle = device.hbm_bytes_per_s * device.hbm_usable_frac / (clock_ghz * 1e9)
    half_miss = setup.kernel.miss_exposed_blocks * FULL_TICKS / 2
    reads, last_block_reads, lookups, _, end_times, stretched = kernels.stream_partitioned(
        schedule.row_order, schedule.indptr, schedule.indices, mask.N,
        step_times(setup), start_time(setup), np.uint64(_fixed(np.array(half_miss))),
        setup.partitions, int(setup.l2_capacity_bytes / setup.partitions / half_bytes),
        FULL_TICKS, (device.l2_bytes_per_clock or math.inf) * step_cycles / half_bytes,
        hbm_bytes_per_cycle * step_cycles / half_bytes,
    )  # fmt: skip
    crossings = int(lookups[kernels.CROSSINGS])
    hits = float(lookups[kernels.OWN_HITS] + lookups[kernels.CROSSING_HITS])
    looked_up = 2 * mask.nnz + crossings
    cycles_per_tick = step_cycles / FULL_TICKS
    last = float(end_times.max())
    halves, last_halves = int(reads.sum()), int(last_block_reads.sum())
    return Traffic(
        hbm_read_bytes=block_bytes(mask, setup, halves, last_halves) // 2,
        requested_bytes=requested_bytes(mask, setup), crossing_bytes=round(crossings * half_bytes),
        sector_hit_frac=hits / looked_up if looked_up else None, cycles=last * cycles_per_tick,
        idle_frac=1.0 - float(end_times.mean()) / last if last else 0.0,
        l2_cycles=float(stretched[kernels.L2_TICKS]) * cycles_per_tick,
        hbm_cycles=float(stretched[kernels.HBM_TICKS]) * cycles_per_tick,
    )  # fmt: skip
