"""Full attention by the fastest kernel that is here."""

from __future__ import annotations

import functools

import torch

from wavealign.attention.inputs import DTYPE_NAMES, Geometry
from wavealign.gpu.backend import Backend
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.row_table import TritonRows, is_hopper

_BLOCK = 128  # rows of a CTA; the mask, if there were one, would have blocks of so many tokens


def attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str = "auto"
) -> torch.Tensor:
    """Self-attention over all tokens, softmax scale 1/√D.

    On Hopper by FlashAttention-4 where it is installed, else by our own kernel; elsewhere, and for
    what these don't take, by torch's scaled_dot_product_attention. On an H200, 118,800 tokens and
    24 heads of 128 take 246, 272 and 292 ms (docs/results/gsrs.md).

    Args:
        q, k, v: ``[B, L, H, D]``, on one device.
        backend: ``"auto"``; ``"fa4"`` or ``"triton"`` for this one first; ``"reference"`` for
            torch's.

    Returns:
        ``[B, L, H, D]``.
    """
    if q.is_cuda and backend != "reference" and is_hopper():
        B, L, H, D = q.shape
        blocks = -(-L // _BLOCK)
        sizes = Geometry(H, blocks, blocks, _BLOCK, _BLOCK, L, L, B)
        problem = sizes.problem(B, k.shape[2], D, DTYPE_NAMES.get(q.dtype, str(q.dtype)))
        for kernel in _kernels(backend):
            if kernel.capabilities.refusal(problem, (9, 0)):
                continue
            inputs = Inputs(q.contiguous(), k.contiguous(), v.contiguous())
            return kernel.bind_dense(problem, inputs).launch()[0]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@functools.cache
def _kernels(backend: str) -> tuple[Backend, ...]:
    """Those that are installed, in order; looking for them at every call would take longer."""
    from wavealign.gpu.fa4 import FlashAttention4

    wanted = (TritonRows(),) if backend == "triton" else (FlashAttention4(), TritonRows())
    return tuple(kernel for kernel in wanted if kernel.missing() is None)
