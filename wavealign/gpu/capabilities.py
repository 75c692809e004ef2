"""What a backend can compute, and the refusal of what it would compute wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from wavealign.gpu.sizes import Sizes
from wavealign.planning.layout import ListLayout


@dataclass(frozen=True)
class Capabilities:
    """What a kernel takes, and how it runs what it is given.

    Attributes:
        blocks: (block_q, block_kv) pairs; None for any.
        dtypes: of Q, K and V; None for any.
        head_dims: elements per head; None for any.
        compute_capability: lowest and highest (major, minor) of the GPU; None for a backend that
            runs on every device, GPU or not.
        layout: how it reads lists. That it wants a ragged K/V block first matters only where there
            is one, see `layout_for`.
        ragged_q: the last query block may be shorter than the others.
        batch: more than one sequence.
        gqa: fewer K/V heads than query heads.
        ctas_per_sm: rows in flight on one SM.
    """

    blocks: tuple[tuple[int, int], ...] | None
    dtypes: tuple[str, ...] | None
    head_dims: tuple[int, ...] | None
    compute_capability: tuple[tuple[int, int], tuple[int, int]] | None
    layout: ListLayout = dataclasses.field(default_factory=ListLayout)
    ragged_q: bool = True
    batch: bool = True
    gqa: bool = True
    ctas_per_sm: int = 1

    @property
    def anywhere(self) -> bool:
        """Whether it runs without an NVIDIA GPU, too."""
        return self.compute_capability is None

    def layout_for(self, sizes: Sizes) -> ListLayout:
        """How the lists of a launch of these sizes lie."""
        first = self.layout.ragged_kv_first and sizes.ragged_kv
        return dataclasses.replace(self.layout, ragged_kv_first=first)

    def refusal(self, sizes: Sizes, compute_capability: tuple[int, int] | None) -> str | None:
        """Why a launch isn't for this backend, in words; None where it is.

        Args:
            sizes: of what is to be computed.
            compute_capability: of the GPU, (major, minor); None where there is none.
        """
        return next(self._reasons(sizes, compute_capability), None)

    def _reasons(self, sizes: Sizes, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        if self.compute_capability is not None:
            lowest, highest = self.compute_capability
            runs = f"runs on compute capability {_dotted(lowest)} to {_dotted(highest)}"
            if compute_capability is None:
                yield f"{runs}, there is no GPU here"
            elif not lowest <= compute_capability <= highest:
                yield f"{runs}, this GPU has {_dotted(compute_capability)}"
        if self.blocks is not None and (sizes.block_q, sizes.block_kv) not in self.blocks:
            valid = ", ".join(f"{q}x{kv}" for q, kv in self.blocks)
            yield f"takes blocks of {valid} tokens, the mask has {sizes.block_q}x{sizes.block_kv}"
        if self.dtypes is not None and sizes.dtype not in self.dtypes:
            yield f"takes {', '.join(self.dtypes)}, not {sizes.dtype}"
        if self.head_dims is not None and sizes.head_dim not in self.head_dims:
            valid = ", ".join(map(str, self.head_dims))
            yield f"takes head dimensions {valid}, not {sizes.head_dim}"
        if sizes.kv_heads is not None and sizes.H % sizes.kv_heads:
            yield f"{sizes.H} query heads don't divide among {sizes.kv_heads} K/V heads"
        if not self.batch and sizes.batch > 1 and sizes.masks == 1:
            yield f"takes one sequence at a time, not {sizes.batch}"
        if not self.gqa and sizes.heads_per_kv_head > 1:
            yield "takes as many K/V heads as query heads"
        if not self.ragged_q and sizes.tokens_q % sizes.block_q:
            several = f"needs a number of query tokens that is a multiple of {sizes.block_q}"
            yield f"{several}, not {sizes.tokens_q}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
