"""Q, K and V of a launch: random normal tensors, or the caller's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wavealign.errors import InputError
from wavealign.gpu.sizes import Sizes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Inputs:
    """Q, K and V.

    Attributes:
        q: ``[B, tokens_q, H, D]``.
        k, v: ``[B, tokens_kv, H_kv, D]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, sizes: Sizes, device: str | torch.device, seed: int = 0) -> Inputs:
        """Standard normal elements, the same for the same seed and device kind.

        Args:
            sizes: of the launch, its dtype one of `DTYPES`.
            device: where they are drawn.
            seed: of the generator.

        Raises:
            InputError: another dtype.
        """
        if sizes.dtype not in DTYPES:
            raise InputError(f"dtype '{sizes.dtype}'; expected {' or '.join(DTYPES)}.")
        generator = torch.Generator(device).manual_seed(seed)

        def draw(tokens: int, heads: int) -> Tensor:
            shape = (sizes.batch, tokens, heads, sizes.head_dim)
            dtype = DTYPES[sizes.dtype]
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        kv_heads = sizes.kv_heads or sizes.H
        return cls(
            draw(sizes.tokens_q, sizes.H),
            draw(sizes.tokens_kv, kv_heads),
            draw(sizes.tokens_kv, kv_heads),
        )

    def sequence(self, b: int) -> Inputs:
        """One sequence, as a view."""
        return Inputs(*(t[b : b + 1] for t in (self.q, self.k, self.v)))

    def arranged(self, strided: bool) -> Inputs:
        """Contiguous, or with D contiguous where other strides are welcome; copies if it must."""
        tensors = (self.q, self.k, self.v)
        return Inputs(*(t if strided and t.stride(-1) == 1 else t.contiguous() for t in tensors))
