"""Token grids and token orders."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from wavealign.errors import InputError
from wavealign.qk import MODELS, TokenGrid, find_model, invert, token_order
from wavealign.qk.hilbert import hilbert_curve

CLIPS = [
    ("wan2.1", (81, 480, 832), (21, 30, 52)),
    ("wan2.1", (81, 720, 1280), (21, 45, 80)),
    ("wan2.1-1.3b", (401, 720, 1280), (101, 45, 80)),
    ("hunyuan", (129, 720, 1280), (33, 45, 80)),
    ("ltx2", (121, 704, 1216), (16, 22, 38)),
    ("ltx2", (257, 1088, 1920), (33, 34, 60)),
]


@pytest.mark.parametrize(("model", "clip", "grid"), CLIPS)
def test_grids_of_published_clips(model, clip, grid):
    assert find_model(model).grid(*clip).shape == grid


def test_clips_that_a_model_cannot_take():
    wan = MODELS["wan2.1"]
    with pytest.raises(InputError, match=r"4n\+1 frames; 80 isn't one of them, 81 is"):
        wan.grid(80, 720, 1280)
    with pytest.raises(InputError, match="multiples of 16 pixels; found 721"):
        wan.grid(81, 721, 1280)
    with pytest.raises(InputError, match="positive"):
        wan.grid(0, 720, 1280)
    with pytest.raises(InputError, match=r"Did you mean 'hunyuan'"):
        find_model("hunyuanvideo")
    for text in ("21x45", "axbxc", "1x2x3x4"):
        with pytest.raises(InputError, match="can't be read"):
            TokenGrid.parse(text)
    with pytest.raises(InputError, match="at least one token"):
        TokenGrid.parse("0x4x4")
    assert TokenGrid.parse(" 21x45x80 ") == TokenGrid(21, 45, 80)


def test_the_curve_visits_every_cell_of_every_small_box():
    for shape in itertools.product(range(1, 8), repeat=3):
        curve = hilbert_curve(shape)
        assert len(np.unique(np.ravel_multi_index(tuple(curve.T), shape))) == math.prod(shape)
        assert len(curve) == math.prod(shape)
        assert np.abs(np.diff(curve, axis=0)).max(initial=0) <= 1


@pytest.mark.parametrize("shape", [(8, 8, 8), (16, 8, 4), (18, 48, 80), (1, 45, 80)])
def test_the_curve_takes_unit_steps_where_sizes_allow(shape):
    assert (np.abs(np.diff(hilbert_curve(shape), axis=0)).sum(axis=1) == 1).all()


@pytest.mark.parametrize("name", ["raster", "hilbert", "tiles"])
def test_orders_are_permutations(name):
    grid = TokenGrid(21, 45, 80)
    order = token_order(name, grid)
    assert (np.sort(order) == np.arange(75_600)).all()
    assert (order[invert(order)] == np.arange(75_600)).all()
    with pytest.raises(InputError, match="unknown token order"):
        token_order("spiral", grid)


def test_blocks_lie_closer_together_along_the_curve():
    """Mean extent of a block of 128 tokens, in frames + rows + columns."""
    grid = TokenGrid(21, 45, 80)

    def extent(name):
        cells = np.stack(np.unravel_index(token_order(name, grid), grid.shape), axis=-1)
        whole = cells[: len(cells) // 128 * 128].reshape(-1, 128, 3)
        return np.ptp(whole, axis=1).sum(axis=1).mean()

    assert extent("hilbert") < extent("tiles") < extent("raster")
    assert extent("hilbert") < 16


def test_tiles_are_contiguous():
    grid = TokenGrid(12, 16, 16)
    order = token_order("tiles", grid)
    tiles = np.stack(np.unravel_index(order, grid.shape), axis=-1) // (6, 8, 8)
    assert (np.ptp(tiles.reshape(-1, 6 * 8 * 8, 3), axis=1) == 0).all()
