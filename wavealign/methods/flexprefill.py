"""FlexPrefill: per head, either vertical and slash lines or query-aware blocks.

Lai et al., "FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence
Inference", 2025. Upstream is causal only. For video the triangle is dropped: diagonals then
have a sign, the representative queries are spread over the sequence (its last queries are one
corner of the last frame), and a block diagonal d holds the offsets whose size divided by the
block is |d|. The choice of the pattern, the budgets and the forced column and diagonal stay.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wavealign._blocks import fold_columns
from wavealign.methods.context import HeadContext
from wavealign.methods.diagonals import (
    check_causal,
    columns_and_diagonals,
    from_block_diagonals,
    representatives,
)
from wavealign.methods.params import FlexPrefill
from wavealign.methods.select import block_means, mask_future


def flexprefill(q: Tensor, k: Tensor, params: FlexPrefill, context: HeadContext) -> Tensor:
    """The block mask of one head, bool ``(M, N)``.

    Args:
        q, k: ``(L, D)``.
        params: see `FlexPrefill`.
        context: not used.
    """
    check_causal(params.causal, params.representative)
    L, D = q.shape
    block = params.block
    blocks = math.ceil(L / block)
    positions = representatives(L, block, params.representative, params.causal)
    by_key, by_diagonal = columns_and_diagonals(q, k, positions, params.causal)
    by_key /= len(positions)
    by_diagonal /= len(positions)
    q_means, k_means = block_means(q, block), block_means(k, block)

    vertical = fold_columns(by_key, block)
    slash = _fold_diagonals(by_diagonal, L, block)
    mean_query = q[positions.to(q.device)].float().mean(0)
    pooled = (k_means @ mean_query / math.sqrt(D)).softmax(dim=-1)
    least = math.ceil(params.min_budget / block)
    if _distance(pooled, vertical) < params.tau:
        columns = slashes = least
        aware = _query_aware(q_means, k_means, L, params)
    else:
        most = math.ceil(params.max_budget / block) if params.max_budget else 2 * blocks
        columns = min(max(_cover(by_key, params.gamma, block), least), most)
        slashes = min(max(_cover(by_diagonal, params.gamma, block), least), most)
        aware = torch.zeros(blocks, blocks, dtype=torch.bool, device=q.device)
    vertical[0] = math.inf
    slash[blocks - 1] = math.inf
    kept_columns = _largest(vertical, columns)
    kept_slashes = _largest(slash, slashes)
    keep = aware | kept_columns[None, :] | from_block_diagonals(kept_slashes, blocks, blocks)
    return keep.tril_() if params.causal else keep


def _cover(mass: Tensor, gamma: float, block: int) -> int:
    """Blocks whose worth of single columns (or diagonals) covers a share γ of the mass."""
    sums = mass.sort(descending=True).values.cumsum(0)
    return (int((sums <= gamma).sum()) + 1) // block + 1


def _fold_diagonals(by_diagonal: Tensor, tokens: int, block: int) -> Tensor:
    """Mass of every block diagonal, float32 ``(2 B - 1,)``, the main one in the middle.

    Upstream cuts the diagonals into groups of `block` from the farthest key on, so that with a
    ragged sequence the group next to the main diagonal is the short one.
    """
    blocks = math.ceil(tokens / block)
    index = torch.arange(tokens, device=by_diagonal.device)
    group = blocks - 1 - index.flip(0) // block  # of the distances 0 .. L-1
    folded = torch.zeros(2 * blocks - 1, dtype=torch.float32, device=by_diagonal.device)
    folded.index_add_(0, blocks - 1 + group, by_diagonal[tokens - 1 :])
    folded.index_add_(0, blocks - 1 - group[1:], by_diagonal[: tokens - 1].flip(0))
    return folded


def _largest(values: Tensor, count: int) -> Tensor:
    keep = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    keep[values.sort(descending=True, stable=True).indices[:count]] = True
    return keep


def _distance(p: Tensor, q: Tensor) -> float:
    """Root of the Jensen-Shannon divergence in nats; terms where either is 0 count as 0."""
    middle = (p + q) / 2
    terms = torch.zeros_like(middle)
    for side in (p, q):
        terms += torch.where(side > 0, side * (side / middle).log() / 2, 0)
    return math.sqrt(max(0.0, float(terms.sum())))


def _query_aware(q_means: Tensor, k_means: Tensor, tokens: int, params: FlexPrefill) -> Tensor:
    """Blocks by pooled attention, one budget for all rows: the block that crosses it is dropped."""
    blocks, D = q_means.shape
    logits = q_means @ k_means.T / math.sqrt(D)
    if params.causal:
        mask_future(logits)
    mass = logits.softmax(dim=-1).flatten()
    values, ranks = mass.sort(descending=True, stable=True)
    chosen = values.double().cumsum(0) <= params.gamma * blocks
    return torch.zeros_like(chosen).scatter_(0, ranks, chosen).view(blocks, blocks)
