"""A synthetic mask that behaves like a content-dependent one: clustered K/V, rows of any length.

    python benchmarks/content_like.py OUT.npz [--rows 4096] [--columns 2048] [--block 64x128]

Each K/V block has a point on a random walk in six dimensions, each query block a point near the
walk; a row keeps its best-scoring blocks. Row lengths are log-normal and independent of each
other, as in `data/h200/video_cv1_2841.npz`.
"""

from __future__ import annotations

import numpy as np
from common import parser

from wavealign.masks import BlockMask, save_mask
from wavealign.units import parse_block

_DIMENSIONS = 6
_NOISE = 0.5  # of query points, and of scores


def content_like(
    rows: int,
    columns: int,
    block: tuple[int, int],
    density: float = 0.34,
    spread: float = 1.0,
    seed: int = 0,
) -> BlockMask:
    """One head, `rows` a multiple of `columns`; `spread` is the NNZ spread before clipping at 1."""
    rng = np.random.default_rng(seed)
    walk = np.cumsum(rng.normal(size=(columns, _DIMENSIONS)), axis=0)
    walk -= walk.mean(axis=0)
    keys = walk / np.linalg.norm(walk, axis=1).mean()
    queries = np.repeat(keys, rows // columns, axis=0)
    queries = queries + _NOISE * rng.normal(size=queries.shape)
    scores = queries @ keys.T + _NOISE * rng.normal(size=(rows, columns))
    lengths = np.exp(np.sqrt(np.log1p(spread**2)) * rng.normal(size=rows))
    share = lengths
    for _ in range(50):  # what is clipped at 1 is made up for by the others
        share = np.clip(share * density / share.mean(), 1 / columns, 1.0)
    kept = np.zeros((1, rows, columns), dtype=np.bool_)
    for row, count in enumerate((share * columns).astype(int)):
        kept[0, row, np.argpartition(-scores[row], count - 1)[:count]] = True
    return BlockMask.from_dense(kept, block)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out")
    arguments.add_argument("--rows", type=int, default=4096)
    arguments.add_argument("--columns", type=int, default=2048)
    arguments.add_argument("--block", type=parse_block, default=(64, 128))
    arguments.add_argument("--density", type=float, default=0.34)
    arguments.add_argument("--spread", type=float, default=1.8)
    arguments.add_argument("--seed", type=int, default=0)
    given = vars(arguments.parse_args())
    out = given.pop("out")
    mask = content_like(**given)
    save_mask(out, mask)
    nnz = np.diff(mask.indptr)
    print(f"density {mask.density:.3f}, NNZ spread {nnz.std() / nnz.mean():.2f}")


if __name__ == "__main__":
    main()
