"""Row orders on the device, every head at once: int64 ``[H, M]``, slot → query block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wavealign.errors import unknown_name
from wavealign.order.row_orders import DEALT_SPAN_FRAC
from wavealign.planning.spectra import svd_order


@dataclass(frozen=True, eq=False)
class Rows:
    """What a row order may depend on.

    Attributes:
        mask: bool ``[H, M, N]``.
        counts: int32 ``[H, M]``, K/V blocks of each row.
        wave: rows in flight, W.
        solver_start: gives the random vectors that `svd` starts from.
    """

    mask: Tensor
    counts: Tensor
    wave: int
    solver_start: Callable[[], Tensor]


def row_order(name: str, inside_waves: bool, rows: Rows) -> Tensor:
    """The row order of this name.

    Args:
        name: one of `ROW_ORDERS`.
        inside_waves: sort its waves by NNZ.
        rows: what is ordered.

    Raises:
        InputError: no such name.
    """
    if name not in ROW_ORDERS:
        raise unknown_name("row order", name, ROW_ORDERS)
    order = ROW_ORDERS[name](rows)
    return by_nnz_inside_waves(order, rows.counts, rows.wave) if inside_waves else order


def natural(counts: Tensor) -> Tensor:
    """Query blocks as they come."""
    H, M = counts.shape
    return torch.arange(M, device=counts.device).expand(H, M)


def by_nnz(counts: Tensor) -> Tensor:
    """NNZ descending over the whole head; equal rows keep their natural order."""
    return torch.argsort(counts, dim=-1, descending=True, stable=True)


def by_nnz_inside_waves(order: Tensor, counts: Tensor, wave: int) -> Tensor:
    """Cut an order into waves and sort each by NNZ, descending; equal rows keep their place.

    Args:
        order: slot → query block ``[H, M]``.
        counts: K/V blocks that query blocks keep ``[H, M]``.
        wave: slots.
    """
    length = counts.gather(-1, order).long()
    span = 2**31  # more than any row keeps
    wave_of_slot = torch.arange(order.shape[-1], device=order.device) // wave
    return order.gather(-1, torch.argsort(wave_of_slot * span - length, dim=-1, stable=True))


def by_nnz_dealt(counts: Tensor, wave: int) -> Tensor:
    """NNZ descending by groups of waves, rows of a group dealt to its waves in turn.

    See `wavealign.order.row_orders.nnz_dealt`. Groups begin at whole waves: where a group would end
    is found for each of these places at once, and which of them are begins by following the ends.
    """
    H, M = counts.shape
    order = by_nnz(counts)
    length = counts.gather(-1, order).double()
    places = torch.arange(0, M, wave, device=counts.device)
    longest = length[:, ::wave].contiguous()
    # Lengths fall: how many are above the share is where the first one at or below it stands.
    above = torch.searchsorted(-length, -(1 - DEALT_SPAN_FRAC) * longest)
    waves = (above - places + wave - 1).div(wave, rounding_mode="floor").clamp_min(1)
    step = torch.arange(len(places), device=counts.device)
    following = step + waves  # [H, places], the place after the group
    begins = _followed(following)
    first_place = torch.where(begins, step, 0).cummax(-1).values
    slots = torch.arange(M, device=counts.device).expand(H, M)
    of_slot = (slots // wave).contiguous()
    first = first_place.gather(-1, of_slot) * wave
    last = (following.gather(-1, first_place).gather(-1, of_slot) * wave).clamp_max(M)
    size, offset = last - first, slots - first
    waves = (size + wave - 1).div(wave, rounding_mode="floor")
    part = offset % waves
    even = size.div(waves, rounding_mode="floor")
    target = first + part * even + torch.minimum(part, size % waves)
    target = target + offset.div(waves, rounding_mode="floor")
    return torch.empty_like(order).scatter_(-1, target, order)


def _followed(following: Tensor) -> Tensor:
    """Which places are reached from 0 by going from a place to `following`; bool ``[H, places]``.

    Every step goes forwards, so squaring "is there or one step on" a few times gives all.
    """
    places = following.shape[1]
    step = torch.arange(places, device=following.device)
    reach = (following[:, :, None] == step) | (step[:, None] == step)
    reach = reach.float()
    for _ in range((places - 1).bit_length()):
        reach = (reach @ reach).clamp_max(1.0)
    return reach[:, 0] > 0


ROW_ORDERS: dict[str, Callable[[Rows], Tensor]] = {
    "original": lambda rows: natural(rows.counts),
    "nnz": lambda rows: by_nnz(rows.counts),
    "nnz-dealt": lambda rows: by_nnz_dealt(rows.counts, rows.wave),
    "svd": lambda rows: svd_order(rows.mask, rows.counts, rows.solver_start()),
}
"""Row orders there is a device implementation of; each also takes the suffix ``+nnz``."""
