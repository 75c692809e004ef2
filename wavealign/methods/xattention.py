"""XAttention: antidiagonal sums of small cells stand for the mass of a block.

Xu et al., "XAttention: Block Sparse Attention with Antidiagonal Scoring", 2025. A cell is
S x S scores; the sum of its antidiagonal is one product of S concatenated queries, in reverse,
with S concatenated keys. A softmax over a row of cells, summed over the cells of a block,
scores the block; a row keeps blocks until they hold a share τ of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from wavealign.methods.params import XAttention
from wavealign.methods.select import top_p
from wavealign.methods.site import Site

_CHUNK_BYTES = 256 * 2**20
_FORCED = 1e5


def xattention(q: Tensor, k: Tensor, params: XAttention, site: Site) -> Tensor:
    """The block mask of one head, bool ``(M, N)``.

    Args:
        q: queries ``(L, D)``.
        k: keys ``(L, D)``.
        params: see `XAttention`.
        site: not used.
    """
    L = len(q)
    blocks = math.ceil(L / params.block)
    scores = antidiagonal_scores(q, k, params)
    if not params.causal:
        keep = top_p(scores, params.threshold, params.top_p)
        if params.forced_column:
            # Upstream writes every rejected rank to column 0: kept unless nothing is rejected.
            keep[:, 0] |= ~keep.all(dim=-1)
        return keep[:blocks, :blocks]
    first_chunk = _multiple(L, params) // params.block
    return _causal_choice(scores, params, first_chunk)[:blocks, :blocks]


def pad_multiple(tokens: int) -> int:
    """Upstream's chunk for a sequence: what it pads to a multiple of."""
    power: int = 1 << max(0, tokens - 1).bit_length()
    return max(2048, min(power, 128 * 1024 * 2048 // power))


def _multiple(tokens: int, params: XAttention) -> int:
    return params.pad_to or math.lcm(pad_multiple(tokens), params.block)


def antidiagonal_scores(q: Tensor, k: Tensor, params: XAttention) -> Tensor:
    """Share of the antidiagonal softmax in every block, float32 ``(M', N')``, padding included."""
    L, D = q.shape
    S = params.stride
    padding = -L % _multiple(L, params)
    cells = (L + padding) // S
    per_block = params.block // S
    blocks = cells // per_block
    q_cells = pad(q.float(), (0, 0, 0, padding)).view(cells, S, D).flip(1).reshape(cells, S * D)
    k_cells = pad(k.float(), (0, 0, 0, padding)).reshape(cells, S * D)
    scale = 1 / (math.sqrt(D) * S * params.norm)
    true_cells = cells - padding // S
    masked = padding // S if params.causal or not params.padded_keys else 0
    scores = torch.zeros(blocks, blocks, device=q.device)
    rows = max(1, _CHUNK_BYTES // (4 * cells) // per_block) * per_block
    for start in range(0, min(cells, math.ceil(true_cells / per_block) * per_block), rows):
        stop = min(start + rows, cells)
        logits = (q_cells[start:stop] @ k_cells.T).mul_(scale)
        if masked:
            logits[:, cells - masked :] = -math.inf
        if params.causal:
            index = torch.arange(start, stop, device=q.device)
            logits.masked_fill_(torch.arange(cells, device=q.device) > index[:, None], -math.inf)
        logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        mass = logits.view(stop - start, blocks, per_block).sum(-1)
        mass /= mass.sum(-1, keepdim=True)
        mass[max(0, true_cells - start) :] = 0
        scores[start // per_block : stop // per_block] = mass.view(-1, per_block, blocks).sum(1)
    return scores


def _causal_choice(scores: Tensor, params: XAttention, first_chunk: int) -> Tensor:
    """Diagonal and block 0 first, then by score, until the row holds its share."""
    blocks = len(scores)
    diagonal = torch.eye(blocks, dtype=torch.bool, device=scores.device)
    forced = diagonal.clone()
    forced[:, 0] = True
    loose = torch.zeros(blocks, 1, dtype=torch.bool, device=scores.device)
    if params.loose_first_chunk:
        loose[:first_chunk] = True
    first = torch.where(loose, diagonal, forced)
    priority = torch.where(first, scores + _FORCED, scores)
    ranks = priority.sort(dim=-1, descending=True, stable=True).indices
    sums = scores.gather(-1, ranks).double().cumsum(-1)
    before = torch.zeros_like(sums)  # mass in front of each rank, with a loose row one rank less
    before[:, 1:] = sums[:, :-1]
    before[:, 2:] = torch.where(loose, sums[:, :-2], before[:, 2:])
    before[:, 1:2] = torch.where(loose, 0, before[:, 1:2])
    if params.top_p == "exclusive":
        before = sums
    chosen = before < params.threshold * sums[:, -1:]
    return (torch.zeros_like(forced).scatter_(-1, ranks, chosen) | forced).tril_()
