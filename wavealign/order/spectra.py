"""Row orders from a truncated factorisation of the mask: `svd`, `nnz-bucket+svd`, `spectral`.

All of them apply the mask as an operator (scipy sparse) and let ARPACK find one singular
vector; nothing of size M x M is ever formed.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg
import scipy.sparse
from scipy.sparse.linalg import LinearOperator, svds

from wavealign.masks.block_mask import HeadMask, Int32Array
from wavealign.order import row_orders
from wavealign.order.blas import single_threaded_blas
from wavealign.order.context import Draw, OrderContext

Float32Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.floating[Any]]

# Up to this many columns, or rows that differ: LAPACK on a dense thin matrix. ARPACK would exhaust
# the space of so low a rank, and go on from random numbers that no seed decides.
_SMALL = 64
_TOLERANCE = 1e-2  # of svds; gives the vector to cos > .99999 also without a spectral gap
_DENSE_FROM = 0.2  # density from which a dense product beats a sparse one
_CURVE_BITS = 48  # of a place on the Hilbert curve, over all axes
_ROUNDING = 5  # digits of a coordinate that are signal in float32; equal rows stay equal


def svd(head: HeadMask, context: OrderContext, rank: int, sign: str) -> Int32Array:
    """Sort by the leading scaled left singular vector of the column-centred mask.

    Stage 1 of the WaveAlign paper (section IV-C). The sign of a singular vector is arbitrary:
    it is turned so that it grows with NNZ, and the order runs from its large end.

    Args:
        head, context: as for any row order.
        rank: coordinates; beyond 1, rows are sorted along the Hilbert curve through them.
        sign: ``"short"`` runs from the other end, short rows first.
    """
    coordinates = singular_coordinates(head, rank, context)
    if rank == 1:
        return descending(coordinates[:, 0], head, sign == "short")
    turned = np.stack([turned_to_long(c, head) for c in coordinates.T], axis=1)
    # Rounding was by coordinate; the weights of the directions are the singular values.
    place = hilbert_index(turned * np.abs(coordinates).max(axis=0))
    order = np.argsort(place, kind="stable").astype(np.int32)
    return long_rows_first(order, head, sign == "short")


def nnz_bucket_svd(
    head: HeadMask, context: OrderContext, bucket: int, rank: int, sign: str
) -> Int32Array:
    """NNZ descending, cut into buckets of `bucket` waves, `svd` order inside each.

    Args:
        head, context: of the rows.
        bucket: waves of a bucket.
        rank, sign: see `svd`.
    """
    by_nnz = row_orders.nnz(head, context)
    size = bucket * context.wave
    buckets = (by_nnz[first : first + size] for first in range(0, head.M, size))
    return np.concatenate([b[svd(head.take_rows(b), context, rank, sign)] for b in buckets])


def spectral(head: HeadMask, context: OrderContext) -> Int32Array:
    """Sort by the Fiedler vector of the row-overlap graph, component by component.

    The graph joins rows i and j with weight S_ij = shared K/V blocks, S = B Bᵀ. With D the
    diagonal of S's row sums, the Fiedler vector solves (D - S) y = λ D y for the smallest
    λ > 0 (Shi & Malik 2000, https://doi.org/10.1109/34.868688); y = D^-1/2 u, where u is the
    second left singular vector of D^-1/2 B, so B is all that's needed. Disconnected parts are
    ordered apart, longest rows first; empty rows go last.
    """
    component = _components(head)
    row_nnz = head.row_nnz
    labels, member_count = np.unique(component, return_counts=True)
    mean_nnz = np.bincount(component, weights=row_nnz)[labels] / member_count
    parts = []
    for label in labels[np.lexsort((labels, -mean_nnz))]:
        members = np.flatnonzero(component == label).astype(np.int32)
        part = head.take_rows(members) if len(labels) > 1 else head
        parts.append(members[descending(fiedler_vector(part, context), part)])
    order = np.concatenate(parts)
    return order[np.argsort(row_nnz[order] == 0, kind="stable")]


def singular_coordinates(head: HeadMask, rank: int, context: OrderContext) -> Float32Array:
    """Leading left singular vectors of the column-centred mask times their singular values.

    float32 ``(M, rank)``, largest first: the best rank-`rank` Euclidean embedding of the rows
    (Eckart-Young). Columns beyond the mask's rank are 0. Signs are arbitrary.

    Args:
        head, context: of the rows.
        rank: vectors.
    """
    group = _groups(head, max(_SMALL, rank))
    if group is not None:
        mean = np.bincount(head.indices, minlength=head.N) / head.M
        dense = head.take_rows(_first_of(group)).to_dense() - mean
        return _padded(_small_left(dense, group, rank), rank)
    matrix = _matrix(head)
    mean = (np.bincount(head.indices, minlength=head.N) / head.M).astype(np.float32)
    centred = LinearOperator(
        shape=(head.M, head.N),
        dtype=np.float32,
        matvec=lambda x: matrix @ x.ravel() - mean @ x.ravel(),
        rmatvec=lambda y: y.ravel() @ matrix - mean * y.sum(),
    )
    return _leading_left(centred, rank, context)


def fiedler_vector(head: HeadMask, context: OrderContext) -> Float32Array:
    """The Fiedler vector of a connected head's row-overlap graph, float32 ``(M,)``.

    See `spectral`. 0 where all rows are equal (one row, no blocks): every vector would do.
    """
    uses = np.bincount(head.indices, minlength=head.N)
    if ((uses == 0) | (uses == head.M)).all():
        return np.zeros(head.M, dtype=np.float32)
    matrix = _matrix(head)
    degree = matrix @ uses.astype(np.float32)
    scale = (1.0 / np.sqrt(np.maximum(degree, 1.0))).astype(np.float32)
    # D^1/2 1 is the known first left singular vector (value 1); project it out.
    known = (np.sqrt(degree) / np.linalg.norm(np.sqrt(degree))).astype(np.float32)

    def project(y: Float32Array) -> Float32Array:
        return np.asarray(y - known * (known @ y), dtype=np.float32)

    group = _groups(head, _SMALL)
    if group is not None:
        first = _first_of(group)
        dense = scale[first, None] * head.take_rows(first).to_dense()
        deflated = dense - np.outer(known[first], (known[first] * np.bincount(group)) @ dense)
        return np.asarray(scale * _small_left(deflated, group, 1)[:, 0], dtype=np.float32)
    operator = LinearOperator(
        shape=(head.M, head.N),
        dtype=np.float32,
        matvec=lambda x: project(scale * (matrix @ x.ravel())),
        rmatvec=lambda y: (scale * project(y.ravel())) @ matrix,
    )
    return np.asarray(scale * _leading_left(operator, 1, context)[:, 0], dtype=np.float32)


def _leading_left(operator: LinearOperator, rank: int, context: OrderContext) -> Float32Array:
    start = context.rng(Draw.SOLVER).standard_normal(min(operator.shape)).astype(np.float32)
    with single_threaded_blas:
        left, values, _ = svds(operator, k=rank, v0=start, tol=_TOLERANCE, solver="arpack")
    largest_first = np.argsort(-values, kind="stable")
    return np.asarray(left[:, largest_first] * values[largest_first], dtype=np.float32)


def _groups(head: HeadMask, most: int) -> Int32Array | None:
    """Number of each row's group of equal rows, ``(M,)``, where LAPACK should do.

    Rows are their own groups where there are at most so many columns, and None where there are
    more groups, too.
    """
    if most >= head.N:
        return np.arange(head.M, dtype=np.int32)
    group = np.empty(head.M, dtype=np.int32)
    known: dict[bytes, int] = {}
    for i, (start, stop) in enumerate(itertools.pairwise(head.indptr)):
        group[i] = known.setdefault(head.indices[start:stop].tobytes(), len(known))
        if len(known) > most:
            return None
    return group


def _first_of(group: Int32Array) -> Int32Array:
    return np.unique(group, return_index=True)[1].astype(np.int32)


def _small_left(distinct: npt.NDArray[Any], group: Int32Array, rank: int) -> Float32Array:
    """Left singular vectors times values of the matrix that repeats each row for its group."""
    weight = np.sqrt(np.bincount(group))
    with single_threaded_blas:
        left, values, _ = scipy.linalg.svd(weight[:, None] * distinct, full_matrices=False)
    return np.asarray((left * values / weight[:, None])[group, :rank], dtype=np.float32)


def _padded(coordinates: Float32Array, rank: int) -> Float32Array:
    missing = rank - coordinates.shape[1]
    return np.pad(coordinates, ((0, 0), (0, missing))) if missing > 0 else coordinates


def _matrix(head: HeadMask) -> Any:
    """The mask as a float32 matrix: dense where BLAS is then faster, sparse otherwise."""
    if len(head.indices) > _DENSE_FROM * head.M * head.N:
        return head.to_dense().astype(np.float32)
    ones = np.ones(len(head.indices), dtype=np.float32)
    return scipy.sparse.csr_array((ones, head.indices, head.indptr), shape=(head.M, head.N))


def _components(head: HeadMask) -> Int32Array:
    """Connected components of the row-overlap graph: those of the row-column graph."""
    rows_of_entries = np.repeat(np.arange(head.M, dtype=np.int32), head.row_nnz)
    ones, nodes = np.ones(len(head.indices), np.int8), head.M + head.N
    places = (rows_of_entries, head.M + head.indices)
    graph = scipy.sparse.coo_array((ones, places), shape=(nodes, nodes))
    _, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return np.asarray(labels[: head.M], dtype=np.int32)


def turned_to_long(coordinate: Floats, head: HeadMask) -> Floats:
    """A coordinate of arbitrary scale and sign, at most 1 and growing with NNZ.

    Rounded, so that equal rows are equal; 0 where it is.
    """
    largest = float(np.abs(coordinate).max(initial=0.0))
    if largest == 0.0:
        return coordinate
    rounded = np.round(coordinate / largest, _ROUNDING)
    lean = float(rounded.astype(np.float64) @ (head.row_nnz - head.row_nnz.mean()))
    if lean == 0.0:  # no row is longer: turn the largest entry upwards
        lean = float(rounded[np.argmax(np.abs(rounded))])
    return rounded if lean > 0 else -rounded


def descending(coordinate: Floats, head: HeadMask, short_first: bool = False) -> Int32Array:
    """Rows from the end of the coordinate where the long rows are; ties keep natural order.

    Args:
        coordinate: float ``(M,)``.
        head: of the rows.
        short_first: the other way round.
    """
    turned = turned_to_long(coordinate, head)
    return np.argsort(turned if short_first else -turned, kind="stable").astype(np.int32)


def long_rows_first(order: Int32Array, head: HeadMask, short_first: bool = False) -> Int32Array:
    """The order, or its reverse where that has the long rows earlier.

    Args:
        order: slot → row.
        head: of the rows.
        short_first: the other way round.
    """
    nnz = head.row_nnz[order]
    lean = float((nnz - nnz.mean()) @ np.arange(len(order)))  # > 0: long rows late
    return order[::-1] if (lean < 0 if short_first else lean > 0) else order


def hilbert_index(points: Floats) -> npt.NDArray[np.uint64]:
    """Place of each point ``(M, d)`` on the Hilbert curve through the cube around them.

    Skilling 2004 (https://doi.org/10.1063/1.1751381), all points at once; the cube has
    `_CURVE_BITS` bits over all d axes.
    """
    bits = _CURVE_BITS // points.shape[1]
    low = points.min(axis=0)
    width = float((points - low).max(initial=0.0)) or 1.0
    cells = np.floor((points - low) / width * ((1 << bits) - 1) + 0.5).astype(np.uint64)
    axes = list(cells.T)
    one = np.uint64(1)
    for bit in range(bits - 1, 0, -1):  # undo the reflections and exchanges of each level
        inside = np.uint64((1 << bit) - 1)
        for i, axis in enumerate(axes):
            high = (axis >> np.uint64(bit)) & one == one
            exchanged = np.where(high, np.uint64(0), (axes[0] ^ axis) & inside)
            axes[0] = np.where(high, axes[0] ^ inside, axes[0] ^ exchanged)
            if i > 0:
                axes[i] = axis ^ exchanged
    for i in range(1, len(axes)):  # Gray code
        axes[i] = axes[i] ^ axes[i - 1]
    flips = np.zeros(len(points), np.uint64)
    for bit in range(bits - 1, 0, -1):
        high = (axes[-1] >> np.uint64(bit)) & one == one
        flips ^= np.where(high, np.uint64((1 << bit) - 1), np.uint64(0))
    place = np.zeros(len(points), np.uint64)
    for bit in range(bits - 1, -1, -1):
        for axis in axes:
            place = (place << one) | (((axis ^ flips) >> np.uint64(bit)) & one)
    return place
