"""cuDNN frontend's block-sparse attention (CuTe DSL kernels, 64 and 128 blocks).

Rows run in memory order. The 128 kernel walks lists from the front, the 64 kernel from the
end, so they are two backends.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities, Problem
from wavealign.gpu.inputs import Inputs, on_device
from wavealign.gpu.lists import KernelLists


class CudnnBlockSparse(Backend):
    """``cudnn.block_sparse_attention``, blocks of 128 tokens."""

    name: ClassVar[str] = "cudnn"
    title: ClassVar[str] = "cuDNN frontend block-sparse attention, 128x128"
    needs: ClassVar[tuple[tuple[str, str], ...]] = (("cudnn.block_sparse_attention", "cudnn"),)
    distribution: ClassVar[str] = "nvidia-cudnn-frontend"
    capabilities: ClassVar[Capabilities] = Capabilities(
        blocks=((128, 128),),
        dtypes=("bf16", "fp16"),
        head_dims=(64, 128),
        compute_capability=((9, 0), (9, 0)),
        walks="forwards",
        rows="gathered",
        ctas_per_sm=1,
    )

    def bind(self, problem: Problem, lists: KernelLists, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind`."""
        counts = on_device(lists.counts, inputs.q.device)[None]
        indices = on_device(lists.padded(), inputs.q.device)[None]
        return _bound(problem, inputs, counts, indices)

    def bind_dense(self, problem: Problem, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind_dense`."""
        mask = problem.mask
        every = torch.arange(mask.N, dtype=torch.int32, device=inputs.q.device)
        indices = every.expand(1, mask.H, mask.M, mask.N)
        counts = torch.full((1, mask.H, mask.M), mask.N, dtype=torch.int32, device=every.device)
        return _bound(problem, inputs, counts, indices)


class CudnnBlockSparse64(CudnnBlockSparse):
    """``cudnn.block_sparse_attention``, blocks of 64 tokens."""

    name: ClassVar[str] = "cudnn64"
    title: ClassVar[str] = "cuDNN frontend block-sparse attention, 64x64"
    capabilities: ClassVar[Capabilities] = Capabilities(
        blocks=((64, 64),),
        dtypes=("bf16", "fp16"),
        head_dims=(64, 128),
        compute_capability=((9, 0), (9, 0)),
        walks="backwards",
        rows="gathered",
        ctas_per_sm=3,
    )


def _bound(
    problem: Problem, inputs: Inputs, counts: torch.Tensor, indices: torch.Tensor
) -> BoundKernel:
    from cudnn.block_sparse_attention import block_sparse_attention_forward

    q, k, v = inputs.q, inputs.k, inputs.v
    B = q.shape[0]
    counts = counts.expand(B, -1, -1).contiguous()
    indices = indices.expand(B, -1, -1, -1).contiguous()

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        result = block_sparse_attention_forward(
            q, k, v, indices,
            q2k_block_nums=counts,
            sparse_block_size=problem.mask.block_kv,
            allow_empty_block_nums=True,
            layout="bshd",
        )  # fmt: skip
        return result["o_tensor"], result["lse_tensor"]

    return BoundKernel(launch)
