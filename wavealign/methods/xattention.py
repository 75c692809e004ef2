"""XAttention: antidiagonal sums of small cells stand for the mass of a block.

Xu et al., "XAttention: Block Sparse Attention with Antidiagonal Scoring", 2025. A cell is
S x S scores; the sum of its antidiagonal is one product of S concatenated queries, in reverse,
with S concatenated keys. A softmax over a row of cells, summed over the cells of a block,
scores the block; a row keeps blocks until they hold a share τ of it.

On a GPU, bf16 and fp16 go through Triton kernels for all heads at once; everything else through
torch in float32, head by head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from wavealign._extras import installed
from wavealign.methods.context import HeadContext
from wavealign.methods.params import XAttention
from wavealign.methods.select import mask_future, top_p

if TYPE_CHECKING:
    from wavealign.methods._xattention_kernels import Launch, Shape

_CHUNK_BYTES = 256 * 2**20
_FORCED = 1e5


def xattention(q: Tensor, k: Tensor, params: XAttention, context: HeadContext) -> Tensor:
    """The block mask of one head, bool ``(M, N)``.

    Args:
        q, k: ``(L, D)``.
        params: see `XAttention`.
        context: not used.
    """
    if fused(q, k, params):
        return _fused_heads(q[None, None], k[None, None], params)[0, 0]
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


def xattention_heads(q: Tensor, k: Tensor, params: XAttention) -> Tensor | None:
    """The block masks of all heads of a batch, bool ``(B, H, M, N)``; None where not `fused`.

    All heads at once and without waiting for the GPU. Memory beside the masks is `SCRATCH_BYTES` of
    `_xattention_kernels`, whatever the length and the heads: row tiles are worked through in
    chunks, and one of 128 cell rows takes about 576·N bytes.

    Args:
        q: queries ``(B, H, L, D)``, any strides.
        k: keys ``(B, H', L, D)``, H' a divisor of H.
        params: see `XAttention`.
    """
    return _fused_heads(q, k, params) if fused(q, k, params) else None


def _fused_heads(q: Tensor, k: Tensor, params: XAttention) -> Tensor:
    from wavealign.methods._select_kernels import launch_top_p

    launch = _launch(q, k, params)
    shape, (B, H) = launch.shape, q.shape[:2]
    keep = torch.empty(B * H, shape.blocks, shape.blocks, dtype=torch.bool, device=q.device)
    rows = launch.blocks_per_tile
    buffer = torch.empty(launch.chunk * rows, shape.columns, dtype=torch.float32, device=q.device)
    for first in launch.chunks():
        scores = buffer[: min(launch.chunk, launch.tiles - first) * rows]
        launch.scores(first, scores)
        launch_top_p(
            scores, keep, params.threshold, params.top_p, forced_column=params.forced_column,
            first_tile=first, row_tiles=launch.row_tiles, per_tile=rows,
        )  # fmt: skip
    return keep.view(B, H, shape.blocks, shape.blocks)


def fused(q: Tensor, k: Tensor, params: XAttention) -> bool:
    """Whether the Triton kernels can take it: else torch does, in float32, head by head.

    They take bf16 and fp16 on a GPU with contiguous elements, without causality, where a block is
    1 to 128 cells, a power of two.

    Args:
        q, k: ``[..., tokens, D]``, on any device.
        params: of the method.
    """
    if not (q.is_cuda and k.is_cuda and q.dtype == k.dtype and not params.causal):
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or q.stride(-1) != 1 or k.stride(-1) != 1:
        return False
    if not installed("triton"):
        return False
    from wavealign.methods._select_kernels import MOST_COLUMNS
    from wavealign.methods._xattention_kernels import default_tile

    shape = _shape(q.shape[-2], q.shape[-1], params)
    return shape.fits(default_tile(q.device)) and shape.columns <= MOST_COLUMNS


def _launch(q: Tensor, k: Tensor, params: XAttention) -> Launch:
    from wavealign.methods import _xattention_kernels as kernels

    shape, tile = _shape(q.shape[2], q.shape[3], params), kernels.default_tile(q.device)
    return kernels.Launch(q, k, shape, tile, kernels.SCRATCH_BYTES)


def _shape(tokens: int, head_dim: int, params: XAttention) -> Shape:
    from wavealign.methods._xattention_kernels import Shape

    S = params.stride
    padding = -tokens % _multiple(tokens, params)
    return Shape(
        stride=S, per_block=params.block // S, cells=math.ceil(tokens / S),
        blocks=math.ceil(tokens / params.block), columns=(tokens + padding) // params.block,
        padded_keys=params.padded_keys, scale=_scale(head_dim, params),
    )  # fmt: skip


def _scale(head_dim: int, params: XAttention) -> float:
    return 1 / (math.sqrt(head_dim) * params.stride * params.norm)


def pad_multiple(tokens: int) -> int:
    """Upstream's chunk for a sequence: what it pads to a multiple of."""
    power: int = 1 << max(0, tokens - 1).bit_length()
    return max(2048, min(power, 128 * 1024 * 2048 // power))


def _multiple(tokens: int, params: XAttention) -> int:
    return params.pad_to or math.lcm(pad_multiple(tokens), params.block)


def antidiagonal_scores(q: Tensor, k: Tensor, params: XAttention) -> Tensor:
    """Share of the antidiagonal softmax in every block, float32 ``(M', N')``, padding included.

    Args:
        q, k: ``(tokens, D)`` of one head.
        params: of the method.
    """
    L, D = q.shape
    S = params.stride
    padding = -L % _multiple(L, params)
    cells = (L + padding) // S
    per_block = params.block // S
    blocks = cells // per_block
    q_cells = pad(q.float(), (0, 0, 0, padding)).view(cells, S, D).flip(1).reshape(cells, S * D)
    k_cells = pad(k.float(), (0, 0, 0, padding)).reshape(cells, S * D)
    scale = _scale(D, params)
    true_cells = cells - padding // S
    masked = padding // S if params.causal or not params.padded_keys else 0
    scores = torch.zeros(blocks, blocks, dtype=torch.float32, device=q.device)
    rows = max(1, _CHUNK_BYTES // (4 * cells) // per_block) * per_block
    for start in range(0, min(cells, math.ceil(true_cells / per_block) * per_block), rows):
        stop = min(start + rows, cells)
        logits = (q_cells[start:stop] @ k_cells.T).mul_(scale)
        if masked:
            logits[:, cells - masked :] = -math.inf
        if params.causal:
            mask_future(logits, first_query=start)
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
