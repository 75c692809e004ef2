"""FlashAttention-4's block-sparse forward on Hopper, the paper's backend.

Its plain scheduler launches rows in memory order, and a row's list is walked from its end
(flash_attn/cute: SingleTileScheduler, block_sparse_utils).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities
from wavealign.gpu.cute import CUTE
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.sizes import Sizes
from wavealign.planning.layout import ListLayout
from wavealign.planning.lists import DeviceSchedule


class FlashAttention4(Backend):
    """``flash_attn.cute``."""

    name = "fa4"
    title = "FlashAttention-4, block-sparse forward"
    needs = (("flash_attn.cute", "fa4"),)
    distribution = "flash-attn-4"
    # Blackwell is left out: there the kernel forces query blocks of 256 tokens.
    capabilities = Capabilities(
        blocks=((128, 128), (64, 128), (128, 64), (64, 64)),
        dtypes=("bf16", "fp16"), head_dims=(64, 128), compute_capability=((9, 0), (9, 0)),
        layout=ListLayout("gathered", "backwards", ragged_kv_first=True),
    )  # fmt: skip

    def bind(self, sizes: Sizes, lists: DeviceSchedule, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind`."""
        with _quiet():
            from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        counts = lists.counts[None]
        # Both lists have to be there on Hopper, and the empty one needs its H heads: its head
        # count alone tells the kernel whether lists are per query head.
        sparse = BlockSparseTensorsTorch(
            mask_block_cnt=torch.zeros_like(counts),
            mask_block_idx=counts.new_zeros(*counts.shape, 1), full_block_cnt=counts,
            full_block_idx=lists.indices[None], block_size=(sizes.block_q, sizes.block_kv),
        )  # fmt: skip
        return _bound(inputs, sparse)

    def bind_dense(self, sizes: Sizes, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind_dense`."""
        del sizes
        return _bound(inputs, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """One thread at a time, and without what the compiler says about names of its own."""
    with CUTE.lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _bound(inputs: Inputs, sparse: object) -> BoundKernel:
    with _quiet():
        from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v = inputs.q, inputs.k, inputs.v
    B, tokens, H, _ = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(B, H, tokens, dtype=torch.float32, device=q.device)

    def launch() -> tuple[Tensor, Tensor]:
        with _quiet():
            _flash_attn_fwd(
                q, k, v, causal=False, pack_gqa=False, block_sparse_tensors=sparse, out=out, lse=lse
            )
        return out, lse

    return BoundKernel(launch, (out, lse))
