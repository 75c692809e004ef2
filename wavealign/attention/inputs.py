"""Q, K, V and a mask from a caller: checked, and in the one layout that everything below takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wavealign._devices import need_elements
from wavealign.errors import InputError, unknown_name
from wavealign.gpu.inputs import DTYPES, Inputs, refuse_derivatives
from wavealign.gpu.sizes import Sizes
from wavealign.masks.block_mask import BlockMask
from wavealign.numbers import block_size
from wavealign.planning.masks import dense_mask

LAYOUTS = ("bhsd", "bshd")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float32: "fp32"}


@dataclass(frozen=True, eq=False)
class Sequences(Inputs):
    """Q, K and V of a call.

    Attributes:
        layout: as the caller gave them, and wants the output.
    """

    layout: str

    @property
    def tokens(self) -> tuple[int, int]:
        """Query and key/value tokens."""
        return self.q.shape[1], self.k.shape[1]

    def output(self, out: Tensor) -> Tensor:
        """``[B, tokens_q, H, D]`` in the caller's layout."""
        return out.transpose(1, 2) if self.layout == "bhsd" else out

    def fitted(self, sizes: Sizes) -> Sizes:
        """The sizes of these sequences under masks of such sizes.

        Raises:
            InputError: another number of heads, sequences or tokens.
        """
        B, _, H, D = self.q.shape
        if sizes.H != H:
            other = LAYOUTS[1 - LAYOUTS.index(self.layout)]
            hint = f" Are q, k and v {other}? Then say layout='{other}'."
            hint *= self.q.shape[1] == sizes.H
            raise InputError(f"the mask has {sizes.H} heads, q has {H}.{hint}")
        if sizes.masks not in (1, B):
            raise InputError(f"the mask has {sizes.masks} sequences, q has {B}.")
        if (sizes.tokens_q, sizes.tokens_kv) != self.tokens:
            raise InputError(
                f"planned for {sizes.tokens_q} query and {sizes.tokens_kv} key/value tokens; q has "
                f"{self.tokens[0]}, k has {self.tokens[1]}."
            )
        dtype, kv_heads = DTYPE_NAMES[self.q.dtype], self.k.shape[2]
        return dataclasses.replace(sizes, batch=B, kv_heads=kv_heads, head_dim=D, dtype=dtype)

    @classmethod
    def check(cls, q: Tensor, k: Tensor, v: Tensor, layout: str) -> Sequences:
        """From what a caller gave.

        Args:
            q, k, v, layout: see `attend`.

        Raises:
            InputError: what is wrong with it, and what was expected.
        """
        if layout not in LAYOUTS:
            raise unknown_name("layout", layout, LAYOUTS)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if isinstance(tensor, Tensor):
                refuse_derivatives(name, tensor)
                need_elements(name, tensor)
            if not isinstance(tensor, Tensor) or tensor.ndim != 4 or 0 in tensor.shape:
                shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor)
                raise InputError(
                    f"{name} is {shape}; expected a tensor [{', '.join(layout.upper())}]."
                )
            if tensor.dtype not in DTYPE_NAMES:
                raise InputError(f"{name} is {tensor.dtype}; expected bfloat16 or float16.")
            if tensor.device != q.device or tensor.dtype != q.dtype:
                raise InputError(
                    f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}; "
                    "expected the same."
                )
        q, k, v = (t.transpose(1, 2) if layout == "bhsd" else t for t in (q, k, v))
        B, _, H, D = q.shape
        if k.shape != v.shape:
            raise InputError(f"k and v differ in shape ({_told(k)} and {_told(v)}).")
        if k.shape[0] != B or k.shape[3] != D or H % k.shape[2]:
            raise InputError(
                f"q is {_told(q)}, k and v are {_told(k)}; expected as many sequences, the same "
                "head dimension, and a number of query heads that K/V heads divide. "
                f"(layout='{layout}')"
            )
        return cls(q, k, v, layout)


