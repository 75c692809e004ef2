"""Masks that don't look at Q and K: random blocks, a window of tiles, the radial pattern.

Window: Zhang et al., "Fast Video Generation with Sliding Tile Attention", 2025. Radial: Li et
al., "Radial Attention: O(n log n) Sparse Attention with Energy Decay for Long Video
Generation", 2025.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from wavealign.errors import InputError
from wavealign.methods.context import HeadContext, keep_text
from wavealign.methods.params import Radial, Random, Window

BoolArray = npt.NDArray[np.bool_]

_LEAST_COLUMN = 1 / 3  # a column of a block counts as dense above this share of its queries
_LEAST_BLOCK = 0.6  # a block is kept above this share of dense columns among the touched ones
_LEAST_WINDOW = 128  # tokens: below, pairs of frames are left out


def random(params: Random, context: HeadContext) -> BoolArray:
    """Blocks at random, bool ``(M, N)``; the length of a row is normal, cut to 1 .. N."""
    rng = np.random.default_rng([context.seed, context.head])
    M = math.ceil(context.tokens / params.block_q)
    N = math.ceil(context.tokens / params.block_kv)
    mean = params.density * N
    lengths = rng.normal(mean, params.spread * mean, M) if params.spread else np.full(M, mean)
    counts = np.clip(np.floor(lengths + rng.random(M)), 1, N)
    ranks = rng.random((M, N)).argsort(axis=1).argsort(axis=1)
    return np.asarray(ranks < counts[:, None])


def window(params: Window, context: HeadContext) -> BoolArray:
    """Blocks with a token whose tile lies in the window of a query's tile, bool ``(M, N)``.

    The window's centre is moved inside the video at the borders, so that every tile sees the
    same number of tiles.
    """
    coordinates = context.coordinates("window")
    grid = context.need_grid("window")
    tiles = [math.ceil(n / t) for n, t in zip(grid, params.tile, strict=True)]
    tile_of = np.ravel_multi_index(tuple((coordinates // params.tile).T), tiles)
    cells = np.stack(np.unravel_index(np.arange(math.prod(tiles)), tiles), axis=-1)
    near = np.ones((len(cells), len(cells)), dtype=np.bool_)
    for axis, count in enumerate(tiles):
        width = min(params.window[axis], count)
        first = np.clip(cells[:, axis] - width // 2, 0, count - width)
        near &= (cells[:, axis] >= first[:, None]) & (cells[:, axis] < first[:, None] + width)
    blocks = math.ceil(context.tokens / params.block)
    member = np.zeros((blocks, len(cells)), dtype=np.float32)
    member[np.arange(len(tile_of)) // params.block, tile_of] = 1
    keep = np.asarray(member @ near.astype(np.float32) @ member.T > 0)
    if params.dense_text:
        keep_text(keep, context.tokens, context.text_tokens, (params.block, params.block))
    return keep


def radial(params: Radial, context: HeadContext) -> BoolArray:
    """The radial pattern, bool ``(M, N)``, for tokens in raster order.

    Every pair of frames has a window around the same place in the frame, narrower the farther
    they are apart, and from some distance on only every n-th pair has one. A block is kept
    where, in one pair of frames, more than 0.6 of the columns that are touched at all are read
    by more than a third of the block's queries. `Radial` says whose pattern it is.

    Raises:
        InputError: another token order, frames smaller than a block, or such that upstream's
            accident leaves a query block no video.
    """
    frames, height, width = context.need_grid("radial")
    per_frame, block = height * width, params.block
    if context.order is not None:
        raise InputError("radial needs the tokens frame by frame; expected --order raster.")
    if per_frame < block:
        raise InputError(f"radial: {per_frame} tokens a frame; expected at least {block}.")
    tokens = context.video_tokens
    blocks = math.ceil(context.tokens / block)
    keep = np.zeros((blocks, blocks), dtype=np.bool_)
    key = np.arange(tokens)
    key_frame, place = key // per_frame, key % per_frame
    # One cell per (K/V block, frame) that meet: a block may span two frames or more.
    starts = np.flatnonzero(np.diff(key // block, prepend=-1) | np.diff(key_frame, prepend=-1))
    cell_block = starts // block
    # Where each frame's blocks end; those of the last are nobody else's, and stay.
    ends = -(-np.arange(1, frames + 1) * per_frame // block)
    if params.cut_frames:
        most = np.arange(frames - 1) * per_frame // block + math.ceil(per_frame / block)
        ends[:-1] = np.minimum(ends[:-1], most)
    held = cell_block < ends[key_frame[starts]]
    reach = np.array(
        [[_reach(i, j, per_frame, params) for j in range(frames)] for i in range(frames)]
    )
    for frame in range(frames):
        half = reach[frame][key_frame]
        low, high = place - half, place + half
        for first in range(frame * per_frame // block, ends[frame]):
            begin = max(first * block - frame * per_frame, 0)
            end = min((first + 1) * block - frame * per_frame, per_frame)
            readers = np.minimum(high, end - 1) - np.maximum(low, begin) + 1
            touched = np.add.reduceat(readers > 0, starts, dtype=np.int64)
            queries = min(block, tokens - first * block)
            dense = np.add.reduceat(readers > _LEAST_COLUMN * queries, starts, dtype=np.int64)
            keep[first, cell_block[held & (dense > _LEAST_BLOCK * touched)]] = True
    if (empty := np.flatnonzero(~keep[: math.ceil(tokens / block)].any(axis=1))).size:
        raise InputError(
            f"radial: frames of {per_frame} tokens leave query block {empty[0]} without any block "
            "of video, by upstream's accident; expected cut_frames=false, or frames of whole "
            "blocks."
        )
    if params.dense_tail and tokens % block:
        keep[tokens // block] = True
        keep[:, tokens // block] = True
    if params.dense_text:
        keep_text(keep, context.tokens, context.text_tokens, (block, block))
    return keep


def _reach(i: int, j: int, per_frame: int, params: Radial) -> int:
    """Half the window between frames `i` and `j`, in tokens; negative where nothing is kept."""
    distance = abs(i - j)
    if j == 0 and params.sink:
        return per_frame
    full: float = 2 ** per_frame.bit_length() / 2 ** distance.bit_length()
    if full < _LEAST_WINDOW and distance % int(_LEAST_WINDOW / full):
        return -per_frame
    if distance <= 1:
        return per_frame
    return int(max(full * params.decay, params.block))
