"""Block-sparse attention in float32, the slow and obvious way: what every backend must equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor

from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.sizes import Sizes
from wavealign.masks.block_mask import BlockMask
from wavealign.planning.lists import DeviceSchedule

_SCORES_BYTES = 2**31  # of one chunk of rows' scores

Rows = Iterable[tuple[int, Tensor]]  # a head's query blocks, each with its K/V blocks


class Reference(Backend):
    """Row after row in launch order over its list: slow, on any device, for tests and doubts."""

    name = "reference"
    title = "row after row in float32, on any device"
    needs = (("torch", "gpu"),)
    distribution = "torch"
    capabilities = Capabilities(None, None, None, None)

    def takes_strides(self) -> bool:
        """See `Backend.takes_strides`."""
        return True

    def bind(self, sizes: Sizes, lists: DeviceSchedule, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind`. A launch reads table and counts on the host."""

        def launch() -> tuple[Tensor, Tensor]:
            table, counts = lists.table.tolist(), lists.counts.tolist()

            def rows(h: int) -> Rows:
                return ((i, lists.indices[h, i, : counts[h][i]]) for i in table[h])

            return _attend(inputs, (sizes.block_q, sizes.block_kv), rows, inputs.q.dtype)

        return BoundKernel(launch)


def reference_attention(mask: BlockMask, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Attention over the kept blocks only; a row of query blocks at a time, so 364K tokens fit.

    Rows without a K/V block give output 0 and log-sum-exp -inf.

    Args:
        mask: for every sequence.
        inputs: Q, K and V on any device.

    Returns:
        Output float32 ``[B, tokens_q, H, D]`` and log-sum-exp (natural logarithm) float32
        ``[B, H, tokens_q]``.
    """

    def rows(h: int) -> Rows:
        head = mask.head(h)
        blocks = torch.tensor(head.indices, device=inputs.q.device)
        return enumerate(blocks[begin:end] for begin, end in pairwise(head.indptr.tolist()))

    return _attend(inputs, (mask.block_q, mask.block_kv), rows, torch.float32)


def _attend(
    inputs: Inputs, block: tuple[int, int], rows: Callable[[int], Rows], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    q, k, v = inputs.q, inputs.k, inputs.v
    (B, tokens, H, D), (block_q, block_kv) = q.shape, block
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((B, H, tokens), -math.inf, dtype=torch.float32, device=q.device)
    within = torch.arange(block_kv, device=q.device)
    for h in range(H):
        keys, values = (t[:, :, h // (H // k.shape[2])].float() for t in (k, v))
        for row, blocks in rows(h):
            if not len(blocks):
                continue
            own = slice(row * block_q, min((row + 1) * block_q, tokens))
            kept = (blocks[:, None].long() * block_kv + within).flatten()
            kept = kept[kept < k.shape[1]]
            with torch.autocast(q.device.type, enabled=False):  # it would round the products
                attended, lse[:, h, own] = _attend_tokens(
                    q[:, own, h].float(), keys, values, kept, 1.0 / math.sqrt(D)
                )
            out[:, own, h] = attended.to(dtype)
    return out, lse


def _attend_tokens(
    q: Tensor, keys: Tensor, values: Tensor, kept: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One query block over the kept tokens, a chunk at a time, merged by log-sum-exp."""
    chunk = max(1, _SCORES_BYTES // (4 * q.shape[0] * q.shape[1]))
    out, lse = None, None
    for part in kept.split(chunk):
        scores = torch.matmul(q, keys[:, part].transpose(1, 2)) * scale
        part_lse = scores.logsumexp(-1)
        part_out = torch.matmul((scores - part_lse[..., None]).exp_(), values[:, part])
        if out is None or lse is None:
            out, lse = part_out, part_lse
            continue
        both = torch.logaddexp(lse, part_lse)
        out = out * (lse - both).exp()[..., None] + part_out * (part_lse - both).exp()[..., None]
        lse = both
    assert out is not None
    assert lse is not None
    return out, lse
