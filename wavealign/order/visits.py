"""Visit orders: in which sequence each row reads its own K/V blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wavealign.masks.block_mask import BlockMask, HeadMask, Int32Array
from wavealign.order.context import Draw, OrderContext
from wavealign.order.schedule import slot_of_row

# The list schedule behind `phased`: a block lasts two ticks and a row takes one to start,
# 0.5 block (0.45 was measured for FlashAttention-4 on an H200; docs/fidelity.md).
BLOCK_TICKS = 2
START_TICKS = 1


@dataclass(frozen=True)
class VisitOrder:
    """How rows walk their lists.

    Attributes:
        shuffled: sweep the K/V blocks in one random permutation per head, not ascending.
        sawtooth: rows in odd waves (of slots) walk backwards.
        phased: a row starts where the rows in flight are in their sweep, and wraps around.
    """

    shuffled: bool = False
    sawtooth: bool = False
    phased: bool = False


def sweep_order(head: HeadMask, visits: VisitOrder, context: OrderContext) -> Int32Array:
    """The sweep that all rows of a head share: position → K/V block, int32 ``(N,)``."""
    if visits.shuffled:
        return context.rng(Draw.VISITS).permutation(head.N).astype(np.int32)
    return np.arange(head.N, dtype=np.int32)


def fill_lists(
    lists: Int32Array,
    head: HeadMask,
    row_order: Int32Array,
    visits: VisitOrder,
    context: OrderContext,
) -> None:
    """Write one head's visiting lists, int32 ``(nnz,)``, without the phases (see `phase_lists`)."""
    from wavealign.order._kernels import reverse_rows, sweep_lists

    if visits.shuffled:
        sweep_lists(head.indptr, head.indices, sweep_order(head, visits, context), lists)
    else:
        lists[:] = head.indices
    if visits.sawtooth:
        odd_waves = np.flatnonzero(slot_of_row(row_order) // context.wave % 2)
        reverse_rows(head.indptr, lists, odd_waves)


def phase_lists(
    mask: BlockMask,
    row_order: Int32Array,
    lists: Int32Array,
    visits: VisitOrder,
    wave: int,
    seed: int,
) -> None:
    """Rotate, in place, every row's list to start where the rows in flight are.

    The launch is played once, heads in order without a barrier, at a constant cost per block:
    the same plan that a kernel could make before it runs.
    """
    from wavealign.order._kernels import phase_rows

    free = np.zeros(wave, dtype=np.int64)
    for h in range(mask.H):
        head = mask.head(h)
        sweep = sweep_order(head, visits, OrderContext(wave, seed, h))
        begin = mask.indptr[h * mask.M]
        phase_rows(
            row_order[h],
            head.indptr,
            lists[begin : begin + len(head.indices)],
            slot_of_row(sweep),
            free,
            BLOCK_TICKS,
            START_TICKS,
        )
