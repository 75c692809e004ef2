"""What the sections of benchmarks/production.py share: where they run, and how things are timed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from common import median_ms

import wavealign
from wavealign.attention.inputs import check_mask
from wavealign.masks import BlockMask


class Bench:
    """Where it runs, and how things are timed there."""

    def __init__(self, small: bool, repeats: int) -> None:
        self.cuda = torch.cuda.is_available()
        self.small, self.repeats = small or not self.cuda, repeats
        self.device = "cuda" if self.cuda else "cpu"
        self.backend = "auto" if self.cuda else "reference"
        self.profile = None if self.cuda else "h200"
        self.block_limit = 24 if self.small else None

    def ms(self, run: Callable[[], object], repeats: int | None = None) -> float:
        """Median time of a call on the device, after one to warm up."""
        return median_ms(run, repeats or self.repeats, self.cuda)

    def dense(self, mask: BlockMask) -> torch.Tensor:
        """Bool ``[H, M, N]`` on the device."""
        return check_mask(mask, None, None, torch.device(self.device))[0]

    def cut(self, mask: BlockMask) -> BlockMask:
        """The mask, or its first blocks where everything is small."""
        if self.block_limit is None:
            return mask
        n = self.block_limit
        kept = np.stack([h.to_dense()[:n, :n] for h in mask.select_heads([0]).heads()])
        return BlockMask.from_dense(kept, (mask.block_q, mask.block_kv))

    def sequences(self, mask: BlockMask, batch: int = 1) -> tuple[torch.Tensor, ...]:
        """Random Q, K and V ``[B, tokens, H, 128]``."""
        dtype = torch.bfloat16 if self.cuda else torch.float32
        generator = torch.Generator(self.device).manual_seed(0)
        return tuple(
            torch.randn(batch, n, mask.H, 128, generator=generator, device=self.device, dtype=dtype)
            for n in (mask.tokens_q, mask.tokens_kv, mask.tokens_kv)
        )

    def attend(self, qkv: tuple[torch.Tensor, ...], plan: wavealign.Plan) -> torch.Tensor:
        """Attention under a plan."""
        return wavealign.attend(*qkv, plan=plan, layout="bshd")

    def plan(self, heads: torch.Tensor, mask: BlockMask, policy: str) -> wavealign.Plan:
        """Plan `heads`, which has the sizes of `mask`."""
        return wavealign.plan(
            heads, policy, self.profile, block=(mask.block_q, mask.block_kv),
            tokens=(mask.tokens_q, mask.tokens_kv), backend=self.backend,
        )  # fmt: skip
