"""What several test modules need: small random masks, and paths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from wavealign.masks import BlockMask

ROOT = Path(__file__).parent.parent
DATA = ROOT / "data"


@st.composite
def dense_masks(draw, max_heads=3, max_rows=12, max_columns=12):
    """Bool arrays [H, M, N] of any density, with empty rows and heads among them."""
    shape = (
        draw(st.integers(1, max_heads)),
        draw(st.integers(1, max_rows)),
        draw(st.integers(1, max_columns)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row_density = rng.random(shape[:2]) * draw(st.sampled_from([0.0, 0.3, 1.0, 1.5]))
    return rng.random(shape) < row_density[:, :, None]


def random_mask(seed=0, shape=(2, 30, 24), density=0.4, block=(128, 128), tokens=None):
    """A BlockMask whose rows differ in length."""
    rng = np.random.default_rng(seed)
    row_density = density * (0.4 + 1.2 * rng.random(shape[:2]))
    return BlockMask.from_dense(rng.random(shape) < row_density[:, :, None], block, tokens)


def row_lists(schedule_or_mask):
    """Per head, per query block, the list of K/V blocks."""
    H, M, _ = schedule_or_mask.shape
    pointers, indices = schedule_or_mask.indptr, schedule_or_mask.indices
    return [
        [indices[pointers[h * M + i] : pointers[h * M + i + 1]].tolist() for i in range(M)]
        for h in range(H)
    ]
