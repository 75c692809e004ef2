"""Row orders from a truncated factorisation of the mask: `svd`, `nnz-bucket+svd`, `spectral`.

All of them apply the mask as an operator (scipy sparse) and let ARPACK find one singular
vector; nothing of size M x M is ever formed.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg
import scipy.sparse
from scipy.sparse.linalg import LinearOperator, svds
from threadpoolctl import threadpool_limits

from wavealign.masks.block_mask import HeadMask, Int32Array
from wavealign.order import rows
from wavealign.order.context import Draw, OrderContext

Float32Array = npt.NDArray[np.float32]

BUCKET_WAVES = 2
"""Waves per NNZ bucket of `nnz-bucket+svd`: two did best or nearly so on content masks."""

_SMALL = 8  # below this many rows or columns, LAPACK on the dense (thin) matrix
_TOLERANCE = 1e-2  # of svds; gives the vector to cos > .99999 also without a spectral gap
_DENSE_FROM = 0.2  # density from which a dense product beats a sparse one
_ROUNDING = 5  # digits of a coordinate that are signal in float32; equal rows stay equal


def svd(head: HeadMask, context: OrderContext) -> Int32Array:
    """Sort by the leading scaled left singular vector of the column-centred mask.

    Stage 1 of the WaveAlign paper (section IV-C). The sign of a singular vector is arbitrary:
    it is turned so that it grows with NNZ, and the order runs from its large end.
    """
    coordinates = singular_coordinates(head, 1, context)
    return _descending(coordinates[:, 0], head)


def nnz_bucket_svd(head: HeadMask, context: OrderContext) -> Int32Array:
    """NNZ descending, cut into buckets of `BUCKET_WAVES` waves, `svd` order inside each."""
    by_nnz = rows.nnz(head, context)
    size = BUCKET_WAVES * context.wave
    parts = []
    for first in range(0, head.M, size):
        bucket = by_nnz[first : first + size]
        parts.append(bucket[svd(head.take_rows(bucket), context)])
    return np.concatenate(parts)


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
        parts.append(members[_descending(fiedler_vector(part, context), part)])
    order = np.concatenate(parts)
    return order[np.argsort(row_nnz[order] == 0, kind="stable")]


def singular_coordinates(head: HeadMask, rank: int, context: OrderContext) -> Float32Array:
    """Leading left singular vectors of the column-centred mask times their singular values.

    float32 ``(M, rank)``, largest first: the best rank-`rank` Euclidean embedding of the rows
    (Eckart-Young). Columns beyond the mask's rank are 0. Signs are arbitrary.
    """
    if min(head.M, head.N) <= max(_SMALL, rank):
        dense = head.to_dense().astype(np.float32)
        return _padded(_small_left(dense - dense.mean(axis=0), rank), rank)
    if _rows_are_equal(head):  # nothing is left after centring, and ARPACK wants something
        return np.zeros((head.M, rank), dtype=np.float32)
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
    if _rows_are_equal(head):
        return np.zeros(head.M, dtype=np.float32)
    matrix = _matrix(head)
    degree = matrix @ np.bincount(head.indices, minlength=head.N).astype(np.float32)
    scale = (1.0 / np.sqrt(np.maximum(degree, 1.0))).astype(np.float32)
    # D^1/2 1 is the known first left singular vector (value 1); project it out.
    known = (np.sqrt(degree) / np.linalg.norm(np.sqrt(degree))).astype(np.float32)

    def project(y: Float32Array) -> Float32Array:
        return np.asarray(y - known * (known @ y), dtype=np.float32)

    if min(head.M, head.N) <= _SMALL:
        dense = scale[:, None] * head.to_dense()
        deflated = dense - np.outer(known, known @ dense)
        return np.asarray(scale * _small_left(deflated, 1)[:, 0], dtype=np.float32)
    operator = LinearOperator(
        shape=(head.M, head.N),
        dtype=np.float32,
        matvec=lambda x: project(scale * (matrix @ x.ravel())),
        rmatvec=lambda y: (scale * project(y.ravel())) @ matrix,
    )
    return np.asarray(scale * _leading_left(operator, 1, context)[:, 0], dtype=np.float32)


class _SingleThreadedBlas:
    """One BLAS thread while any thread of ours is inside.

    Results must not depend on the number of cores, and heads already run in parallel. The
    limit is the process's, so the first to enter sets it and the last to leave lifts it. Both
    happen in one thread of its own: threadpoolctl silently ignores a thread other than the one
    that set a limit last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._setter = ThreadPoolExecutor(1, thread_name_prefix="blas-limit")
        self._inside = 0
        self._limits: threadpool_limits | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._limits = self._setter.submit(threadpool_limits, limits=1).result()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._limits is not None:
                self._setter.submit(self._limits.restore_original_limits).result()


