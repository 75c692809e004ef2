"""Picking blocks from scores, one row at a time: top-k and the two conventions of top-p."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


def top_p(scores: Tensor, share: float, convention: str) -> Tensor:
    """Blocks that together hold a share of each row's score.

    Args:
        scores: float ``(..., N)``, not negative.
        share: of the row's sum, above 0 and up to 1.
        convention: "inclusive" keeps the block that crosses the share, "exclusive" drops it
            but keeps at least one.

    Returns:
        bool ``(..., N)``. Sums are taken in float64; ties go to the lower index. On a GPU a
        kernel without a sort does float32 rows; its sums come in another order.
    """
    if _fused(scores):
        from wavealign.methods._select_kernels import launch_top_p

        rows = scores.reshape(-1, scores.shape[-1])
        kept = torch.empty(1, *rows.shape, dtype=torch.bool, device=rows.device)
        launch_top_p(rows, kept, share, convention)
        return kept.view(scores.shape)
    values, ranks = scores.sort(dim=-1, descending=True, stable=True)
    sums = values.double().cumsum(-1)
    wanted = share * sums[..., -1:]
    if convention == "inclusive":
        keep = torch.zeros_like(sums, dtype=torch.bool)
        keep[..., 0] = True
        keep[..., 1:] = sums[..., :-1] < wanted
    else:
        keep = sums <= wanted
        keep[..., 0] = True
    return torch.zeros_like(keep).scatter_(-1, ranks, keep)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; PyTorch's CUDA builds bring it on Linux."""
    return importlib.util.find_spec("triton") is not None


def _fused(scores: Tensor) -> bool:
    if not (scores.is_cuda and scores.dtype == torch.float32 and scores.numel()):
        return False
    if not has_triton():
        return False
    from wavealign.methods._select_kernels import MOST_COLUMNS

    return scores.shape[-1] <= MOST_COLUMNS


def top_k(scores: Tensor, count: int) -> Tensor:
    """The `count` largest of each row, at least one; bool ``(..., N)``; ties to the lower index."""
    ranks = scores.sort(dim=-1, descending=True, stable=True).indices
    chosen = ranks[..., : max(1, min(count, scores.shape[-1]))]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)


def lower_triangle(like: Tensor, block_q: int, block_kv: int) -> Tensor:
    """Blocks that hold a key at or before one of the row's queries, bool, shaped as `like`."""
    rows, columns = like.shape
    last_query = torch.arange(1, rows + 1, device=like.device) * block_q - 1
    first_key = torch.arange(columns, device=like.device) * block_kv
    visible: Tensor = first_key[None, :] <= last_query[:, None]
    return visible


def block_means(x: Tensor, block: int, padded: bool = False) -> Tensor:
    """Mean of every block of tokens, float32 ``(ceil(L / block), D)``.

    Args:
        x: ``(L, D)``.
        block: tokens per block.
        padded: divide a ragged last block by `block` instead of its own length.
    """
    L, D = x.shape
    whole = L // block
    means = x[: whole * block].float().reshape(whole, block, D).mean(1)
    if L % block == 0:
        return means
    tail = x[whole * block :].float()
    return torch.cat([means, (tail.sum(0) / (block if padded else len(tail)))[None]])
