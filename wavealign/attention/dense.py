"""Full attention by the fastest kernel that is here."""

from __future__ import annotations

import torch
from torch import Tensor

from wavealign._devices import on_device
from wavealign.attention.inputs import DTYPE_NAMES
from wavealign.gpu.inputs import Inputs, differentiated
from wavealign.gpu.registry import registered
from wavealign.gpu.row_table import is_hopper
from wavealign.gpu.sizes import Sizes

_BLOCK = 128  # rows of a CTA; the mask, if there were one, would have blocks of so many tokens


def attend_dense(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
    """Self-attention over all tokens, softmax scale 1/√D.

    On Hopper by FlashAttention-4 where it is installed, else by our own kernel; elsewhere, and for
    what these don't take, derivatives included, by torch's scaled_dot_product_attention. On an
    H200, 118,800 tokens and 24 heads of 128 take 246, 272 and 292 ms (docs/results/gsrs.md).

    Args:
        q, k, v: ``[B, L, H, D]``, on one device.
        backend: ``"auto"``; ``"fa4"`` or ``"triton"`` for this one first; ``"reference"`` for
            torch's.

    Returns:
        ``[B, L, H, D]``.
    """
    ours = q.is_cuda and backend != "reference" and not any(map(differentiated, (q, k, v)))
    with on_device(q):
        if ours and is_hopper():
            B, L, H, D = q.shape
            blocks, dtype = -(-L // _BLOCK), DTYPE_NAMES.get(q.dtype, str(q.dtype))
            sizes = Sizes(
                H, blocks, blocks, _BLOCK, _BLOCK, L, L,
                batch=B, kv_heads=k.shape[2], head_dim=D, dtype=dtype,
            )  # fmt: skip
            inputs = Inputs(q, k, v)
            names = ("triton",) if backend == "triton" else ("fa4", "triton")
            for kernel in map(registered, names):
                if not (kernel.missing() or kernel.capabilities.refusal(sizes, (9, 0))):
                    return kernel.bind_dense(sizes, inputs.arranged(strided=False)).launch()[0]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
