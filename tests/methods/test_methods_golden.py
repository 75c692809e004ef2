"""Against the masks that the methods' own code made (tests/data/README.md)."""

from __future__ import annotations

import method_oracles as oracles
import numpy as np
import pytest
from helpers import ROOT

torch = pytest.importorskip("torch")

from wavealign.methods import head_mask, params  # noqa: E402
from wavealign.methods.select import block_means  # noqa: E402

GOLDEN = np.load(ROOT / "tests" / "data" / "methods_upstream.npz")


@pytest.fixture(scope="module")
def qk():
    """Inputs by name, fp16 [H, 4096, 64]: a window of a video, and noise from a seed."""
    generator = torch.manual_seed(0)
    noise = torch.randn(2, 4096, 64, generator=generator)
    keys = torch.randn(2, 4096, 64, generator=generator) * 1.5
    return {
        "clip": (torch.from_numpy(GOLDEN["clip/q"]), torch.from_numpy(GOLDEN["clip/k"])),
        "normal": (noise.half(), keys.half()),
    }


def names(method, ending=""):
    return [n for n in GOLDEN.files if n.startswith(method + "/") and n.endswith(ending)]


def heads(name, qk, dtype):
    """Every head of a golden mask: q, k, and the mask."""
    q, k = qk[name.split("/")[1]]
    return zip(q.to(dtype), k.to(dtype), GOLDEN[name], strict=True)


@pytest.mark.parametrize("name", names("xattn", "/full"))
def test_xattention(name, qk):
    _, _, stride, tau, _ = name.split("/")
    p = params.XAttention(float(tau[3:]), int(stride[6:]), pad_to=2048)
    for q, k, expected in heads(name, qk, torch.float32):
        assert (head_mask("xattention", q, k, p).numpy() == expected).all()


@pytest.mark.parametrize("name", names("xattn", "/causal"))
def test_xattention_causal(name, qk):
    """Upstream's plain causal path loses all keys before a chunk (its mask of padding, of which
    there is none here, covers everything): the first chunk is ours, the second the oracle's."""
    _, _, stride, tau, _ = name.split("/")
    stride, tau = int(stride[6:]), float(tau[3:])
    p = params.XAttention(tau, stride, pad_to=2048, causal=True)
    for q, k, expected in heads(name, qk, torch.float32):
        ours = head_mask("xattention", q, k, p).numpy()
        assert (ours[:16] == expected[:16]).all()
        theirs = oracles.xattention_upstream_causal(
            q.double().numpy(), k.double().numpy(), stride, 128, tau, 2048
        )
        assert (theirs == expected).all()


@pytest.mark.parametrize("name", names("sparge"))
def test_spargeattn(name, qk):
    _, _, blocks, what = name.split("/")
    block_q, block_kv = (int(n) for n in blocks.split("x"))
    select, similarity = what.split("_sim")
    value = float(select.removeprefix("topk").removeprefix("cdf"))
    kind = {"topk": value} if select.startswith("topk") else {"cdf": value, "select": "cdf"}
    p = params.SpargeAttn(block_q=block_q, block_kv=block_kv, similarity=float(similarity), **kind)
    for q, k, expected in heads(name, qk, torch.float16):
        ours = head_mask("spargeattn", q, k, p).numpy()
        scores = block_means(q, block_q).half() @ block_means(k - k.mean(0), block_kv).half().T
        share = (scores * 64**-0.5).softmax(-1).numpy()
        for row in np.flatnonzero((ours != expected).any(axis=1)):
            # As many blocks, and those that differ have one and the same fp16 score.
            differing = ours[row] != expected[row]
            assert ours[row].sum() == expected[row].sum()
            assert len(set(share[row, differing].tolist())) == 1
        assert (ours != expected).mean() < 0.01


@pytest.mark.parametrize("name", names("flex"))
def test_flexprefill(name, qk):
    _, _, gamma, least, tau, _ = name.split("/")
    p = params.FlexPrefill(float(gamma[5:]), float(tau[3:]), 128 * int(least[3:]), causal=True)
    for q, k, expected in heads(name, qk, torch.float32):
        assert (head_mask("flexprefill", q, k, p).numpy() == expected).all()


@pytest.mark.parametrize("name", names("minf"))
def test_minference_block_sparse(name, qk):
    topk = int(name.split("/")[3].removeprefix("topk"))
    p = params.MInference("block-sparse", topk=topk, causal=True)
    for q, k, expected in heads(name, qk, torch.float32):
        assert (head_mask("minference", q, k, p).numpy() == np.tril(expected)).all()
