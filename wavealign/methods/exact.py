"""True attention mass of every block, in one pass with an online log-sum-exp.

The mass W[u, v] of block (u, v) is the mean over the queries of u of their softmax attention to
the keys of v; a row sums to 1. Rows kept by top-p are the criterion of GSRS, by top-k that of
AdaSpa (Xia et al., "Training-free and Adaptive Sparse Attention for Efficient Long Video
Generation", 2025).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wavealign._blocks import fold_columns
from wavealign.methods.context import HeadContext, keep_text
from wavealign.methods.params import Exact
from wavealign.methods.select import mask_future, select_top_k, top_p

_CHUNK_BYTES = 64 * 2**20  # of scores at a time: stays near the cache
_SUMS_BYTES = 128 * 2**20


def exact(q: Tensor, k: Tensor, params: Exact, context: HeadContext) -> Tensor:
    """The block mask of one head, bool ``(M, N)``.

    Args:
        q, k: ``(L, D)``.
        params: see `Exact`.
        context: says where text begins.
    """
    mass = block_mass(q, k, params.block, params.block, params.causal)
    if params.select == "top-p":
        keep = top_p(mass, params.mass, params.top_p)
    else:
        keep = select_top_k(mass, round(params.topk * mass.shape[-1]))
    if params.dense_text:
        keep_text(keep, context.tokens, context.text_tokens, (params.block, params.block))
    return keep & (mass > 0) if params.causal else keep


def block_mass(q: Tensor, k: Tensor, block_q: int, block_kv: int, causal: bool = False) -> Tensor:
    """Mean softmax attention of each query block to each K/V block, float32 ``(M, N)``.

    Costs 2·L²·D floating-point operations and L² exponentials; memory grows with L times the
    number of K/V blocks of a few query blocks, never with L².

    Args:
        q, k: ``(L, D)``.
        block_q: tokens per query block.
        block_kv: tokens per K/V block.
        causal: keys up to the query only.
    """
    L, D = q.shape
    M, N = math.ceil(L / block_q), math.ceil(L / block_kv)
    queries = q.float() / math.sqrt(D)
    keys = k.float().T.contiguous()
    mass = torch.empty(M, N, dtype=torch.float32, device=q.device)
    rows = max(1, min(_SUMS_BYTES // (4 * N), 2048) // block_q) * block_q
    width = max(1, _CHUNK_BYTES // (4 * rows) // block_kv) * block_kv
    for start in range(0, L, rows):
        stop = min(start + rows, L)
        sums = torch.zeros(stop - start, N, dtype=torch.float32, device=q.device)
        peak = torch.full((stop - start, 1), -math.inf, dtype=torch.float32, device=q.device)
        for first in range(0, min(L, stop) if causal else L, width):
            last = min(first + width, L)
            logits = queries[start:stop] @ keys[:, first:last]
            if causal:
                mask_future(logits, start, first)
            top = torch.maximum(peak, logits.amax(-1, keepdim=True))
            # A row that has seen no key yet (causal) has no peak to shrink from.
            sums *= torch.where(peak > -math.inf, (peak - top).exp(), 0)
            peak = top
            logits.sub_(torch.where(top > -math.inf, top, 0)).exp_()
            sums[:, first // block_kv : math.ceil(last / block_kv)] += fold_columns(
                logits, block_kv
            )
        sums /= sums.sum(-1, keepdim=True)
        for u in range(start // block_q, math.ceil(stop / block_q)):
            mass[u] = sums[u * block_q - start : (u + 1) * block_q - start].mean(0)
    return mass


def recall(mass: Tensor, keep: Tensor, tokens: int, block_q: int) -> float:
    """Attention mass kept by a mask, mean over queries.

    Args:
        mass: of `block_mass`, ``(M, N)``.
        keep: bool ``(M, N)``.
        tokens: queries.
        block_q: tokens per query block; a ragged last block weighs less.
    """
    rows = (mass.double() * keep).sum(-1)
    weight = torch.full_like(rows, block_q)
    weight[-1] = tokens - (len(rows) - 1) * block_q
    return float((rows * weight).sum() / tokens)
