"""torch FlexAttention's Triton kernel, with a BlockMask built from lists.

Rows run in memory order and lists from their front. Its FLASH path is never used: in torch 2.11
that computes a BlockMask without a mask_mod densely, without a word
(https://github.com/pytorch/pytorch/issues/188322).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.sizes import Sizes
from wavealign.planning.layout import ListLayout
from wavealign.planning.lists import DeviceSchedule

_LIMITS: dict[str, Any] = {
    "recompile_limit": 4096,
    "accumulated_recompile_limit": 4096,
    "fail_on_recompile_limit_hit": True,
}


class FlexAttention(Backend):
    """``torch.nn.attention.flex_attention``, compiled by inductor to Triton."""

    name = "flex"
    title = "torch FlexAttention, Triton kernel"
    needs = (("torch", "gpu"), ("triton", "gpu"))
    distribution = "torch"
    kernels_per_launch = 2  # the other one scales the log-sum-exps
    capabilities = Capabilities(
        blocks=((128, 128), (128, 64), (64, 64), (64, 128)),
        dtypes=("bf16", "fp16"), head_dims=(64, 128), compute_capability=((8, 0), (9, 0)),
        layout=ListLayout("gathered"),
    )  # fmt: skip

    def __init__(self) -> None:
        self._compiled: Any = None

    def bind(self, sizes: Sizes, lists: DeviceSchedule, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind`."""
        from torch.nn.attention.flex_attention import BlockMask

        counts, width = lists.counts[None], lists.indices.shape[-1]
        # Lists as wide as the mask: a width of its own would compile the kernel anew for each
        # schedule.
        blocks = BlockMask.from_kv_blocks(
            torch.zeros_like(counts), counts.new_zeros(1, sizes.H, sizes.M, sizes.N), counts,
            torch.nn.functional.pad(lists.indices, (0, sizes.N - width))[None],
            BLOCK_SIZE=(sizes.block_q, sizes.block_kv),
            seq_lengths=(inputs.q.shape[1], inputs.k.shape[1]), compute_q_blocks=False,
        )  # fmt: skip
        return self._bound(sizes, inputs, blocks)

    def bind_dense(self, sizes: Sizes, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind_dense`."""
        return self._bound(sizes, inputs, None)

    def _bound(self, sizes: Sizes, inputs: Inputs, blocks: object) -> BoundKernel:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        if self._compiled is None:
            self._compiled = torch.compile(flex_attention, dynamic=False)
        compiled = self._compiled
        heads_first = [t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v)]
        options = {
            "BACKEND": "TRITON",
            "BLOCK_M": min(128, sizes.block_q),
            "BLOCK_N": min(64, sizes.block_kv),
            # Rows without blocks are legal, and so is a first block that is ragged.
            "ROWS_GUARANTEED_SAFE": False,
            "BLOCKS_ARE_CONTIGUOUS": False,
        }

        first = True

        def launch() -> tuple[Tensor, Tensor]:
            nonlocal first
            # Each shape is compiled once. After eight of them torch would go on without compiling:
            # by other kernels, with all scores in memory.
            limits = torch._dynamo.config.patch(**_LIMITS) if first else nullcontext()
            with limits, torch.no_grad():
                out, aux = compiled(
                    *heads_first, block_mask=blocks, enable_gqa=sizes.heads_per_kv_head > 1,
                    kernel_options=options, return_aux=AuxRequest(lse=True),
                )  # fmt: skip
            first = False
            return out.transpose(1, 2), aux.lse

        return BoundKernel(launch)
