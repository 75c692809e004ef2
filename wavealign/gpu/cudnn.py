"""cuDNN frontend's block-sparse attention (CuTe DSL kernels, 64 and 128 blocks).

Rows run in memory order. The 128 kernel walks lists from the front, the 64 kernel from the
end, so they are two backends.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities
from wavealign.gpu.cute import CUTE
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.sizes import Sizes
from wavealign.planning.layout import ListLayout
from wavealign.planning.lists import DeviceSchedule


class CudnnBlockSparse(Backend):
    """``cudnn.block_sparse_attention``, blocks of 128 tokens."""

    name = "cudnn"
    title = "cuDNN frontend block-sparse attention, 128x128"
    needs = (("cudnn.block_sparse_attention", "cudnn"),)
    distribution = "nvidia-cudnn-frontend"
    capabilities = Capabilities(
        blocks=((128, 128),), dtypes=("bf16", "fp16"), head_dims=(64, 128),
        compute_capability=((9, 0), (9, 0)), layout=ListLayout("gathered"),
    )  # fmt: skip

    def bind(self, sizes: Sizes, lists: DeviceSchedule, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind`."""
        from cudnn.block_sparse_attention import block_sparse_attention_forward

        q, k, v = inputs.q, inputs.k, inputs.v
        counts = lists.counts.expand(len(q), -1, -1).contiguous()
        indices = lists.indices.expand(len(q), -1, -1, -1).contiguous()

        def launch() -> tuple[Tensor, Tensor]:
            with CUTE.lock:
                result = block_sparse_attention_forward(
                    q, k, v, indices,
                    q2k_block_nums=counts,
                    sparse_block_size=sizes.block_kv,
                    allow_empty_block_nums=True,
                    layout="bshd",
                )  # fmt: skip
            return result["o_tensor"], result["lse_tensor"]

        return BoundKernel(launch)


class CudnnBlockSparse64(CudnnBlockSparse):
    """``cudnn.block_sparse_attention``, blocks of 64 tokens."""

    name = "cudnn64"
    title = "cuDNN frontend block-sparse attention, 64x64"
    capabilities = dataclasses.replace(
        CudnnBlockSparse.capabilities,
        blocks=((64, 64),), layout=ListLayout("gathered", "backwards"), ctas_per_sm=3,
    )  # fmt: skip
