"""Run by test_importance in a process of its own: the Triton kernels on CPU tensors.

The Hopper kernel has no interpreter; a stand-in for it shows that it is handed the right slices.
"""

import interpreter  # noqa: F401, I001 (before anything that imports triton)

import math

import torch
from importance_cases import CASES

from wavealign.gpu import _hopper_kernels


def stand_in(
    q, k, v, out, lse, table, counts, starts, indices, record, scale_log2, block_q, block_kv, also
):
    """What attend_rows_hopper is documented to do, for one sequence."""
    (B, tokens, heads, _), M = q.shape, counts.shape[1]
    assert B == 1
    assert heads % k.shape[2] == 0
    sums = also.sums[: heads * M * also.width * block_q].view(heads, M, also.width, block_q)
    for h in range(heads):
        keys, values = (t[0, :, h // (heads // k.shape[2])].float() for t in (k, v))
        for u in table[h].tolist():
            rows = slice(u * block_q, min((u + 1) * block_q, tokens))
            start, count = int(starts[h * M + u]), int(counts[h, u])
            scores = q[0, rows, h].float() @ keys.T * scale_log2
            kept = torch.zeros(len(keys), dtype=torch.bool)
            for visit, n in enumerate(indices.flatten()[start : start + count].tolist()):
                own = slice(n * block_kv, (n + 1) * block_kv)
                part = (scores[:, own] * math.log(2)).logsumexp(-1) / math.log(2)
                sums[h, u, visit, : len(part)] = part
                kept[own] = True
            natural = scores[:, kept] * math.log(2)
            lse[0, h, rows] = natural.logsumexp(-1) if count else -math.inf
            w = natural.softmax(-1)
            out[0, rows, h] = (w @ values[kept]).to(out.dtype)
            if u % also.every:
                continue
            if also.entropy is not None:
                also.entropy[0, h, rows] = torch.special.entr(w).sum(-1)
            if also.distance is not None:
                here = torch.arange(rows.start, rows.stop)[:, None]
                apart = (here - torch.arange(len(keys))[kept]).abs().float()
                also.distance[0, h, rows] = (w * apart).sum(-1)


_hopper_kernels.attend_rows_hopper = stand_in
PLUMBING = {
    "candidates, GQA, two sequences",
    "a schedule a sequence, in rounds",
    "a schedule",
    "all blocks, ragged",
    "every third block diagnosed",
    "every second block of a schedule diagnosed, in rounds",
}
for case in CASES:
    if problem := case.check("cpu", "triton"):
        print(f"{case.name}: {problem}")
    if case.name in PLUMBING and (problem := case.check("cpu", "hopper")):
        print(f"{case.name}, hopper: {problem}")
print("done")
