"""The guard's statistics of a mask on a GPU; the host waits once, for a few numbers a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wavealign.guard.statistics import SNAPSHOTS, WINDOW_WAVES, HeadStatistics, mask_statistics
from wavealign.masks.block_mask import BlockMask
from wavealign.order.visits import BLOCK_TICKS, START_TICKS
from wavealign.planning import row_orders
from wavealign.planning.masks import dense_mask
from wavealign.planning.visits import row_counts


@dataclass(frozen=True, eq=False)
class Launches:
    """The launch in natural order and by NNZ, on the device.

    Attributes:
        counts: int32 ``[H, M]``, NNZ of the query blocks.
        by_nnz: int64 ``[H, M]``, the rows by NNZ.
        starts: int64 ``[2, H * M]`` by slot, in ticks.
        tails: float64 ``[2]``, see `HeadStatistics`.
    """

    counts: torch.Tensor
    by_nnz: torch.Tensor
    starts: torch.Tensor
    tails: torch.Tensor


def device_statistics(
    mask: torch.Tensor, wave: int, capacity_blocks: int, kv_orders: torch.Tensor, seed: int = 0,
    launches: Launches | None = None,
) -> list[HeadStatistics]:  # fmt: skip
    """What `mask_statistics` says, from a mask on a device.

    Args:
        mask: bool ``[H, M, N]`` or ``[B, H, M, N]``.
        wave: rows in flight, W.
        capacity_blocks: K/V blocks that L2 holds.
        kv_orders: int32 ``[H, N]``, the shuffled K/V orders (`Planner.kv_orders`).
        seed: that they were drawn with.
        launches: of this mask, where `device_lengths` has made them.

    Returns:
        One entry a head; the neighbours' overlap, which no decision rests on, isn't taken.
    """
    kept = dense_mask(mask)
    if not kept.is_cuda:
        on_host = BlockMask.from_dense(kept.cpu().numpy())
        return mask_statistics(on_host, wave, capacity_blocks, seed)
    return _on_gpu(kept, wave, capacity_blocks, kv_orders, launches)


def device_lengths(mask: torch.Tensor, wave: int) -> tuple[list[HeadStatistics], Launches | None]:
    """What the lengths of the rows alone say, from a mask on a device.

    L2 is taken to hold every K/V block: hit ratios are 1, the working set all of them.

    Args:
        mask: bool ``[H, M, N]`` or ``[B, H, M, N]``.
        wave: rows in flight, W.

    Returns:
        One entry a head, and on a GPU the launches behind them, for `device_statistics`.
    """
    kept = dense_mask(mask)
    H, M, N = kept.shape
    launches = None
    if kept.is_cuda:
        launches = _launches(kept, wave)
        counts = launches.counts
        rows_of = torch.stack([counts.sum(-1).double(), _spread(counts)], dim=1)
        table = torch.cat([rows_of, launches.tails.expand(H, 2)], dim=1).tolist()
    else:
        table = [
            [s.nnz, s.spread, s.tail_original, s.tail_nnz]
            for s in mask_statistics(BlockMask.from_dense(kept.numpy()), wave, N)
        ]
    heads = [
        HeadStatistics(M, N, int(nnz), spread, None, N if nnz else 0, 1.0, 1.0, tail, tail_nnz)
        for nnz, spread, tail, tail_nnz in table
    ]
    return heads, launches


def _launches(kept: torch.Tensor, wave: int) -> Launches:
    from wavealign.planning._phase_kernels import launch_list_schedule

    counts = row_counts(kept)
    by_nnz = row_orders.by_nnz(counts)
    launches = torch.stack([counts.view(-1), counts.gather(-1, by_nnz).view(-1)])
    starts, _ = launch_list_schedule(launches, wave, BLOCK_TICKS, START_TICKS)
    ticks = START_TICKS + BLOCK_TICKS * launches
    tails = (starts + ticks).amax(-1).double() / (ticks.sum(-1).double() / wave)
    return Launches(counts, by_nnz, starts, tails)


def _spread(counts: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the rows' NNZ / their mean, float64 ``[H]``."""
    length = counts.double()
    return length.std(-1, correction=0) / length.mean(-1).clamp_min(1e-300)


def _on_gpu(
    kept: torch.Tensor, wave: int, capacity_blocks: int, kv_orders: torch.Tensor,
    launches: Launches | None,
) -> list[HeadStatistics]:  # fmt: skip
    from wavealign.guard._snapshot_kernels import launch_snapshots

    H, M, N = kept.shape
    made = launches or _launches(kept, wave)
    counts, starts = made.counts, made.starts
    natural = row_orders.natural(counts).int().contiguous()
    identity = torch.arange(N, dtype=torch.int32, device=kept.device).expand(H, N).contiguous()
    capacity = max(1, int(capacity_blocks / max(1.0, wave / M)))
    figures = [counts.sum(-1), kept.any(1).sum(-1)]
    for order, own_kv_orders, order_starts, sawtooth in (
        (natural, identity, starts[0], False),
        (made.by_nnz.int(), kv_orders, starts[1], True),
    ):
        found = launch_snapshots(
            kept, order, counts, own_kv_orders, order_starts.view(H, M), wave, WINDOW_WAVES * wave,
            SNAPSHOTS, capacity, BLOCK_TICKS, START_TICKS, sawtooth,
        )  # fmt: skip
        figures += [found[:, 0], found[:, 1]]
    table = torch.stack(
        [*(f.double() for f in figures), _spread(counts), *(t.expand(H) for t in made.tails)], dim=1
    )
    return [
        HeadStatistics(
            rows=M,
            columns=N,
            nnz=int(nnz),
            spread=spread_,
            overlap=None,
            working_set_blocks=int(touched),
            hit_original=1.0 - missed / asked if asked else 1.0,
            hit_sawtooth=1.0 - missed_saw / asked_saw if asked_saw else 1.0,
            tail_original=tail,
            tail_nnz=tail_nnz,
        )
        for nnz, touched, asked, missed, asked_saw, missed_saw, spread_, tail, tail_nnz in (
            table.tolist()
        )
    ]
