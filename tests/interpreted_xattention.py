"""Run by test_xattention_kernels, in a process of its own: the interpreter is chosen early.

Launches the Triton kernels of XAttention and of top-p on CPU tensors and compares with torch and
with the definitions (tests/method_oracles.py).
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools

import method_oracles as oracles
import numpy as np
import torch

from wavealign.methods import _select_kernels, _xattention_kernels, params, xattention
from wavealign.methods.select import top_p

SMALL = _xattention_kernels.Tile(rows=16, cells=32, depth=16, ctas_per_sm=1)
_xattention_kernels.default_tile = lambda device: SMALL
generator = torch.Generator().manual_seed(0)


def qk(shape, key_heads, dtype):
    """Q and K that drift along the sequence, tokens on the third axis."""
    B, H, L, D = shape
    walk = torch.randn(B, 1, L, D, generator=generator).cumsum(2) / 8
    q = walk + torch.randn(B, H, L, D, generator=generator) / 2
    k = walk + torch.randn(B, key_heads, L, D, generator=generator) / 2
    return q.to(dtype), k.to(dtype)


def check_masks(found, scores, p, blocks):
    """Equal to top-p of torch's scores, but where a row's crossing block is a near tie."""
    expected = top_p(scores, p.threshold, p.top_p)
    if p.forced_column:
        expected[:, 0] |= ~expected.all(-1)
    expected = expected[:blocks, :blocks]
    for row in (found != expected).any(1).nonzero()[:, 0].tolist():
        differing = scores[row, :blocks][found[row] != expected[row]].double()
        total = scores[row].double().sum()
        kept = scores[row, :blocks][expected[row]].double().sum()
        near = differing.sum() < 1e-5 * total or abs(kept - p.threshold * total) < 1e-5 * total
        assert near or differing.max() - differing.min() < 1e-5 * total, (row, differing)
    return int((found != expected).sum())


different = 0
for turn, (stride, tokens, padded) in enumerate(
    [
        (8, 128, True),
        (4, 117, True),
        (8, 117, False),
        (4, 128, False),
        (2, 64, True),
        (16, 128, True),
    ]
):
    p = params.XAttention(
        (0.5, 0.9, 1.0)[turn % 3], stride, 16, norm=(1.0, 0.5)[turn % 2], pad_to=96,
        padded_keys=padded, forced_column=turn % 4 < 2,
        top_p="inclusive" if turn % 5 else "exclusive",
    )  # fmt: skip
    # Not bf16: Triton's interpreter holds it as integers, and multiplies these.
    head_dim = (16, 24, 32)[turn % 3]
    _xattention_kernels.SCRATCH_BYTES = (2**30, 1200)[turn % 2]  # one chunk, or many
    B, H, group = (1, 2, 1 + turn % 2) if turn % 4 else (2, 1, 1)
    q, k = qk((B, H, tokens, head_dim), H // group, torch.float16)
    if turn % 3 == 0:  # views of [B, L, H, D]
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    launch = xattention._launch(q, k, p)
    shape = launch.shape
    assert launch.tma == (tokens % stride == 0)
    assert (len(launch.chunks()) == 1) == (turn % 2 == 0)
    keep = xattention.xattention_heads(q, k, p)
    rows, columns = launch.row_tiles * launch.blocks_per_tile, shape.columns
    whole = torch.zeros(launch.tiles * launch.blocks_per_tile, columns)
    for first in launch.chunks():
        last = min(first + launch.chunk, launch.tiles)
        part = slice(first * launch.blocks_per_tile, last * launch.blocks_per_tile)
        launch.scores(first, whole[part])
    whole = whole.view(B, H, rows, columns)[:, :, : shape.blocks]
    for b, h in itertools.product(range(B), range(H)):
        one_q, one_k = q[b, h], k[b, h // group]
        scores = xattention.antidiagonal_scores(one_q, one_k, p)
        torch.testing.assert_close(whole[b, h], scores[: shape.blocks], rtol=1e-4, atol=1e-6)
        different += check_masks(keep[b, h], scores, p, shape.blocks)
    if not padded and p.norm == 1:
        pad = ((0, -tokens % 96), (0, 0))
        a, b = (np.pad(x.double().numpy(), pad) for x in (one_q, one_k))
        real = -(-tokens // stride)
        score = oracles.antidiagonal(a, b, stride, 16, real)
        full = tokens // 16  # a ragged row's padding queries count as nothing
        np.testing.assert_allclose(whole[-1, -1, :full], score[:full], rtol=1e-3, atol=1e-5)
assert different < 10, different

# Top-p alone: scores with ties, zeros, rows of one value, and rows without any.
scores = torch.rand(12, 37, generator=generator) ** 4
scores[:4] = (scores[:4] * 4).floor() / 8
scores[4] = 0
scores[5] = 0.25
scores[6, 3:] = 0
for share, convention in itertools.product((0.5, 0.9, 1.0), ("inclusive", "exclusive")):
    keep = torch.empty(1, 12, 37, dtype=torch.bool)
    _select_kernels.launch_top_p(scores, keep, share, convention)
    assert torch.equal(keep[0], top_p(scores, share, convention)), (share, convention)

print("equal")
