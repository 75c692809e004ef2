"""Our own block-sparse kernels, which take the row order as a table: nothing is moved.

On Hopper a Gluon kernel runs (TMA, warp specialisation), elsewhere a plain Triton one.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities, Problem
from wavealign.gpu.inputs import Inputs, on_device
from wavealign.gpu.lists import KernelLists


class TritonRows(Backend):
    """A CTA looks its query block up in a table, and can say when and where it ran."""

    name: ClassVar[str] = "triton"
    title: ClassVar[str] = "WaveAlign's Triton kernels, row order as a table"
    needs: ClassVar[tuple[tuple[str, str], ...]] = (("triton", "gpu"),)
    distribution: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        blocks=((128, 128), (64, 128), (128, 64), (64, 64)),
        dtypes=("bf16", "fp16"),
        head_dims=(64, 128),
        compute_capability=((8, 0), (9, 0)),
        walks="forwards",
        rows="table",
        ctas_per_sm=1,
    )

    def rows_per_sm(self, problem: Problem) -> int:
        """See `Backend.rows_per_sm`: on Hopper two CTAs of 64 rows share an SM."""
        if not is_hopper():
            return 1
        from wavealign.gpu._hopper_kernels import CTA_SHAPES

        return CTA_SHAPES[problem.mask.block_q].ctas_per_sm

    def bind(self, problem: Problem, lists: KernelLists, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind`."""
        return _bound(problem, inputs, *_arrays(lists, inputs.q.device))

    def bind_arrays(
        self,
        problem: Problem,
        inputs: Inputs,
        table: torch.Tensor,
        counts: torch.Tensor,
        starts: torch.Tensor,
        indices: torch.Tensor,
    ) -> BoundKernel:
        """The kernel over lists that lie on the device already.

        Args:
            problem: what the backend hasn't refused; of its mask only sizes are looked at.
            inputs: Q, K and V.
            table, counts: int32 ``[H, M]``: slot → query block, and its K/V blocks.
            starts: int64 ``[H * M]``, where each query block's list begins in `indices`.
            indices: int32.
        """
        return _bound(problem, inputs, table, counts, starts, indices)

    def bind_dense(self, problem: Problem, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind_dense`: every row reads one list, that of all K/V blocks."""
        mask, device = problem.mask, inputs.q.device
        table = torch.arange(mask.M, dtype=torch.int32, device=device).repeat(mask.H, 1)
        return _bound(
            problem,
            inputs,
            table,
            torch.full_like(table, mask.N),
            torch.zeros(mask.H * mask.M, dtype=torch.int64, device=device),
            torch.arange(mask.N, dtype=torch.int32, device=device),
        )

    def trace(self, problem: Problem, lists: KernelLists, inputs: Inputs) -> torch.Tensor:
        """Run once and say when and where each CTA ran.

        Returns:
            int64 ``[B * H * M, 3]`` in launch order: start and end in ns of the GPU's timer, and
            the SM's number. Tracing slows the kernel.
        """
        rows = problem.batch * problem.mask.H * problem.mask.M
        record = torch.zeros(rows, 3, dtype=torch.int64, device=inputs.q.device)
        arrays = _arrays(lists, inputs.q.device)
        _bound(problem, inputs, *arrays, record).launch()
        return record


def is_hopper() -> bool:
    """Whether the Gluon kernel runs here, which takes tensors of any strides."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def _arrays(
    lists: KernelLists, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Table, counts, starts and indices."""
    assert lists.table is not None
    return (
        on_device(lists.table, device),
        on_device(lists.counts, device),
        on_device(lists.indptr[:-1], device),
        on_device(lists.indices, device),
    )


def _bound(
    problem: Problem,
    inputs: Inputs,
    table: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    indices: torch.Tensor,
    record: torch.Tensor | None = None,
) -> BoundKernel:
    mask, (q, k, v) = problem.mask, (inputs.q, inputs.k, inputs.v)
    B, tokens, H, D = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(B, H, tokens, dtype=torch.float32, device=q.device)
    scale_log2 = math.log2(math.e) / math.sqrt(D)

    def launch_hopper() -> tuple[torch.Tensor, torch.Tensor]:
        from wavealign.gpu._hopper_kernels import attend_rows_hopper

        attend_rows_hopper(
            q, k, v, out, lse, table, counts, starts, indices, record, scale_log2,
            mask.block_q, mask.block_kv,
        )  # fmt: skip
        return out, lse

    def launch_plain() -> tuple[torch.Tensor, torch.Tensor]:
        from wavealign.gpu._triton_kernels import attend_rows

        # What shared memory allows: 164 KiB on an A100, 100 KiB on other Ampere and Ada cards.
        tile = 64 if torch.cuda.get_device_capability(q.device) == (8, 0) else 32
        attend_rows[(mask.M, H, B)](
            q, k, v, out, lse, table, counts, starts, indices,
            starts if record is None else record, scale_log2, tokens, mask.tokens_kv, H, k.shape[2],
            D=D, BLOCK_Q=mask.block_q, BLOCK_KV=mask.block_kv, TILE=tile,
            RAGGED=mask.tokens_kv % mask.block_kv != 0, TRACE=record is not None, STAGES=2,
            num_warps=8 if mask.block_q == 128 else 4,
        )  # fmt: skip
        return out, lse

    return BoundKernel(launch_hopper if is_hopper() else launch_plain, (out, lse))
