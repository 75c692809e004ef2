"""FlashAttention-4's block-sparse forward on Hopper, the paper's backend.

Its plain scheduler launches rows in memory order, and a row's list is walked from its end
(flash_attn/cute: SingleTileScheduler, block_sparse_utils).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities, Problem
from wavealign.gpu.inputs import Inputs, on_device
from wavealign.gpu.lists import KernelLists


class FlashAttention4(Backend):
    """``flash_attn.cute``."""

    name: ClassVar[str] = "fa4"
    title: ClassVar[str] = "FlashAttention-4, block-sparse forward"
    needs: ClassVar[tuple[tuple[str, str], ...]] = (("flash_attn.cute", "fa4"),)
    distribution: ClassVar[str] = "flash-attn-4"
    # Blackwell is left out: there the kernel forces query blocks of 256 tokens.
    capabilities: ClassVar[Capabilities] = Capabilities(
        blocks=((128, 128), (64, 128), (128, 64), (64, 64)),
        dtypes=("bf16", "fp16"),
        head_dims=(64, 128),
        compute_capability=((9, 0), (9, 0)),
        walks="backwards",
        rows="gathered",
        ragged_kv_first=True,
        ctas_per_sm=1,
    )

    def bind(self, problem: Problem, lists: KernelLists, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind`."""
        mask = problem.mask
        return self.bind_arrays(
            (mask.block_q, mask.block_kv),
            inputs,
            on_device(lists.counts, inputs.q.device),
            on_device(lists.padded(), inputs.q.device),
        )

    def bind_arrays(
        self,
        block: tuple[int, int],
        inputs: Inputs,
        counts: torch.Tensor,
        indices: torch.Tensor,
    ) -> BoundKernel:
        """The kernel over lists that lie on the device already.

        Args:
            block: tokens of a query and of a K/V block.
            inputs: Q in launch order, K and V.
            counts: int32 ``[H, M]``, by slot.
            indices: int32 ``[H, M, width]``, walked from each list's end.
        """
        with _quiet():
            from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        counts = counts[None]
        H, M = counts.shape[1:]
        # Both lists have to be there on Hopper, and the empty one needs its H heads: its head
        # count alone tells the kernel whether lists are per query head.
        sparse = BlockSparseTensorsTorch(
            mask_block_cnt=torch.zeros_like(counts),
            mask_block_idx=counts.new_zeros(1, H, M, 1),
            full_block_cnt=counts,
            full_block_idx=indices[None],
            block_size=block,
        )
        return _bound(inputs, sparse)

    def bind_dense(self, problem: Problem, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind_dense`."""
        del problem
        return _bound(inputs, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what its compiler says about arguments and names of its own."""
    with warnings.catch_warnings():
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

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        with _quiet():
            _flash_attn_fwd(
                q, k, v, causal=False, pack_gqa=False, block_sparse_tensors=sparse, out=out, lse=lse
            )
        return out, lse

    return BoundKernel(launch, (out, lse))
