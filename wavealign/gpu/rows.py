"""Our own block-sparse kernels, which take the row order as a table: nothing is moved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from wavealign.gpu.backend import Backend, BoundKernel, distribution_version, lacks
from wavealign.gpu.capabilities import Capabilities, Problem
from wavealign.gpu.inputs import Inputs, on_device
from wavealign.gpu.lists import KernelLists


@dataclass(frozen=True)
class Tuning:
    """How the kernel is compiled.

    Attributes:
        tile: K/V tokens per step; divides block_kv.
        warps: per CTA.
        stages: of the software pipeline.
        descriptors: load K and V by TMA (Hopper).
    """

    tile: int
    warps: int
    stages: int
    descriptors: bool


class TritonRows(Backend):
    """A CTA looks its query block up in a table, and can say when and where it ran."""

    name: ClassVar[str] = "triton"
    title: ClassVar[str] = "WaveAlign's Triton kernel, row order as a table"
    capabilities: ClassVar[Capabilities] = Capabilities(
        blocks=((128, 128), (64, 128), (128, 64), (64, 64)),
        dtypes=("bf16", "fp16"),
        head_dims=(64, 128),
        compute_capability=((8, 0), (9, 0)),
        walks="forwards",
        rows="table",
        ctas_per_sm=1,
    )

    def __init__(self, tuning: Tuning | None = None) -> None:
        self._tuning = tuning

    def missing(self) -> str | None:
        """See `Backend.missing`."""
        return lacks("triton", "gpu")

    def version(self) -> str:
        """See `Backend.version`."""
        return distribution_version("triton")

    def bind(
        self,
        problem: Problem,
        lists: KernelLists,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> BoundKernel:
        """See `Backend.bind`."""
        assert lists.table is not None
        arrays = (lists.table, lists.indptr, lists.indices)
        return self._bound(problem, q, k, v, *(on_device(a, q.device) for a in arrays))

    def bind_dense(self, problem: Problem, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind_dense`."""
        mask = problem.mask
        device = inputs.q.device
        table = torch.arange(mask.M, dtype=torch.int32, device=device).expand(mask.H, mask.M)
        indptr = torch.arange(mask.H * mask.M + 1, device=device) * mask.N
        every = torch.arange(mask.N, dtype=torch.int32, device=device).repeat(mask.H * mask.M)
        return self._bound(problem, inputs.q, inputs.k, inputs.v, table.contiguous(), indptr, every)

    def trace(
        self,
        problem: Problem,
        lists: KernelLists,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Run once and say when and where each CTA ran.

        Returns:
            int64 ``[B * H * M, 3]`` in launch order: start and end in ns of the GPU's timer, and
            the SM's number. Tracing slows the kernel.
        """
        assert lists.table is not None
        mask = problem.mask
        record = torch.zeros(problem.batch * mask.H * mask.M, 3, dtype=torch.int64, device=q.device)
        table, indptr, indices = (
            on_device(a, q.device) for a in (lists.table, lists.indptr, lists.indices)
        )
        self._bound(problem, q, k, v, table, indptr, indices, record).launch()
        return record

    def _bound(
        self,
        problem: Problem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        record: torch.Tensor | None = None,
    ) -> BoundKernel:
        from wavealign.gpu._triton_kernels import attend_rows

        mask = problem.mask
        B, tokens, H, D = q.shape
        H_kv = k.shape[2]
        out = torch.empty_like(q)
        lse = torch.empty(B, H, tokens, dtype=torch.float32, device=q.device)
        tuning = self._tuning or default_tuning(problem, torch.cuda.get_device_capability(q.device))
        tile = min(tuning.tile, mask.block_kv)
        keys, values = k, v
        if tuning.descriptors:
            from triton.tools.tensor_descriptor import TensorDescriptor

            flat = (t.view(B, mask.tokens_kv, H_kv * D) for t in (k, v))
            keys, values = (
                TensorDescriptor(t, list(t.shape), list(t.stride()), [1, tile, D]) for t in flat
            )

        def launch() -> tuple[torch.Tensor, torch.Tensor]:
            attend_rows[(mask.M, H, B)](
                q, keys, values, out, lse, table, indptr, indices,
                record if record is not None else indptr,
                math.log2(math.e) / math.sqrt(D), tokens, mask.tokens_kv, H, H_kv,
                D=D, BLOCK_Q=mask.block_q, BLOCK_KV=mask.block_kv, TILE=tile,
                RAGGED=mask.tokens_kv % mask.block_kv != 0, DESCRIPTORS=tuning.descriptors,
                TRACE=record is not None, STAGES=tuning.stages, num_warps=tuning.warps,
            )  # fmt: skip
            return out, lse

        return BoundKernel(launch, (out, lse))


def default_tuning(problem: Problem, compute_capability: tuple[int, int]) -> Tuning:
    """What was fastest on an H200 (docs/results-h200.md); elsewhere what shared memory allows."""
    if compute_capability >= (9, 0):
        return Tuning(
            tile=128, warps=8 if problem.mask.block_q == 128 else 4, stages=2, descriptors=True
        )
    return Tuning(
        tile=64 if compute_capability == (8, 0) else 32,
        warps=8 if problem.mask.block_q == 128 else 4,
        stages=2,
        descriptors=False,
    )
