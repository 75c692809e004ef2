"""Token orders: in which sequence the tokens of the grid enter attention.

Attention doesn't care (rotary position is applied before), masks do: a block of tokens that lie
together in space and time is attended to, or not, as one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from wavealign.errors import unknown_name
from wavealign.qk.grid import TokenGrid
from wavealign.qk.hilbert import hilbert_curve

ORDERS = ("raster", "hilbert", "tiles")
"""Frame by frame; a generalized Hilbert curve; tile by tile, smaller at the borders."""

TILE = (6, 8, 8)
"""Tokens of a tile in time, height and width, where a mask method doesn't say others."""

Int64Array = npt.NDArray[np.int64]


def token_order(name: str, grid: TokenGrid, tile: tuple[int, int, int] | None = None) -> Int64Array:
    """Place in the sequence -> raster token, int64 ``(grid.tokens,)``.

    Args:
        name: one of `ORDERS`.
        grid: the token grid.
        tile: of the order "tiles"; default: `TILE`.

    Raises:
        InputError: an unknown name.
    """
    if name == "raster":
        return np.arange(grid.tokens)
    if name == "hilbert":
        cells = hilbert_curve(grid.shape)
        return np.asarray(np.ravel_multi_index(tuple(cells.T), grid.shape), dtype=np.int64)
    if name == "tiles":
        return _tiles(grid, tile or TILE)
    raise unknown_name("token order", name, ORDERS)


def _tiles(grid: TokenGrid, tile: tuple[int, int, int]) -> Int64Array:
    cells = np.stack(np.unravel_index(np.arange(grid.tokens), grid.shape), axis=-1)
    counts = [math.ceil(n / t) for n, t in zip(grid.shape, tile, strict=True)]
    tile_of = np.ravel_multi_index(tuple((cells // tile).T), counts)
    return np.argsort(tile_of, kind="stable")


def invert(order: Int64Array) -> Int64Array:
    """The inverse permutation: raster token -> place in the sequence."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse
