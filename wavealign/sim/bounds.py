"""What a prediction is measured against: compulsory reads, the compute limit, the gap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wavealign.masks.block_mask import BlockMask
from wavealign.order.schedule import Schedule
from wavealign.sim.power import Work
from wavealign.sim.setup import Setup
from wavealign.sim.traffic import FULL_TICKS, Traffic, block_bytes, start_time, step_times


@dataclass(frozen=True)
class Bounds:
    """Limits beside a prediction.

    Attributes:
        compulsory_bytes: distinct K/V bytes, each read once.
        limit_ms: the compute limit: the same rows in the same order with every K/V block in
            L2 but for the compulsory reads.
        dense_ms: dense attention of the same shape, in closed form: all rows equal, each wave
            reads K and V once (or the head once, where L2 holds it).
        gap: (1/density) / (dense_ms / time); 1 means that sparsity paid in full.
        intensity_flop_per_byte: FLOP / HBM bytes.
        roofline: ``"compute"`` or ``"memory"``: the side of the ridge.
    """

    compulsory_bytes: int
    limit_ms: float
    dense_ms: float
    gap: float | None
    intensity_flop_per_byte: float | None
    roofline: Literal["compute", "memory"] | None


def bounds(
    mask: BlockMask, schedule: Schedule, setup: Setup, traffic: Traffic, time_ms: float
) -> Bounds:
    """The bounds of one launch that took `time_ms`.

    Args:
        mask, schedule, setup, traffic, time_ms: of the launch.
    """
    touched, touches_last = mask.touched_kv_blocks
    compulsory = block_bytes(mask, setup, int(touched.sum()), int(touches_last.sum()))
    flops = setup.flops(mask, mask.nnz)
    limit = Work(_limit_cycles(mask, schedule, setup), flops, compulsory, traffic.requested_bytes)
    dense_ms = setup.timing(_dense(mask, setup)).time_ms
    intensity = flops / traffic.hbm_read_bytes if traffic.hbm_read_bytes else None
    ridge = setup.device.ridge_flop_per_byte
    return Bounds(
        compulsory_bytes=compulsory,
        # A row that waits can, rarely, make the launch end earlier (Graham's anomaly).
        limit_ms=min(setup.timing(limit).time_ms, time_ms),
        dense_ms=dense_ms,
        gap=time_ms / dense_ms / mask.density if mask.nnz else None,
        intensity_flop_per_byte=intensity,
        roofline=None if intensity is None else ("compute" if intensity >= ridge else "memory"),
    )


def _limit_cycles(mask: BlockMask, schedule: Schedule, setup: Setup) -> float:
    from wavealign.order._kernels import list_schedule
    from wavealign.sim._partition_kernels import FRACTION_BITS

    row_nnz = np.diff(schedule.indptr).reshape(schedule.row_order.shape)
    length = np.take_along_axis(row_nnz, schedule.row_order, axis=1).ravel()
    free = np.zeros(setup.wave, dtype=np.int64)
    list_schedule(length, free, step_times(setup).astype(np.int64), int(start_time(setup)))
    ticks = int(free.max()) / (1 << FRACTION_BITS)
    return ticks * setup.step_cycles(mask) / FULL_TICKS


def _dense(mask: BlockMask, setup: Setup) -> Work:
    waves = math.ceil(mask.H * mask.M / setup.wave)
    blocks = mask.H * mask.M * mask.N
    passes = mask.H if setup.capacity_blocks(mask) >= mask.N else waves
    head_bytes = setup.kv_bytes(mask.tokens_kv)
    steps = waves * (mask.N + setup.kernel.row_start_blocks)
    return Work(
        steps * setup.step_cycles(mask), setup.flops(mask, blocks), float(passes * head_bytes),
        float(mask.H * mask.M * head_bytes),
    )  # fmt: skip
