"""MInference: vertical and slash lines, an A-shape, or top-k blocks of pooled scores.

Jiang et al., "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse
Attention", 2024. Upstream is causal only. For video the triangle is dropped: slashes are signed
offsets, the representative queries are spread over the sequence, the band of nearest diagonals
and the A-shape's window reach to both sides. Upstream's kernel reads slashes as unaligned
ranges and columns one by one; here every aligned block that one of them touches is kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wavealign.methods.context import HeadContext
from wavealign.methods.diagonals import (
    check_causal,
    columns_and_diagonals,
    from_block_diagonals,
    representatives,
)
from wavealign.methods.params import MInference
from wavealign.methods.select import block_means, lower_triangle, select_top_k


def minference(q: Tensor, k: Tensor, params: MInference, context: HeadContext) -> Tensor:
    """The block mask of one head, bool ``(M, N)``.

    Args:
        q, k: ``(L, D)``.
        params: see `MInference`.
        context: not used.
    """
    if params.pattern == "vertical-slash":
        keep = _vertical_slash(q, k, params)
    elif params.pattern == "a-shape":
        keep = _a_shape(len(q), params, q.device)
    else:
        keep = _block_sparse(q, k, params)
    if params.causal:
        keep &= lower_triangle(keep, params.block, params.block)
    return keep


def _vertical_slash(q: Tensor, k: Tensor, params: MInference) -> Tensor:
    check_causal(params.causal, params.representative)
    L, block = len(q), params.block
    blocks = math.ceil(L / block)
    positions = representatives(L, params.queries, params.representative, params.causal)
    by_key, by_diagonal = columns_and_diagonals(q, k, positions, params.causal)
    by_key[: params.sink] = math.inf
    offsets = torch.arange(-(L - 1), L, device=q.device)
    nearest = offsets.abs() < params.band
    if params.causal:
        by_diagonal.masked_fill_(offsets < 0, -math.inf)
        nearest &= offsets >= 0
    by_diagonal.masked_fill_(nearest, math.inf)
    verticals = min(L, max(params.verticals, params.sink))
    slashes = min(len(offsets), max(params.slashes, 50))
    columns = by_key.sort(descending=True, stable=True).indices[:verticals]
    ranked = by_diagonal.sort(descending=True, stable=True)
    chosen, real = ranked.indices[:slashes], ranked.values[:slashes] > -math.inf
    kept_columns = torch.zeros(blocks, dtype=torch.bool, device=q.device)
    kept_columns[columns // block] = True
    # Queries m·B .. m·B+B-1 read the keys m·B-o .. m·B-o+B-1: one block, or two neighbours.
    first = torch.div(-offsets[chosen], block, rounding_mode="floor")
    last = torch.div(block - 1 - offsets[chosen], block, rounding_mode="floor")
    # One place more takes what is none: leaving it out by a bool index would wait for a GPU.
    diagonals = torch.zeros(2 * blocks, dtype=torch.bool, device=q.device)
    for ahead in (first, last):  # K/V block - query block
        inside = real & (ahead > -blocks) & (ahead < blocks)
        diagonals[torch.where(inside, blocks - 1 - ahead, 2 * blocks - 1)] = True
    return kept_columns[None, :] | from_block_diagonals(diagonals[:-1], blocks, blocks)


def _a_shape(tokens: int, params: MInference, device: torch.device) -> Tensor:
    """First keys, and keys less than `n_local` tokens away."""
    block = params.block
    start = torch.arange(math.ceil(tokens / block), device=device) * block
    gap = (start[:, None] - start[None, :]).abs() - (block - 1)  # nearest pair of two blocks
    return (gap < params.n_local) | (start < params.n_init)[None, :]


def _block_sparse(q: Tensor, k: Tensor, params: MInference) -> Tensor:
    q_means = block_means(q, params.block, params.padded_mean)
    k_means = block_means(k, params.block, params.padded_mean)
    scores = q_means @ k_means.T
    if params.causal:
        visible = lower_triangle(scores, params.block, params.block)
        scores.masked_fill_(~visible, -math.inf)
    blocks = scores.shape[-1]
    return select_top_k(scores, min(params.topk or round(params.ratio * blocks), blocks))
