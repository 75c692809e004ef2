"""Row orders that need no factorisation (natural, random, NNZ, greedy), and wave refinement.

Every row order is a function of one head and its context to an int32 ``(M,)`` permutation,
slot in launch order → query block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wavealign.masks.block_mask import HeadMask, Int32Array
from wavealign.order.context import Draw, OrderContext

# Enough to correct what drifts apart over a head on an H200, and small beside what unequal rows
# in flight cost: 4 to 12 % simulate alike on every mask at hand.
DEALT_SPAN_FRAC = 0.08


def original(head: HeadMask, context: OrderContext) -> Int32Array:
    """Query blocks as they come."""
    return np.arange(head.M, dtype=np.int32)


def random(head: HeadMask, context: OrderContext) -> Int32Array:
    """A random permutation per head."""
    return context.rng(Draw.ROWS).permutation(head.M).astype(np.int32)


def nnz(head: HeadMask, context: OrderContext) -> Int32Array:
    """NNZ descending over the whole head; equal rows keep their natural order."""
    return np.argsort(-head.row_nnz, kind="stable").astype(np.int32)


def nnz_dealt(head: HeadMask, context: OrderContext, span: float) -> Int32Array:
    """NNZ descending by groups of waves, rows of a group dealt to its waves in turn.

    A group takes so many waves that its rows span a share of their NNZ (`span`), and
    each of its waves spans about as much, longest row first. So an SM that has fallen behind takes
    a shorter row, and rows of equal length stay in step although SMs differ in speed
    (docs/policies.md).

    Args:
        head, context: of the rows.
        span: share of a group's longest row that its rows may differ by.
    """
    order = nnz(head, context)
    length = head.row_nnz[order]
    parts = []
    begin = 0
    while begin < head.M:
        within = length[begin:] > (1 - span) * length[begin]
        count = head.M - begin if within.all() else int(np.argmin(within))
        waves = max(1, -(-count // context.wave))
        end = min(begin + waves * context.wave, head.M)
        group = order[begin:end]
        waves = -(-len(group) // context.wave)
        parts += [group[first::waves] for first in range(waves)]
        begin = end
    return np.concatenate(parts)


def greedy(head: HeadMask, context: OrderContext) -> Int32Array:
    """Next row = largest summed Jaccard overlap with the W rows placed last."""
    from wavealign.order._kernels import greedy_order

    order: Int32Array = greedy_order(_bits(head), head.row_nnz, context.wave)
    return order


def wave_pack(head: HeadMask, context: OrderContext) -> Int32Array:
    """Wave after wave: the longest row left, then the largest summed overlap with this wave."""
    from wavealign.order._kernels import pack_order

    order: Int32Array = pack_order(_bits(head), head.row_nnz, context.wave)
    return order


def _bits(head: HeadMask) -> npt.NDArray[np.uint64]:
    """The head's rows as bits, uint64 ``(M, ceil(N / 64))``."""
    packed = np.packbits(head.to_dense(), axis=-1)
    return np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8))).view(np.uint64)


def nnz_inside_waves(order: Int32Array, head: HeadMask, wave: int) -> Int32Array:
    """Cut `order` into waves of `wave` slots and sort each by NNZ, descending.

    Stage 2 of the WaveAlign paper (section IV-D). Equal rows keep their place in `order`.

    Args:
        order: slot → row.
        head: of the rows.
        wave: slots of a wave.
    """
    length = head.row_nnz[order]
    wave_of_slot = np.arange(head.M) // wave
    return order[np.lexsort((-length, wave_of_slot))]
