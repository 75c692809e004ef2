"""SpargeAttn: attention between block means, dense where a block's rows don't agree.

Zhang et al., "SpargeAttention: Accurate and Training-free Sparse Attention Accelerating Any
Model Inference", 2025: the first of its two stages, the one that makes a block mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wavealign.methods.context import HeadContext
from wavealign.methods.params import SpargeAttn
from wavealign.methods.select import block_means, lower_triangle, select_top_k


def spargeattn(q: Tensor, k: Tensor, params: SpargeAttn, context: HeadContext) -> Tensor:
    """The block mask of one head, bool ``(M, N)``.

    Args:
        q, k: ``(L, D)``.
        params: see `SpargeAttn`.
        context: not used.
    """
    if params.smooth_k:
        k = k - k.mean(dim=0, keepdim=True)
    dtype = q.dtype if params.score_dtype == "input" else torch.float32
    q_means = block_means(q, params.block_q).to(dtype)
    k_means = block_means(k, params.block_kv).to(dtype)
    q_similar = self_similarity(q, params.block_q, params.dense_tail) > params.similarity
    k_similar = self_similarity(k, params.block_kv, params.dense_tail) > params.similarity
    scores = q_means @ k_means.T * q.shape[-1] ** -0.5
    # Filled, not indexed by a bool tensor: for that the host would wait for the GPU.
    scores.masked_fill_(~k_similar, -math.inf)
    causal = None
    if params.causal:
        causal = lower_triangle(scores, params.block_q, params.block_kv)
        scores.masked_fill_(~causal, -math.inf)
    share = scores.softmax(dim=-1)
    if params.select == "top-k":
        keep = select_top_k(share, int(params.topk * share.shape[-1]))
    else:
        keep = _by_cdf(share, params)
    keep |= ~k_similar | ~q_similar[:, None]
    if params.sink:
        keep[:, 0] = True
    return keep & causal if causal is not None else keep


def self_similarity(x: Tensor, block: int, dense_tail: bool) -> Tensor:
    """Mean cosine between the rows of a block, all pairs, float32 ``(ceil(L / block),)``.

    Args:
        x: ``(L, D)``; a row of zeros resembles nothing.
        block: tokens per block.
        dense_tail: a ragged last block gets NaN, which is similar to nothing.
    """
    unit = torch.nn.functional.normalize(x.float(), dim=-1)
    # The mean over all pairs of products of unit rows is the squared length of their mean.
    cosine = block_means(unit, block).square().sum(-1)
    if dense_tail and len(x) % block:
        cosine[-1] = math.nan
    return cosine


def _by_cdf(share: Tensor, params: SpargeAttn) -> Tensor:
    values, ranks = share.sort(dim=-1, descending=True, stable=True)
    sums = values.cumsum(dim=-1)  # in the scores' dtype, as upstream
    limit = torch.tensor(params.cdf, dtype=torch.float32, device=share.device)
    chosen = sums <= limit
    if params.top_p == "inclusive":
        chosen[:, 1:] = sums[:, :-1] < limit
    chosen[:, 0] = True
    return torch.zeros_like(chosen).scatter_(-1, ranks, chosen)
