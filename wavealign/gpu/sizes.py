"""The sizes of an attention launch: all that a backend may ask."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from wavealign.masks.block_mask import BlockMask


@dataclass(frozen=True)
class Sizes:
    """A launch without its mask and its data.

    Attributes:
        H, M, N: query heads, query blocks, K/V blocks.
        block_q, block_kv: tokens of a block.
        tokens_q, tokens_kv: the last blocks may be ragged.
        masks: beside each other: 1 where all sequences share one, else one a sequence.
        batch: sequences.
        kv_heads: query heads ``g * H / kv_heads + i`` share K/V head ``g``; None for H.
        head_dim: elements per head.
        dtype: of Q, K and V: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
    """

    H: int
    M: int
    N: int
    block_q: int
    block_kv: int
    tokens_q: int
    tokens_kv: int
    masks: int = 1
    batch: int = 1
    kv_heads: int | None = None
    head_dim: int = 128
    dtype: str = "bf16"

    @classmethod
    def of(
        cls, mask: BlockMask, batch: int = 1, kv_heads: int | None = None, head_dim: int = 128,
        dtype: str = "bf16",
    ) -> Sizes:  # fmt: skip
        """Of a launch of all heads of a mask, the same mask for every sequence.

        Args:
            mask: of the heads.
            batch, kv_heads, head_dim, dtype: see `Sizes`.
        """
        return cls(
            mask.H, mask.M, mask.N, mask.block_q, mask.block_kv, mask.tokens_q, mask.tokens_kv,
            batch=batch, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int, int]:
        """``[H, M, N]`` of the masks; those of all sequences count as heads in turn."""
        return self.masks * self.H, self.M, self.N

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share a K/V head: 1 without GQA."""
        return self.H // (self.kv_heads or self.H)

    @property
    def ragged_kv(self) -> bool:
        """Whether the last K/V block is shorter than the others."""
        return self.tokens_kv % self.block_kv != 0

    def one_sequence(self) -> Sizes:
        """Of each sequence alone, with its own mask."""
        return dataclasses.replace(self, masks=1, batch=1)
