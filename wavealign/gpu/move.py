"""Query blocks into launch order and back, for kernels whose launch order is memory order.

On a GPU one Triton kernel copies each block once; elsewhere plain indexing does, which is also
what tests hold the kernel against.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_blocks(source: Tensor, row_order: Tensor, block: int, out: Tensor) -> None:
    """Copy query blocks into launch order.

    Args:
        source: ``[B, tokens, H, D]``.
        row_order: int32 ``[H, M]``, slot → query block.
        block: tokens per query block, the last may be ragged.
        out: ``[B, M * block, H, D]``; slot s gets block ``row_order[h, s]``, zeros behind a
            ragged block's tokens.
    """
    if source.is_cuda:
        from wavealign.gpu._triton_kernels import move_blocks

        move_blocks(source, row_order, block, out, gather=True)
        return
    B, tokens, H, D = source.shape
    M = row_order.shape[1]
    padded = source.new_zeros(B, M * block, H, D)
    padded[:, :tokens] = source
    blocks = padded.view(B, M, block, H, D).permute(3, 1, 0, 2, 4)  # [H, M, B, block, D]
    moved = blocks[_heads(row_order), row_order.long()]
    out.copy_(moved.permute(2, 1, 3, 0, 4).reshape(B, M * block, H, D))


def scatter_blocks(source: Tensor, row_order: Tensor, block: int, out: Tensor) -> None:
    """The inverse of `gather_blocks`: ``[B, M * block, H, D]`` to ``[B, tokens, H, D]``."""
    if source.is_cuda:
        from wavealign.gpu._triton_kernels import move_blocks

        move_blocks(source, row_order, block, out, gather=False)
        return
    B, _, H, D = source.shape
    M = row_order.shape[1]
    blocks = source.view(B, M, block, H, D).permute(3, 1, 0, 2, 4)
    moved = torch.empty_like(blocks)
    moved[_heads(row_order), row_order.long()] = blocks
    out.copy_(moved.permute(2, 1, 3, 0, 4).reshape(B, M * block, H, D)[:, : out.shape[1]])


def scatter_lse(source: Tensor, row_order: Tensor, block: int, out: Tensor) -> None:
    """Bring log-sum-exps back: ``[B, H, M * block]`` in launch order to ``[B, H, tokens]``."""
    B, H, _ = source.shape
    M = row_order.shape[1]
    blocks = source.view(B, H, M, block)
    moved = torch.empty_like(blocks)
    moved[:, _heads(row_order), row_order.long()] = blocks
    out.copy_(moved.view(B, H, M * block)[:, :, : out.shape[2]])


def _heads(row_order: Tensor) -> Tensor:
    return torch.arange(row_order.shape[0], device=row_order.device)[:, None]
