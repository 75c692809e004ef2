"""FlashInfer: refused, with the reason."""

from __future__ import annotations

from typing import ClassVar

from wavealign.errors import MissingCapabilityError
from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities, Problem
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.lists import KernelLists

_REASON = (
    "its plan sorts rows by K/V length and deals them to a fixed grid, so the order of the rows "
    "in Q and in the mask decides nothing, and its public interface takes no order "
    "(flashinfer 0.7, PrefillSM90Plan)"
)


class FlashInfer(Backend):
    """``flashinfer.BlockSparseAttentionWrapper``: known, and never launched."""

    name: ClassVar[str] = "flashinfer"
    title: ClassVar[str] = "FlashInfer block-sparse attention"
    needs: ClassVar[tuple[tuple[str, str], ...]] = ()
    distribution: ClassVar[str] = "flashinfer-python"
    capabilities: ClassVar[Capabilities] = Capabilities(
        blocks=(),
        dtypes=(),
        head_dims=(),
        compute_capability=((8, 0), (12, 0)),
        walks="backwards",
        rows="gathered",
    )

    def missing(self) -> str | None:
        """See `Backend.missing`."""
        return f"refused: {_REASON}"

    def bind(self, problem: Problem, lists: KernelLists, inputs: Inputs) -> BoundKernel:
        """Always raises."""
        raise MissingCapabilityError(f"backend 'flashinfer' can't run a schedule: {_REASON}.")

    def bind_dense(self, problem: Problem, inputs: Inputs) -> BoundKernel:
        """Always raises."""
        raise MissingCapabilityError(f"backend 'flashinfer' can't run a schedule: {_REASON}.")
