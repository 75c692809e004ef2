"""Row orders on the device, every head at once: int64 ``[H, M]``, slot → query block."""

from __future__ import annotations

import torch

from wavealign.order.rows import DEALT_SPAN_FRAC


def natural(counts: torch.Tensor) -> torch.Tensor:
    """Query blocks as they come."""
    H, M = counts.shape
    return torch.arange(M, device=counts.device).expand(H, M)


def by_nnz(counts: torch.Tensor) -> torch.Tensor:
    """NNZ descending over the whole head; equal rows keep their natural order."""
    return torch.argsort(counts, dim=-1, descending=True, stable=True)


def by_nnz_inside_waves(order: torch.Tensor, counts: torch.Tensor, wave: int) -> torch.Tensor:
    """Cut `order` into waves of `wave` slots and sort each by NNZ, descending.

    Equal rows keep their place in `order`.
    """
    length = counts.gather(-1, order).long()
    span = 2**31  # more than any row keeps
    wave_of_slot = torch.arange(order.shape[-1], device=order.device) // wave
    return order.gather(-1, torch.argsort(wave_of_slot * span - length, dim=-1, stable=True))


def by_nnz_dealt(counts: torch.Tensor, wave: int) -> torch.Tensor:
    """NNZ descending by groups of waves, rows of a group dealt to its waves in turn.

    See `wavealign.order.rows.nnz_dealt`. A group takes a wave at least, so the groups of every
    head are found in as many steps as there are waves.
    """
    H, M = counts.shape
    order = by_nnz(counts)
    length = counts.gather(-1, order).double()
    slots = torch.arange(M, device=counts.device).expand(H, M)
    first, last = torch.zeros_like(slots), torch.full_like(slots, M)
    begin = torch.zeros(H, 1, dtype=torch.int64, device=counts.device)
    for _ in range(-(-M // wave)):
        longest = length.gather(-1, begin.clamp_max(M - 1))
        within = (length > (1 - DEALT_SPAN_FRAC) * longest) & (slots >= begin)
        waves = (within.sum(-1, keepdim=True) + wave - 1).div(wave, rounding_mode="floor")
        end = (begin + waves.clamp_min(1) * wave).clamp_max(M)
        inside = (slots >= begin) & (slots < end)
        first, last = torch.where(inside, begin, first), torch.where(inside, end, last)
        begin = end
    size, offset = last - first, slots - first
    waves = (size + wave - 1).div(wave, rounding_mode="floor")
    part = offset % waves
    even = size.div(waves, rounding_mode="floor")
    target = first + part * even + torch.minimum(part, size % waves)
    target = target + offset.div(waves, rounding_mode="floor")
    return torch.empty_like(order).scatter_(-1, target, order)