_single_threaded_blas = _SingleThreadedBlas()


def _leading_left(operator: LinearOperator, rank: int, context: OrderContext) -> Float32Array:
    start = context.rng(Draw.SOLVER).standard_normal(min(operator.shape)).astype(np.float32)
    with _single_threaded_blas:
        left, values, _ = svds(operator, k=rank, v0=start, tol=_TOLERANCE, solver="arpack")
    largest_first = np.argsort(-values, kind="stable")
    return np.asarray(left[:, largest_first] * values[largest_first], dtype=np.float32)


def _small_left(dense: npt.NDArray[Any], rank: int) -> Float32Array:
    with _single_threaded_blas:
        left, values, _ = scipy.linalg.svd(dense, full_matrices=False)
    return np.asarray((left * values)[:, :rank], dtype=np.float32)


def _padded(coordinates: Float32Array, rank: int) -> Float32Array:
    missing = rank - coordinates.shape[1]
    if missing <= 0:
        return coordinates
    zeros = np.zeros((len(coordinates), missing), dtype=np.float32)
    return np.concatenate([coordinates, zeros], axis=1)


def _rows_are_equal(head: HeadMask) -> bool:
    uses = np.bincount(head.indices, minlength=head.N)
    return bool(((uses == 0) | (uses == head.M)).all())


def _matrix(head: HeadMask) -> Any:
    """The mask as a float32 matrix: dense where BLAS is then faster, sparse otherwise."""
    if len(head.indices) > _DENSE_FROM * head.M * head.N:
        return head.to_dense().astype(np.float32)
    ones = np.ones(len(head.indices), dtype=np.float32)
    return scipy.sparse.csr_array((ones, head.indices, head.indptr), shape=(head.M, head.N))


def _components(head: HeadMask) -> Int32Array:
    """Connected components of the row-overlap graph: those of the row-column graph."""
    rows_of_entries = np.repeat(np.arange(head.M, dtype=np.int32), head.row_nnz)
    nodes = head.M + head.N
    graph = scipy.sparse.coo_array(
        (np.ones(len(head.indices), np.int8), (rows_of_entries, head.M + head.indices)),
        shape=(nodes, nodes),
    )
    _, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return np.asarray(labels[: head.M], dtype=np.int32)


def _descending(coordinate: Float32Array, head: HeadMask) -> Int32Array:
    """Rows from the end of the coordinate where the long rows are; ties keep natural order."""
    largest = float(np.abs(coordinate).max(initial=0.0))
    if largest == 0.0:
        return np.arange(head.M, dtype=np.int32)
    rounded = np.round(coordinate / largest, _ROUNDING)
    lean = float(rounded.astype(np.float64) @ (head.row_nnz - head.row_nnz.mean()))
    if lean == 0.0:  # no row is longer: turn the largest entry upwards
        lean = float(rounded[np.argmax(np.abs(rounded))])
    return np.argsort(-rounded if lean > 0 else rounded, kind="stable").astype(np.int32)
