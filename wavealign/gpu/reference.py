"""Block-sparse attention in float32, the slow and obvious way: what every backend must equal."""

from __future__ import annotations

import math

import torch

from wavealign.gpu.capabilities import Problem
from wavealign.gpu.inputs import Inputs, on_device

_SCORES_BYTES = 2**31  # of one chunk of rows' scores


def reference_attention(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the kept blocks only; a row of query blocks at a time, so 364K tokens fit.

    Rows without a K/V block give output 0 and log-sum-exp -inf.

    Args:
        problem: mask and shapes.
        inputs: Q, K and V on any device.

    Returns:
        Output float32 ``[B, tokens_q, H, D]`` and log-sum-exp (natural logarithm) float32
        ``[B, H, tokens_q]``.
    """
    mask = problem.mask
    q, k, v = inputs.q, inputs.k, inputs.v
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full((q.shape[0], mask.H, mask.tokens_q), -math.inf, device=q.device)
    scale = 1.0 / math.sqrt(problem.head_dim)
    within = torch.arange(mask.block_kv, device=q.device)
    for h in range(mask.H):
        head = mask.head(h)
        kv_head = h // problem.heads_per_kv_head
        keys, values = (t[:, :, kv_head].float() for t in (k, v))  # [B, tokens_kv, D]
        lists = on_device(head.indices, q.device)
        for i in range(mask.M):
            begin, end = head.indptr[i : i + 2]
            if begin == end:
                continue
            tokens = slice(i * mask.block_q, min((i + 1) * mask.block_q, mask.tokens_q))
            kept = (lists[begin:end, None] * mask.block_kv + within).flatten()
            kept = kept[kept < mask.tokens_kv]
            out[:, tokens, h], lse[:, h, tokens] = attend_tokens(
                q[:, tokens, h].float(), keys, values, kept, scale
            )
    return out, lse


def attend_tokens(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query block over the kept tokens, a chunk at a time, merged by log-sum-exp."""
    chunk = max(1, _SCORES_BYTES // (4 * q.shape[0] * q.shape[1]))
    out, lse = None, None
    for part in kept.split(chunk):
        scores = torch.matmul(q, keys[:, part].transpose(1, 2)) * scale
        part_lse = scores.logsumexp(-1)
        part_out = torch.matmul((scores - part_lse[..., None]).exp_(), values[:, part])
        if out is None or lse is None:
            out, lse = part_out, part_lse
            continue
        both = torch.logaddexp(lse, part_lse)
        out = out * (lse - both).exp()[..., None] + part_out * (part_lse - both).exp()[..., None]
        lse = both
    assert out is not None
    assert lse is not None
    return out, lse
