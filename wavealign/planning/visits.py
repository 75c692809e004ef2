"""From a mask, K/V orders and row orders to lists, in torch operations.

`write_lists` is the readable twin of the Triton kernel in `_list_kernels`, which replaces it on a
GPU; tests hold the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wavealign.planning.layout import ListLayout

_CHUNK_BYTES = 2**28  # of the int64 places of a few heads


@dataclass(frozen=True, eq=False)
class Walk:
    """How the rows of a launch are walked.

    Attributes:
        kv_orders: int32 ``[H, N]``, place in the head's K/V order → K/V block.
        backwards: bool ``[H, M]``: rows, by query block, that walk it backwards.
        skips: int32 ``[H, M]``: entries of its list that a row visits last, after wrapping
            around; less than its length.
    """

    kv_orders: Tensor
    backwards: Tensor
    skips: Tensor


def write_lists(
    mask: Tensor, counts: Tensor, walk: Walk, slots: Tensor, layout: ListLayout, out: Tensor
) -> None:
    """Write each row's K/V blocks in visiting order.

    Args:
        mask: bool ``[H, M, N]``.
        counts: int32 ``[H, M]``, by query block.
        walk: the visit order.
        slots: int64 ``[H, M]``, query block → slot.
        layout: how the kernel reads them.
        out: int32 ``[H, M, width]``; places behind a row's list aren't written. Entries beyond
            `width` are dropped.
    """
    if out.is_cuda:
        from wavealign.planning._list_kernels import launch_lists

        launch_lists(mask, counts, walk, slots, layout, out)
        return
    H, M, N = mask.shape
    heads = max(1, _CHUNK_BYTES // (8 * M * N))
    for first in range(0, H, heads):
        part = slice(first, first + heads)
        piece = Walk(walk.kv_orders[part], walk.backwards[part], walk.skips[part])
        _write(mask[part], counts[part], piece, slots[part], layout, out[part])


def _write(
    mask: Tensor, counts: Tensor, walk: Walk, slots: Tensor, layout: ListLayout, out: Tensor
) -> None:
    H, M, N = mask.shape
    width = out.shape[-1]
    kv_orders = walk.kv_orders[:, None, :].expand(H, M, N)
    kept = mask.gather(-1, kv_orders.long())
    last = counts[..., None] - 1
    visit = kept.cumsum(-1, dtype=torch.int32) - 1
    visit = torch.where(walk.backwards[..., None], last - visit, visit)
    visit = torch.remainder(visit - walk.skips[..., None], (last + 1).clamp_min(1))
    if layout.ragged_kv_first:
        ragged = kept & (kv_orders == N - 1)
        # Where the row visits its last K/V block; behind every place where it hasn't one.
        at = torch.where(ragged, visit, 0).sum(-1, keepdim=True)
        at = torch.where(ragged.any(-1, keepdim=True), at, -1)
        visit = torch.where(visit == at, 0, torch.where(visit < at, visit + 1, visit))
    if layout.walks == "backwards":
        visit = last - visit
    target = torch.where(kept & (visit < width), visit, width).long()
    wide = out.new_zeros(H, M, width + 1)
    wide.scatter_(-1, target, kv_orders)
    rows = wide[..., :width]
    if layout.gathers:
        out.scatter_(1, slots[..., None].expand(-1, -1, width), rows)
    else:
        out.copy_(rows)


def write_places(mask: Tensor, counts: Tensor, kv_orders: Tensor, out: Tensor) -> None:
    """Write each row's places in the head's K/V order, ascending: int32 ``[H, M, width]``."""
    H, M, N = mask.shape
    if out.is_cuda:
        from wavealign.planning._list_kernels import launch_places

        launch_places(mask, counts, kv_orders, out)
        return
    width = out.shape[-1]
    places = torch.arange(N, dtype=torch.int32, device=mask.device)
    for h in range(H):
        kept = mask[h][:, kv_orders[h].long()]
        visit = kept.cumsum(-1, dtype=torch.int32) - 1
        target = torch.where(kept & (visit < width), visit, width).long()
        wide = out.new_zeros(M, width + 1)
        wide.scatter_(-1, target, places.expand(M, N))
        out[h].copy_(wide[:, :width])
