"""Row orders on the device, every head at once: int64 ``[H, M]``, slot → query block."""

from __future__ import annotations

import torch


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
