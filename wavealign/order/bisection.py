"""Row orders that divide the rows, by halves or into waves: bisections and balanced k-means.

Halves are cut at whole waves, the half with the longer rows first, until a part is one wave.
Inside a wave rows keep their natural order: the suffix ``+nnz`` sorts them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign.masks.block_mask import HeadMask, Int32Array, Int64Array
from wavealign.order.blas import single_threaded_blas
from wavealign.order.context import OrderContext
from wavealign.order.row_orders import nnz
from wavealign.order.schedule import inverse
from wavealign.order.spectra import singular_coordinates, turned_to_long

Float64Array = npt.NDArray[np.float64]


def pd_bisect(head: HeadMask, context: OrderContext, rank: int) -> Int32Array:
    """Divide the rows along the principal direction of each part, down to waves.

    Principal direction divisive partitioning (Boley 1998,
    https://doi.org/10.1023/A:1009740529316) on the coordinates of `svd`, cut where whole waves
    end rather than at the mean.

    Args:
        head, context: of the rows.
        rank: coordinates of a row.
    """
    points = singular_coordinates(head, rank, context).astype(np.float64)
    return _bisect(points, head, context.wave)


def profile_bisect(head: HeadMask, context: OrderContext, bins: int) -> Int32Array:
    """As `pd_bisect`, on each row's cumulative profile.

    The profile of a row says how many of its blocks lie in the first 1, 2, ... of `bins` equal
    parts of the K/V axis: where the row is in an ascending pass, against the blocks it has read.
    Its last entry is NNZ.

    Args:
        head, context: of the rows.
        bins: entries of a profile.
    """
    return _bisect(cumulative_profile(head, bins), head, context.wave)


def kmeans(head: HeadMask, context: OrderContext, rank: int, rounds: int) -> Int32Array:
    """Balanced k-means on the coordinates of `svd`: clusters of one wave, longest rows first.

    Lloyd's two steps, with every cluster filled to one wave (Malinen & Fränti 2014,
    https://doi.org/10.1007/978-3-662-44415-3_4), pairs of row and centre taken from the nearest
    on instead of an optimal assignment. It starts from `pd_bisect`'s waves, so nothing is random,
    and ends after `rounds` rounds or when no row moves.

    Args:
        head, context: of the rows.
        rank: coordinates of a row.
        rounds: at most.
    """
    from scipy.spatial.distance import cdist

    points = singular_coordinates(head, rank, context).astype(np.float64)
    order = _bisect(points, head, context.wave)
    label = np.empty(head.M, dtype=np.int64)
    label[order] = np.arange(head.M) // context.wave
    capacity = np.bincount(label)
    for _ in range(rounds):
        sums = np.stack([np.bincount(label, weights=axis) for axis in points.T], axis=1)
        moved = nearest_with_room(cdist(points, sums / capacity[:, None], "sqeuclidean"), capacity)
        if np.array_equal(moved, label):
            break
        label = moved
    # The last wave of the launch is the only one that may be short.
    mean_nnz = np.bincount(label, weights=head.row_nnz) / capacity
    full = capacity == context.wave
    rank_of_cluster = inverse(np.lexsort((-mean_nnz, ~full)))
    return np.argsort(rank_of_cluster[label], kind="stable").astype(np.int32)


def graph_bisect(head: HeadMask, context: OrderContext, rounds: int) -> Int32Array:
    """Recursive bisection of the row-block graph, rows swapped between halves while it pays.

    Dhulipala et al. 2016 (https://arxiv.org/abs/1602.08820): a half's cost is the bits that
    gaps between its rows take in each K/V block's list of rows, Σ d·log₂(n/(d+1)) over blocks
    kept by d of its n rows. Each round pairs the rows that gain most by moving and swaps while a
    pair gains. It starts from NNZ descending and recurses down to waves.

    Args:
        head, context: of the rows.
        rounds: at each cut, at most.
    """
    from wavealign.order._bisection_kernels import bisect_rows

    order = nnz(head, context)
    bisect_rows(order, head.indptr, head.indices, head.N, context.wave, rounds)
    for first in range(0, head.M, context.wave):
        order[first : first + context.wave].sort()
    return order


def cumulative_profile(head: HeadMask, bins: int) -> Float64Array:
    """Kept blocks of each row in the first 1 ... `bins` parts of the K/V axis, ``(M, bins)``."""
    part = head.indices.astype(np.int64) * bins // head.N
    cells = np.repeat(np.arange(head.M, dtype=np.int64) * bins, head.row_nnz) + part
    counts = np.bincount(cells, minlength=head.M * bins).reshape(head.M, bins)
    return np.cumsum(counts, axis=1).astype(np.float64)


def nearest_with_room(distance: Float64Array, capacity: Int64Array) -> Int64Array:
    """A centre for every row, none beyond its capacity: nearest pairs first, ``(M,)``."""
    rows, centres = distance.shape
    label = np.full(rows, -1, dtype=np.int64)
    room = capacity.copy()
    left = rows
    for pair in np.argsort(distance, axis=None, kind="stable"):
        row, centre = divmod(int(pair), centres)
        if label[row] < 0 and room[centre] > 0:
            label[row] = centre
            room[centre] -= 1
            left -= 1
            if left == 0:
                break
    return label


def _bisect(points: npt.NDArray[Any], head: HeadMask, wave: int) -> Int32Array:
    """Rows in waves, each part cut across the principal direction of its points."""
    parts = [np.arange(head.M, dtype=np.int32)]
    done = []
    with single_threaded_blas:
        while parts:
            rows = parts.pop()
            waves = -(-len(rows) // wave)
            if waves == 1:
                done.append(rows)
                continue
            along = _principal_coordinate(points[rows])
            turned = turned_to_long(along, head.take_rows(rows))
            ranked = rows[np.argsort(-turned, kind="stable")]
            cut = waves // 2 * wave
            parts += [np.sort(ranked[cut:]), np.sort(ranked[:cut])]
    return np.concatenate(done)


def _principal_coordinate(points: Float64Array) -> Float64Array:
    centred = points - points.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    along: Float64Array = centred @ vectors[:, -1]
    # What rounding leaves of equal points is no direction.
    scale = float(np.abs(points).max(initial=0.0))
    return along if np.abs(along).max() > 1e-9 * scale else np.zeros(len(points))
