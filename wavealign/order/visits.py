"""Visit orders: in which sequence each row reads its own K/V blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wavealign.masks.block_mask import BlockMask, HeadMask, Int32Array
from wavealign.order.context import Draw, OrderContext
from wavealign.order.schedule import inverse

# The list schedule behind `phased`: a block lasts two ticks and a row takes one to start,
# 0.5 block (0.45 was measured for FlashAttention-4 on an H200; docs/fidelity.md).
BLOCK_TICKS = 2
START_TICKS = 1


@dataclass(frozen=True)
class VisitOrder:
    """How rows walk their lists.

    Attributes:
        shuffled: the K/V order is one random permutation per head, not ascending.
        sawtooth: rows in odd waves (of slots) walk backwards.
        phased: a row starts where the rows in flight are in their pass, and wraps around.
        seed: of the random permutation; None for the launch's.
        wave: rows in flight that `sawtooth` and `phased` reckon with; None for the launch's.
    """

    shuffled: bool = False
    sawtooth: bool = False
    phased: bool = False
    seed: int | None = None
    wave: int | None = None


def draw_kv_order(head: HeadMask, visits: VisitOrder, context: OrderContext) -> Int32Array:
    """The order in which all rows of a head pass over K/V: place → block, int32 ``(N,)``.

    Args:
        head, context: of the rows.
        visits: of the policy.
    """
    if visits.shuffled:
        rng = context.replaced(seed=visits.seed).rng(Draw.VISITS)
        return rng.permutation(head.N).astype(np.int32)
    return np.arange(head.N, dtype=np.int32)


def fill_lists(
    lists: Int32Array, head: HeadMask, visits: VisitOrder, context: OrderContext
) -> None:
    """Write one head's lists in its K/V order.

    Args:
        lists: int32 ``(nnz,)``, written.
        head, visits, context: see `draw_kv_order`.
    """
    from wavealign.order._kernels import lists_in_kv_order

    if visits.shuffled:
        kv_order = draw_kv_order(head, visits, context)
        lists_in_kv_order(head.indptr, head.indices, kv_order, lists)
    else:
        lists[:] = head.indices


def turn_lists(
    lists: Int32Array, head: HeadMask, row_order: Int32Array, visits: VisitOrder,
    context: OrderContext,
) -> None:  # fmt: skip
    """Reverse, in place, the lists of rows in odd waves, where `sawtooth` says so.

    Args:
        lists: int32 ``(nnz,)``, changed in place.
        head: of the rows.
        row_order: slot → row, int32 ``(M,)``.
        visits, context: of the policy.
    """
    from wavealign.order._kernels import reverse_rows

    if visits.sawtooth:
        wave = context.replaced(wave=visits.wave).wave
        reverse_rows(head.indptr, lists, np.flatnonzero(inverse(row_order) // wave % 2))


def phase_lists(
    mask: BlockMask, row_order: Int32Array, lists: Int32Array, visits: VisitOrder, wave: int,
    seed: int, first_head: int = 0,
) -> None:  # fmt: skip
    """Rotate, in place, every row's list to start where the rows in flight are.

    The launch is played once, heads in order without a barrier, at a constant cost per block:
    the same plan that a kernel could make before it runs.

    Args:
        mask: of one launch.
        row_order: int32 ``(H, M)``, slot → row.
        lists: int32 ``(nnz,)``, changed in place.
        visits: the visit order.
        wave, seed: the policy's.
        first_head: place of the mask's first head among those that the seed counts.
    """
    from wavealign.order._kernels import phase_rows

    free = np.zeros(wave if visits.wave is None else visits.wave, dtype=np.int64)
    for h in range(mask.H):
        head = mask.head(h)
        kv_order = draw_kv_order(head, visits, OrderContext(wave, seed, first_head + h))
        begin = mask.indptr[h * mask.M]
        part = lists[begin : begin + len(head.indices)]
        places = inverse(kv_order)
        phase_rows(row_order[h], head.indptr, part, places, free, BLOCK_TICKS, START_TICKS)
