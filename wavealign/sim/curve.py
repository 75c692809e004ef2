"""Answers for every L2 size at once, from the trace of a launch.

Where each block lasts the same time, hit or miss, a launch reads its K/V blocks in an order that
doesn't depend on the cache. One pass over that trace then gives the hits of an LRU of any size
(Mattson et al. 1970), and another the least that any replacement can read (Belady 1966).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavealign.errors import InputError
from wavealign.masks.block_mask import BlockMask, Int64Array
from wavealign.order.schedule import Schedule
from wavealign.sim.setup import Setup
from wavealign.sim.traffic import FAST_TICKS, requested_bytes


@dataclass(frozen=True, eq=False)
class Curve:
    """What one schedule reads at several L2 sizes: one LRU over whole K/V blocks, cold.

    Attributes:
        policy: the recipe of the schedule.
        sizes_bytes: int64 ``(S,)``, capacities of the LRU.
        misses: int64 ``(S,)``, K/V blocks read from HBM.
        hbm_read_bytes: int64 ``(S,)``, their bytes.
        hit_frac: float64 ``(S,)``, share of the requested bytes that hit; NaN where a mask keeps
            no block.
        requested_bytes: K/V bytes that rows asked for.
    """

    policy: str
    sizes_bytes: Int64Array
    misses: Int64Array
    hbm_read_bytes: Int64Array
    hit_frac: npt.NDArray[np.float64]
    requested_bytes: int


def hit_curve(
    mask: BlockMask, schedule: Schedule, setup: Setup, sizes_bytes: Sequence[int]
) -> Curve:
    """The L2 hit ratio of a launch at any number of sizes, in one pass.

    Args:
        mask: the block mask.
        schedule: one that is known to fit it (see `Schedule.check`).
        setup: rows in flight, row start and bytes of a block; its L2 isn't used.
        sizes_bytes: capacities, in any order.

    Raises:
        InputError: a size smaller than one K/V block.
    """
    from wavealign.sim._replay_kernels import stack_distances

    block_bytes = setup.kv_bytes(mask.block_kv)
    sizes = np.asarray(sizes_bytes, dtype=np.int64)
    if sizes.size and sizes.min() < block_bytes:
        raise InputError(
            f"an L2 of {sizes.min()} bytes is smaller than one K/V block of {block_bytes} bytes "
            f"({mask.block_kv} tokens); expected at least one block."
        )
    every, last = stack_distances(_trace(mask, schedule, setup), mask.H * mask.N, mask.N)
    # An access misses where its distance isn't below the capacity; first accesses come last.
    capacities = np.minimum(sizes // block_bytes, mask.H * mask.N)
    misses, last_misses = (np.cumsum(part[::-1])[::-1][capacities] for part in (every, last))
    saved_bytes = block_bytes - setup.kv_bytes(mask.last_kv_tokens)  # by a ragged last block
    read = misses * block_bytes - last_misses * saved_bytes
    requested = requested_bytes(mask, setup)
    return Curve(
        policy=schedule.policy, sizes_bytes=sizes, misses=misses, hbm_read_bytes=read,
        hit_frac=1.0 - read / requested if requested else np.full(sizes.shape, np.nan),
        requested_bytes=requested,
    )  # fmt: skip


def belady_read_bytes(
    mask: BlockMask, schedule: Schedule, setup: Setup, capacity_blocks: int
) -> int:
    """K/V bytes that no replacement can go below with this capacity, on a launch's trace.

    Belady's replacement, with bypass, head by head: each head has the whole capacity to itself.
    Heads share no K/V, so sharing the capacity could only make more misses, and the sum remains
    a lower bound of what the launch reads. Where the last block is ragged it is left out of the
    replay and read once: fewest blocks need not mean fewest bytes when blocks differ in size.

    Args:
        mask: the block mask.
        schedule: one that is known to fit it (see `Schedule.check`).
        setup: rows in flight, row start and bytes of a block; its L2 isn't used.
        capacity_blocks: whole K/V blocks that the cache holds.

    Raises:
        InputError: a capacity below one block.
    """
    from wavealign.sim._replay_kernels import opt_misses, split_heads

    if capacity_blocks < 1:
        raise InputError(f"capacity_blocks is {capacity_blocks}; expected at least 1.")
    ragged = mask.last_kv_tokens != mask.block_kv
    # Narrow where it can be: this is one number for every kept block of the mask.
    narrow = np.uint16 if np.iinfo(np.uint16).max >= mask.N else np.uint32
    blocks = np.empty(mask.nnz, dtype=narrow)
    trace = _trace(mask, schedule, setup)
    first = split_heads(trace, mask.H, mask.N, mask.N - ragged, blocks)
    del trace
    misses = 0
    for h in range(mask.H):
        part = blocks[first[h] : first[h + 1]].astype(np.uint32)
        misses += int(opt_misses(part, mask.N, capacity_blocks))
    read = misses * setup.kv_bytes(mask.block_kv)
    if ragged:
        _, touches_last = mask.touched_kv_blocks
        read += int(touches_last.sum()) * setup.kv_bytes(mask.last_kv_tokens)
    return read


def curve_sizes(mask: BlockMask, setup: Setup, count: int = 24) -> list[int]:
    """Sizes worth a look, in bytes, ascending: whole blocks, evenly spaced on a log scale.

    From 1 MiB, or one K/V block where that is larger or a head's K/V isn't, to a quarter
    beyond the K/V of one head. `setup.l2_capacity_bytes` is always among them.

    Args:
        mask, setup: of the launch.
        count: sizes, before equal ones are dropped.
    """
    block_bytes = setup.kv_bytes(mask.block_kv)
    low = -(-(1 << 20) // block_bytes)
    high = mask.N + -(-mask.N // 4)
    grid = np.geomspace(low if low < mask.N else 1, high, count).round().astype(np.int64)
    return sorted({*(int(n) * block_bytes for n in grid), setup.l2_capacity_bytes})


def _trace(mask: BlockMask, schedule: Schedule, setup: Setup) -> npt.NDArray[np.uint32]:
    """Block keys ``head * N + block``, uint32 ``(nnz,)``, as the launch reads them."""
    from wavealign.sim._replay_kernels import launch_trace

    trace: npt.NDArray[np.uint32] = launch_trace(
        schedule.row_order, schedule.indptr, schedule.indices, mask.N, setup.wave,
        FAST_TICKS, round(setup.kernel.row_start_blocks * FAST_TICKS),
    )  # fmt: skip
    return trace
