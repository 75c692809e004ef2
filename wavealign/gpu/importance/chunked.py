"""`attend_with_importance` in torch operations: any float dtype, any device, in chunks of rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wavealign._blocks import fold_columns
from wavealign.gpu.importance.call import Call, Importance

_SCORES_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}  # of a chunk; a few such tensors live at once


def scores_bytes(device: torch.device) -> int:
    """How much a chunk of scores may take where it is computed."""
    return _SCORES_BYTES.get(device.type, _SCORES_BYTES["cpu"])


def attend_chunked(call: Call) -> Importance:
    """See `wavealign.gpu.importance.attend_with_importance`.

    Every chunk of query rows sees all its keys at once, so there is no running maximum and nothing
    to rescale. Computes in float32, float64 inputs in float64. Candidates are read on the host.
    """
    q, k = call.q, call.k
    B, tokens, H, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    options: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    result = Importance(
        torch.zeros_like(q, memory_format=torch.contiguous_format),
        torch.full((B, H, tokens), -math.inf, **options),
        torch.zeros(B, H, call.M, call.N, **options),
        torch.zeros(B, H, tokens, **options) if call.diagnostics else None,
        torch.zeros(B, H, tokens, **options) if call.diagnostics else None,
    )
    candidates = call.blocks_of_lists()
    fit = scores_bytes(q.device) // (dtype.itemsize * k.shape[1] * call.block_q)
    for b in range(B):
        for h in range(H):
            kv_head = h // (H // k.shape[2])
            keys, values = (t[b, :, kv_head].to(dtype) for t in (k, call.v))
            if candidates is None:
                for first in range(0, call.M, max(1, fit)):
                    _attend(call, result, b, h, (first, first + max(1, fit)), keys, values, None)
                continue
            mine = candidates[min(b, len(candidates) - 1), h]
            lists = torch.split(mine.nonzero()[:, 1], mine.sum(-1).tolist())
            for u, blocks in enumerate(lists):
                if len(blocks):
                    _attend(call, result, b, h, (u, u + 1), keys, values, blocks)
    if result.entropy is not None and result.distance is not None:
        query_blocks = torch.arange(tokens, device=q.device) // call.block_q
        left_out = query_blocks % call.diagnose_every != 0
        result.entropy.masked_fill_(left_out, math.nan)
        result.distance.masked_fill_(left_out, math.nan)
    return result


def _attend(
    call: Call, result: Importance, b: int, h: int, query_blocks: tuple[int, int],
    keys: Tensor, values: Tensor, blocks: Tensor | None,
) -> None:  # fmt: skip
    """Query blocks from the first up to the second, over K/V blocks ``blocks`` (None for all)."""
    tokens = torch.arange(len(keys), device=keys.device)
    if blocks is not None:
        within = torch.arange(call.block_kv, device=keys.device)
        tokens = (blocks[:, None] * call.block_kv + within).flatten()
        tokens = tokens[tokens < len(keys)]
        keys, values = keys[tokens], values[tokens]
    first, last = (u * call.block_q for u in query_blocks)
    rows = slice(first, min(last, call.q.shape[1]))
    queries = call.q[b, rows, h].to(keys.dtype) / math.sqrt(keys.shape[1])
    scores = queries @ keys.T
    lse = scores.logsumexp(-1)
    # Of a row whose keys all scored -inf there is nothing to share out.
    scores -= torch.where(lse == -math.inf, 0, lse)[:, None]
    weights = scores.exp()
    result.out[b, rows, h] = (weights @ values).to(result.out.dtype)
    result.lse[b, h, rows] = lse.float()

    sums = fold_columns(weights, call.block_kv)
    if call.reference_lse is not None:
        reference = call.reference_lse[b, h, rows].to(lse.dtype)
        sums *= torch.where(reference == -math.inf, 0, (lse - reference).exp())[:, None]
    means = fold_columns(sums.T, call.block_q).T
    means /= fold_columns(torch.ones_like(lse)[None], call.block_q).T
    target = result.weights[b, h, query_blocks[0] : query_blocks[1]]
    if blocks is None:
        target.copy_(means)
    else:
        target[:, blocks] = means.float()

    if result.entropy is None or result.distance is None:
        return
    for part in _diagnosed(call, query_blocks):
        own = slice(part[0] * call.block_q, min(part[1] * call.block_q, rows.stop))
        shares = weights[own.start - first : own.stop - first]
        # -Σ w·log w: the same as LSE - E[z], without the difference of two large numbers.
        result.entropy[b, h, own] = torch.special.entr(shares).sum(-1).float()
        here = torch.arange(own.start, own.stop, device=tokens.device)
        apart = distances(here, tokens, call.positions, keys.dtype)
        result.distance[b, h, own] = torch.linalg.vecdot(shares, apart).float()


def _diagnosed(call: Call, query_blocks: tuple[int, int]) -> list[tuple[int, int]]:
    """Runs of query blocks to diagnose, among those from the first up to the second."""
    first, last, every = *query_blocks, call.diagnose_every
    if every == 1:
        return [query_blocks]
    return [(u, u + 1) for u in range(first + -first % every, min(last, call.M), every)]


def distances(
    rows: Tensor, columns: Tensor, positions: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Of tokens from tokens, ``(rows, columns)``: |i - j|, or Euclidean in positions.

    Args:
        rows, columns: token numbers.
        positions: ``(tokens, axes)``, or None.
        dtype: of the distances.
    """
    if positions is None:
        return (rows[:, None] - columns).abs().to(dtype)
    places = positions.to(dtype)
    return torch.cdist(places[rows], places[columns], compute_mode="donot_use_mm_for_euclid_dist")
