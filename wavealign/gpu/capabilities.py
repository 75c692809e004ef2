"""What a backend can compute, and the refusal of what it would compute wrongly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from wavealign.masks.block_mask import BlockMask

Walk = Literal["forwards", "backwards"]
Rows = Literal["gathered", "table"]


@dataclass(frozen=True)
class Problem:
    """An attention launch, without its data: everything that decides whether a backend fits.

    Attributes:
        mask: the block mask; H is the number of query heads.
        batch: sequences, all under the same mask.
        kv_heads: K/V heads; query heads ``g * H / kv_heads + i`` share K/V head ``g``.
        head_dim: elements per head.
        dtype: ``"bf16"`` or ``"fp16"``.
    """

    mask: BlockMask
    batch: int = 1
    kv_heads: int | None = None
    head_dim: int = 128
    dtype: str = "bf16"

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share a K/V head: 1 without GQA."""
        return self.mask.H // (self.kv_heads or self.mask.H)


@dataclass(frozen=True)
class Capabilities:
    """What a kernel takes, and how it runs what it is given.

    Attributes:
        blocks: (block_q, block_kv) pairs.
        dtypes: of Q, K and V.
        head_dims: elements per head.
        compute_capability: lowest and highest (major, minor) of the GPU.
        walks: the end of a row's list from which the kernel starts.
        rows: ``"gathered"`` where launch order is memory order, so Q has to be moved;
            ``"table"`` where the kernel looks its query block up.
        ragged_kv_first: a K/V block shorter than the others is only masked right where it is
            the first that a row visits.
        ragged_q: the last query block may be shorter than the others.
        batch: more than one sequence.
        gqa: fewer K/V heads than query heads.
        empty_rows: rows without a K/V block give output 0 and LSE -inf.
        ctas_per_sm: rows in flight on one SM.
    """

    blocks: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    compute_capability: tuple[tuple[int, int], tuple[int, int]]
    walks: Walk
    rows: Rows
    ragged_kv_first: bool = False
    ragged_q: bool = True
    batch: bool = True
    gqa: bool = True
    empty_rows: bool = True
    ctas_per_sm: int = 1

    def refusal(self, problem: Problem, compute_capability: tuple[int, int]) -> str | None:
        """Why this problem isn't for this backend, in words; None where it is.

        Args:
            problem: what is to be computed.
            compute_capability: of the GPU, (major, minor).
        """
        mask = problem.mask
        lowest, highest = self.compute_capability
        if not lowest <= compute_capability <= highest:
            return (
                f"runs on compute capability {_dotted(lowest)} to {_dotted(highest)}, this GPU "
                f"has {_dotted(compute_capability)}"
            )
        if (mask.block_q, mask.block_kv) not in self.blocks:
            valid = ", ".join(f"{q}x{kv}" for q, kv in self.blocks)
            return f"takes blocks of {valid} tokens, the mask has {mask.block_q}x{mask.block_kv}"
        if problem.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {problem.dtype}"
        if problem.head_dim not in self.head_dims:
            valid = ", ".join(map(str, self.head_dims))
            return f"takes head dimensions {valid}, not {problem.head_dim}"
        return self._structural_refusal(problem)

    def _structural_refusal(self, problem: Problem) -> str | None:
        mask = problem.mask
        if problem.kv_heads is not None and mask.H % problem.kv_heads:
            return f"{mask.H} query heads don't divide among {problem.kv_heads} K/V heads"
        if not self.batch and problem.batch > 1:
            return f"takes one sequence at a time, not {problem.batch}"
        if not self.gqa and problem.heads_per_kv_head > 1:
            return "takes as many K/V heads as query heads"
        if not self.ragged_q and mask.tokens_q % mask.block_q:
            return (
                f"needs a number of query tokens that is a multiple of {mask.block_q}, not "
                f"{mask.tokens_q}"
            )
        if not self.empty_rows and not np.diff(mask.indptr).all():
            return "leaves rows without a K/V block unwritten, and this mask has such rows"
        return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