def check_mask(
    mask: Tensor | BlockMask,
    block: tuple[int, int] | None,
    tokens: tuple[int, int] | None,
    device: torch.device | None,
) -> tuple[Tensor, Sizes]:
    """A mask as bool ``[masks * H, M, N]``, and the sizes of launches under it.

    Args:
        mask: bool ``[H, M, N]`` or ``[B, H, M, N]``, or a `BlockMask`, which is copied to `device`.
        block: tokens of a query and of a K/V block; by default 128x128, or the mask's own.
        tokens: query and key/value tokens; by default the mask's own, or every block is full.
        device: of q, which a tensor must be on, too; None where there is none.

    Raises:
        InputError: another device, dtype, rank, block size or number of blocks.
    """
    block = block_size(block) if block is not None else None
    tokens = block_size(tokens, "tokens") if tokens is not None else None
    if isinstance(mask, BlockMask):
        own = (mask.block_q, mask.block_kv)
        if block not in (None, own):
            raise InputError(f"block={block}, the mask has blocks of {own[0]}x{own[1]} tokens.")
        heads = torch.empty(mask.shape, dtype=torch.bool, device=device or "cpu")
        for h, head in enumerate(mask.heads()):
            heads[h].copy_(torch.from_numpy(head.to_dense()))
        tokens = tokens or (mask.tokens_q, mask.tokens_kv)
        return heads, mask_sizes(mask.shape, 1, own, tokens)
    need_mask(mask)
    if mask.ndim not in (3, 4):
        raise InputError(f"a mask {list(mask.shape)}; expected [H, M, N] or [B, H, M, N].")
    if device is not None and mask.device != device:
        raise InputError(f"the mask is on {mask.device}, q on {device}; expected the same device.")
    heads, masks = dense_mask(mask), mask.shape[0] if mask.ndim == 4 else 1
    return heads, mask_sizes(heads.shape, masks, block or (128, 128), tokens)


def need_mask(mask: object) -> None:
    """Check that a mask is of a type that is taken.

    Raises:
        InputError: it is FlexAttention's BlockMask, an array, or something else; see
            `need_elements`.
    """
    if isinstance(mask, Tensor):
        need_elements("the mask", mask)
    if isinstance(mask, Tensor | BlockMask):
        return
    kind = type(mask)
    how = ""
    if kind.__module__ == "torch.nn.attention.flex_attention":
        how = " mask.to_dense().bool() is one, in which every partial block counts as a full one."
    elif isinstance(mask, np.ndarray):
        how = " torch.from_numpy(mask) is one."
    raise InputError(
        f"a mask of type {kind.__module__}.{kind.__name__}; expected a torch.Tensor or a "
        f"wavealign.BlockMask.{how}"
    )


def mask_sizes(
    shape: tuple[int, ...], masks: int, block: tuple[int, int], tokens: tuple[int, int] | None
) -> Sizes:
    """The sizes of masks, checked against the sequence lengths; of bf16 heads of 128 by itself.

    Args:
        shape: ``[masks * H, M, N]``.
        masks: beside each other, see `Sizes`.
        block: tokens of a query and of a K/V block.
        tokens: query and key/value tokens; by default every block is full.

    Raises:
        InputError: lengths that make another number of blocks.
    """
    folded, M, N = shape
    tokens_q, tokens_kv = tokens or (M * block[0], N * block[1])
    for name, length, size, blocks in (
        ("query", tokens_q, block[0], M),
        ("key/value", tokens_kv, block[1], N),
    ):
        if -(-length // size) != blocks:
            raise InputError(
                f"{length} {name} tokens in blocks of {size} make {-(-length // size)} blocks, "
                f"the mask has {blocks}; is block={block} right?"
            )
    return Sizes(folded // masks, M, N, *block, tokens_q, tokens_kv, masks, batch=masks)


def _told(tensor: Tensor) -> str:
    B, S, H, D = tensor.shape
    return f"B={B}, S={S}, H={H}, D={D}"
