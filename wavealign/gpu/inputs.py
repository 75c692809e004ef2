"""Q, K and V of a launch: random normal tensors, or the caller's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from wavealign.errors import InputError
from wavealign.gpu.capabilities import Problem


def on_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of a numpy array on the device; a mask's arrays are read-only, a tensor isn't."""
    return torch.tensor(array, device=device)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Inputs:
    """Q, K and V, contiguous.

    Attributes:
        q: ``[B, tokens_q, H, D]``.
        k, v: ``[B, tokens_kv, H_kv, D]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, problem: Problem, device: str | torch.device, seed: int = 0) -> Inputs:
        """Standard normal elements, the same for the same seed and device kind."""
        if problem.dtype not in DTYPES:
            raise InputError(f"dtype '{problem.dtype}'; expected {' or '.join(DTYPES)}.")
        mask = problem.mask
        generator = torch.Generator(device).manual_seed(seed)

        def draw(tokens: int, heads: int) -> torch.Tensor:
            shape = (problem.batch, tokens, heads, problem.head_dim)
            dtype = DTYPES[problem.dtype]
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        kv_heads = problem.kv_heads or mask.H
        return cls(
            draw(mask.tokens_q, mask.H),
            draw(mask.tokens_kv, kv_heads),
            draw(mask.tokens_kv, kv_heads),
        )
