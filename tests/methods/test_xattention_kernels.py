"""XAttention's Triton kernels: without a GPU, on one, and that nothing waits for it."""

import dataclasses

import pytest
from helpers import nothing_waits, run_interpreted

torch = pytest.importorskip("torch")

from wavealign.errors import InputError  # noqa: E402
from wavealign.methods import (  # noqa: E402
    METHODS,
    head_mask,
    head_masks,
    make_mask,
    params,
    xattention,
)
from wavealign.methods.select import top_p  # noqa: E402
from wavealign.qk import TensorSource  # noqa: E402

QK = [name for name, method in METHODS.items() if method.needs_qk]


def walking(B, H, L, D, dtype=torch.bfloat16, device="cpu"):
    """Q or K that drifts along the sequence as a video's does, ``(B, L, H, D)``."""
    generator = torch.Generator().manual_seed(L)
    walk = torch.randn(B, L, 1, D, generator=generator).cumsum(1) / L**0.5
    pair = [walk * 3 + torch.randn(B, L, H, D, generator=generator) for _ in range(2)]
    return [x.to(device, dtype) for x in pair]


def test_triton_kernels_equal_torch_and_the_definition():
    pytest.importorskip("triton")
    assert run_interpreted("interpreted_xattention.py") == "equal"


@pytest.mark.parametrize("name", QK)
def test_masks_of_heads_are_those_of_each_head(name):
    q, k = walking(2, 4, 400, 16)
    k = k[:, :, ::2]
    made = head_masks(name, q, k)
    assert made.shape[:2] == (2, 4)
    for b in range(2):
        for h in range(4):
            assert torch.equal(made[b, h], head_mask(name, q[b, :, h], k[b, :, h // 2]))
    heads = head_masks(name, q[0].transpose(0, 1), k[0].transpose(0, 1))
    assert torch.equal(heads, made[0])


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((4, 300, 8), (3, 300, 8)),
        ((4, 300, 8), (4, 300, 16)),
        ((2, 300, 4, 8), (1, 300, 4, 8)),
        ((2, 300, 4, 8), (4, 300, 8)),
        ((300, 8), (300, 8)),
        ((4, 0, 8), (4, 0, 8)),
        ((4, 300, 8), (0, 300, 8)),
    ],
)
def test_bad_shapes(q, k):
    with pytest.raises(InputError, match=r"q has shape .*expected \[H, L, D\]"):
        head_masks("xattention", torch.ones(q), torch.ones(k))


def test_methods_that_look_at_no_queries_are_refused():
    with pytest.raises(InputError, match="make_mask"):
        head_masks("radial", torch.ones(1, 300, 8), torch.ones(1, 300, 8))


def _scores(q, k, p):
    return torch.stack([xattention._torch_scores(a, b, p) for a, b in zip(q, k, strict=True)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "head_dim", "changes"),
    [
        (4096, 128, {}),
        (4101, 128, {}),  # no whole cells: no tensor descriptors
        (5000, 64, {"padded_keys": False, "stride": 4}),
        (3000, 96, {"stride": 16, "top_p": "exclusive", "forced_column": False}),
        (3000, 64, {"stride": 128, "pad_to": 4096}),
        (1000, 64, {"stride": 1, "block": 64}),
    ],
)
def test_kernels_on_a_gpu_equal_the_cpu(dtype, tokens, head_dim, changes):
    p = dataclasses.replace(params.XAttention(), **changes)
    q, k = walking(2, 4, tokens, head_dim, dtype)
    k = k[:, :, ::2]
    assert xattention.fused(q.cuda(), k.cuda(), p)
    made = head_masks("xattention", q.cuda(), k.cuda(), p).cpu()
    expected = head_masks("xattention", q, k, p)
    assert (made != expected).float().mean() < 2e-3
    one, other = q[1, :, 3], k[1, :, 1]
    launch = xattention._launch(one.cuda()[None, None], other.cuda()[None, None], p)
    rows, blocks = launch.blocks_per_tile, launch.shape.columns
    scores = torch.zeros(max(launch.tiles * rows, blocks), blocks, device="cuda")
    for first in launch.chunks():
        launch.scores(first, scores[first * rows : min(first + launch.chunk, launch.tiles) * rows])
    scores = scores[:blocks].cpu()
    wanted = xattention.antidiagonal_scores(one, other, p)
    torch.testing.assert_close(scores, wanted, rtol=1e-3, atol=1e-5)
    alone = head_mask("xattention", one.cuda(), other.cuda(), p).cpu()
    assert torch.equal(alone, made[1, 3])


@pytest.mark.gpu
def test_kernels_equal_torch_on_the_gpu_at_length(monkeypatch):
    """In many chunks, which changes nothing."""
    from wavealign.methods import _xattention_kernels

    p = params.XAttention()
    q, k = walking(1, 3, 40_000, 128, device="cuda")
    made = head_masks("xattention", q, k, p)
    monkeypatch.setattr(_xattention_kernels, "SCRATCH_BYTES", 2**22)
    assert len(xattention._launch(q.transpose(1, 2), k.transpose(1, 2), p).chunks()) > 1
    assert torch.equal(head_masks("xattention", q, k, p), made)
    monkeypatch.setattr(xattention, "fused", lambda *_: False)
    expected = head_masks("xattention", q, k, p)
    assert 0.01 < expected.float().mean() < 0.99
    assert (made != expected).float().mean() < 1e-3


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    q, k = walking(1, 4, 4096, 64, device="cuda")
    head_masks("xattention", q, k)  # compiles
    with nothing_waits():
        made = head_masks("xattention", q, k)
    assert made.any(-1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("convention", ["inclusive", "exclusive"])
def test_top_p_without_a_sort_equals_the_sort(convention):
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(500, 2848, generator=generator) ** 6
    scores[:50] = (scores[:50] * 8).floor() / 8  # ties
    for share in (0.3, 0.9, 1.0):
        made = top_p(scores.cuda(), share, convention).cpu()
        differs = made != top_p(scores, share, convention)
        # Of a share of 1, whether the least scores count hangs on the order of the sums.
        assert (scores * differs).sum() <= 1e-9 * scores.sum()
        assert share == 1.0 or differs.float().mean() < 1e-5


@pytest.mark.gpu
def test_make_mask_takes_many_heads_at_once():
    q, k = (x[0].transpose(0, 1) for x in walking(1, 5, 3000, 64))
    seen = []
    made = make_mask(
        "xattention", TensorSource(q, k), heads=[3, 0, 4], device="cuda", on_head=seen.append
    )
    assert seen == [3, 0, 4]
    for place, head in enumerate(seen):
        alone = head_mask("xattention", q[head].cuda(), k[head].cuda()).cpu().numpy()
        assert (made.head(place).to_dense() == alone).all()
