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
    padded = torch.zeros_like(out)
    padded[:, : source.shape[1]] = source
    _blocks(out, block).copy_(_blocks(padded, block)[_heads(row_order), row_order.long()])


def scatter_blocks(source: Tensor, row_order: Tensor, block: int, out: Tensor) -> None:
    """The inverse of `gather_blocks`.

    Args:
        source: ``[B, M * block, H, D]`` in launch order.
        row_order: slot → query block ``[H, M]``.
        block: tokens.
        out: ``[B, tokens, H, D]``.
    """
    if source.is_cuda:
        from wavealign.gpu._triton_kernels import move_blocks

        move_blocks(source, row_order, block, out, gather=False)
        return
    moved = torch.empty_like(source)
    _blocks(moved, block)[_heads(row_order), row_order.long()] = _blocks(source, block)
    out.copy_(moved[:, : out.shape[1]])


def scatter_lse(source: Tensor, row_order: Tensor, block: int, out: Tensor) -> None:
    """Bring log-sum-exps back.

    Args:
        source: ``[B, H, M * block]`` in launch order.
        row_order, block: see `scatter_blocks`.
        out: ``[B, H, tokens]``.
    """
    blocks = source.unflatten(2, (-1, block))
    moved = torch.empty_like(blocks)
    moved[:, _heads(row_order), row_order.long()] = blocks
    out.copy_(moved.flatten(2)[..., : out.shape[2]])


def _blocks(tensor: Tensor, block: int) -> Tensor:
    """``[B, M * block, H, D]`` as ``[H, M, B, block, D]``, a view."""
    return tensor.unflatten(1, (-1, block)).permute(3, 1, 0, 2, 4)


def _heads(row_order: Tensor) -> Tensor:
    return torch.arange(row_order.shape[0], device=row_order.device)[:, None]
