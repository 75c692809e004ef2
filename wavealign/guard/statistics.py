"""What the guard knows of a head: some sums over its mask, and a few snapshots of its launch.

`wavealign.guard.on_device` takes the same figures on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wavealign.masks.block_mask import BlockMask, HeadMask, Int32Array, Int64Array
from wavealign.masks.stats import mask_stats
from wavealign.order import row_orders
from wavealign.order.context import OrderContext
from wavealign.order.visits import BLOCK_TICKS, START_TICKS, VisitOrder, draw_kv_order

SNAPSHOTS = 24
"""Moments of a head's launch, evenly spaced, at which L2's content is looked at."""

WINDOW_WAVES = 3
"""Waves of rows that a snapshot sees."""


@dataclass(frozen=True)
class HeadStatistics:
    """A head of a launch, as the guard sees it.

    Attributes:
        rows: M.
        columns: N.
        nnz: kept blocks.
        spread: standard deviation of the rows' NNZ / their mean.
        overlap: mean Jaccard overlap of neighbouring rows; None where it isn't known.
        working_set_blocks: distinct K/V blocks.
        hit_original: L2 hit ratio of ascending lists in natural order, from snapshots.
        hit_sawtooth: the same of ``nnz/shuffled+sawtooth``.
        tail_original: ticks from the start of the launch to its end / ticks if all workers ended
            together, with every head in natural order; the same for all heads.
        tail_nnz: the same with every head's rows by NNZ.
    """

    rows: int
    columns: int
    nnz: int
    spread: float
    overlap: float | None
    working_set_blocks: int
    hit_original: float
    hit_sawtooth: float
    tail_original: float
    tail_nnz: float

    @property
    def density(self) -> float:
        """Kept blocks / all blocks."""
        return self.nnz / (self.rows * self.columns)


def mask_statistics(
    mask: BlockMask, wave: int, capacity_blocks: int, seed: int = 0
) -> list[HeadStatistics]:
    """Statistics of every head of a launch.

    Args:
        mask: the mask.
        wave: rows in flight, W.
        capacity_blocks: K/V blocks that L2 holds.
        seed: of the shuffled K/V orders.
    """
    return mask_statistics_for(mask, wave, [capacity_blocks], seed)[0]


def mask_statistics_for(
    mask: BlockMask, wave: int, capacities: Sequence[int], seed: int = 0
) -> list[list[HeadStatistics]]:
    """The same for several capacities of L2, at little more than the cost of one.

    Args:
        mask: of one launch.
        wave: rows in flight.
        capacities: K/V blocks that L2 holds.
        seed: of the shuffled visits.
    """
    _, per_head = mask_stats(mask)
    heads = list(mask.heads())
    orders = [
        [rule(head, OrderContext(wave, seed, h)) for h, head in enumerate(heads)]
        for rule in (row_orders.original, row_orders.nnz)
    ]
    starts, tails = zip(*(_list_schedule(heads, order, wave) for order in orders), strict=True)
    # Where a head has fewer rows than there are workers, several heads share L2.
    shares = max(1.0, wave / mask.M)
    sizes = np.array([max(1, int(blocks / shares)) for blocks in capacities], dtype=np.int64)
    found: list[list[HeadStatistics]] = [[] for _ in capacities]
    visits = (VisitOrder(), VisitOrder(shuffled=True, sawtooth=True))
    for h, (head, stats) in enumerate(zip(heads, per_head, strict=True)):
        context = OrderContext(wave, seed, h)
        hits = [
            _hits(head, orders[i][h], starts[i][h], visits[i], context, sizes) for i in range(2)
        ]
        for row, hit_original, hit_sawtooth in zip(found, *hits, strict=True):
            row.append(HeadStatistics(
                rows=head.M, columns=head.N, nnz=stats.nnz, spread=stats.row_nnz_spread,
                overlap=stats.neighbour_overlap, working_set_blocks=stats.working_set_blocks,
                hit_original=hit_original, hit_sawtooth=hit_sawtooth,
                tail_original=tails[0], tail_nnz=tails[1],
            ))  # fmt: skip
    return found


def _list_schedule(
    heads: list[HeadMask], orders: list[Int32Array], wave: int
) -> tuple[list[Int64Array], float]:
    """When each head's rows start, by slot, in the stream of the launch; and its tail."""
    from wavealign.order._kernels import list_schedule

    free, steps = np.zeros(wave, dtype=np.int64), np.full(wave, BLOCK_TICKS, dtype=np.int64)
    starts = [
        list_schedule(head.row_nnz[order], free, steps, START_TICKS)[0]
        for head, order in zip(heads, orders, strict=True)
    ]
    mean = float(free.mean())
    return starts, float(free.max()) / mean if mean else 1.0


def _hits(
    head: HeadMask, order: Int32Array, starts: Int64Array, visits: VisitOrder,
    context: OrderContext, capacities: Int64Array,
) -> list[float]:  # fmt: skip
    from wavealign.guard._kernels import snapshots

    kept = head.to_dense()
    if visits.shuffled:
        kept = kept[:, draw_kv_order(head, visits, context)]
    backwards = np.zeros(head.M, dtype=np.bool_)
    if visits.sawtooth:
        backwards = np.arange(head.M) // context.wave % 2 == 1
    begin = starts[0]
    last = (starts + START_TICKS + BLOCK_TICKS * head.row_nnz[order]).max()
    steps = 2 * np.arange(SNAPSHOTS, dtype=np.int64) + 1
    times = begin + steps * (last - begin) // (2 * SNAPSHOTS)
    requests, *misses = snapshots(
        kept, order, starts, backwards, times, WINDOW_WAVES * context.wave, capacities,
        BLOCK_TICKS, START_TICKS,
    )  # fmt: skip
    return [1.0 - float(m) / float(requests) if requests else 1.0 for m in misses]
