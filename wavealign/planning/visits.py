"""From a mask, K/V orders and row orders to lists, in torch operations.

`write_lists` is the readable twin of the Triton kernel in `_list_kernels`, which replaces it on a
GPU; tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def row_counts(mask: Tensor) -> Tensor:
    """K/V blocks that each row keeps, int32 ``[H, M]``.

    Args:
        mask: bool ``[H, M, N]``, contiguous.
    """
    if not mask.is_cuda:
        return mask.sum(-1, dtype=torch.int32)
    # Torch's own sum would make an int32 copy of the mask first.
    from wavealign.planning._list_kernels import launch_counts

    counts = torch.empty(mask.shape[:2], dtype=torch.int32, device=mask.device)
    launch_counts(mask, counts)
    return counts


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
    width = out.shape[-1]
    for part in _parts(mask):
        kv_orders = walk.kv_orders[part, None]
        kept, visit = _along(kv_orders, mask[part])
        last = counts[part, :, None] - 1
        visit = torch.where(walk.backwards[part, :, None], last - visit, visit)
        visit = torch.remainder(visit - walk.skips[part, :, None], (last + 1).clamp_min(1))
        if layout.ragged_kv_first:
            ragged = kept & (kv_orders == mask.shape[-1] - 1)
            # Where the row visits its last K/V block; behind every place where it hasn't one.
            at = torch.where(ragged, visit, 0).sum(-1, keepdim=True)
            at = torch.where(ragged.any(-1, keepdim=True), at, -1)
            visit = torch.where(visit == at, 0, torch.where(visit < at, visit + 1, visit))
        if layout.walks == "backwards":
            visit = last - visit
        rows = _by_visit(kv_orders, kept, visit, width)
        if layout.gathers:
            out[part].scatter_(1, slots[part, :, None].expand(-1, -1, width), rows)
        else:
            out[part].copy_(rows)


def write_places(mask: Tensor, counts: Tensor, kv_orders: Tensor, out: Tensor) -> None:
    """Write each row's places in the head's K/V order, ascending.

    Args:
        mask: bool ``[H, M, N]``.
        counts: K/V blocks that each row keeps ``[H, M]``.
        kv_orders: place → K/V block ``[H, N]``.
        out: int32 ``[H, M, width]``.
    """
    if out.is_cuda:
        from wavealign.planning._list_kernels import launch_places

        launch_places(mask, counts, kv_orders, out)
        return
    places = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device)
    for part in _parts(mask):
        kept, visit = _along(kv_orders[part, None], mask[part])
        out[part].copy_(_by_visit(places, kept, visit, out.shape[-1]))


def _parts(mask: Tensor) -> Iterator[slice]:
    """A few heads at a time, so that what lies between mask and lists stays small."""
    H, M, N = mask.shape
    heads = max(1, _CHUNK_BYTES // (8 * M * N))
    return (slice(first, first + heads) for first in range(0, H, heads))


def _along(kv_orders: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which places of the K/V orders ``[H, 1, N]`` a row keeps, and how many it keeps before."""
    kept = mask.gather(-1, kv_orders.expand(mask.shape).long())
    return kept, kept.cumsum(-1, dtype=torch.int32) - 1


def _by_visit(values: Tensor, kept: Tensor, visit: Tensor, width: int) -> Tensor:
    """The kept values of each row in the order of their visits, int32 ``[H, M, width]``."""
    target = torch.where(kept & (visit < width), visit, width).long()
    wide = values.new_zeros(*kept.shape[:2], width + 1)
    return wide.scatter_(-1, target, values.expand(kept.shape))[..., :width]
