"""A backend as CONTRIBUTING.md has it made: rows by slot, lists from their end, ragged block first.

It is as narrow-minded as kernels are: it wants contiguous data, and masks keys behind the last
token only in the block that it visits first.
"""

from __future__ import annotations

import torch

from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities
from wavealign.planning import ListLayout


class Toy(Backend):
    name = "toy"
    title = "online softmax, a row after the other"
    needs = ()
    distribution = "toy"
    capabilities = Capabilities(
        blocks=((16, 8),),
        dtypes=("bf16", "fp32"),  # plans made ahead are for bf16
        head_dims=(16,),
        compute_capability=None,
        layout=ListLayout("gathered", "backwards", ragged_kv_first=True),
    )

    def bind(self, sizes, lists, inputs):
        q, k, v = inputs.q, inputs.k, inputs.v
        assert all(t.is_contiguous() for t in (q, k, v))
        B, _, H, D = q.shape
        out, lse = torch.empty_like(q), torch.empty(B, H, q.shape[1])
        behind = sizes.N * sizes.block_kv - sizes.tokens_kv
        keys, values = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, behind)) for t in (k, v))

        def row(h, slot):
            own = slice(slot * sizes.block_q, (slot + 1) * sizes.block_q)
            highest = torch.full((B, sizes.block_q), -torch.inf)
            total, acc = torch.zeros_like(highest), torch.zeros(B, sizes.block_q, D)
            walk = lists.indices[h, slot, : lists.counts[h, slot]].flip(0).tolist()
            for visit, block in enumerate(walk):
                there = slice(block * sizes.block_kv, (block + 1) * sizes.block_kv)
                kv_head = h // sizes.heads_per_kv_head
                scores = q[:, own, h] @ keys[:, there, kv_head].mT / D**0.5
                if visit == 0:
                    scores[
                        ..., torch.arange(there.start, there.stop) >= sizes.tokens_kv
                    ] = -torch.inf
                new = torch.maximum(highest, scores.amax(-1))
                weights, shrink = (scores - new[..., None]).exp(), (highest - new).exp()
                total = total * shrink + weights.sum(-1)
                acc = acc * shrink[..., None] + weights @ values[:, there, kv_head]
                highest = new
            out[:, own, h] = acc / torch.where(total > 0, total, 1.0)[..., None]
            lse[:, h, own] = torch.where(total > 0, highest + total.log(), -torch.inf)

        def launch():
            for h in range(H):
                for slot in range(sizes.M):
                    row(h, slot)
            return out, lse

        return BoundKernel(launch, (out, lse))
