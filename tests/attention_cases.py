"""Q, K, V and masks for attention without a GPU, and what it must give."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

BLOCK = (16, 8)


def inputs(B=2, H=4, tokens=(75, 61), D=16, kv_heads=None, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def draw(heads, length):
        return torch.randn(B, heads, length, D, generator=generator).to(dtype)

    return draw(H, tokens[0]), *(draw(kv_heads or H, tokens[1]) for _ in range(2))


def blocks(H=4, B=None, tokens=(75, 61), seed=0, density=0.5):
    shape = (-(-tokens[0] // BLOCK[0]), -(-tokens[1] // BLOCK[1]))
    rng = np.random.default_rng(seed)
    kept = rng.random((*(() if B is None else (B,)), H, *shape)) < density
    kept[..., 0, 1, :] = False
    return torch.from_numpy(kept)


def dense_attention(q, k, v, mask):
    """Softmax over the kept tokens of [B, H, S, D]; 0 and -inf where there are none."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    kept = mask.repeat_interleave(BLOCK[0], -2).repeat_interleave(BLOCK[1], -1)
    kept = kept[..., : q.shape[2], : k.shape[2]]
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~kept, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1), 0.0) @ v, scores.logsumexp(-1)
