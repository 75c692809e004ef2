"""Row orders from a graph of similar rows: reverse Cuthill-McKee and METIS partitions.

Both look at the k nearest neighbours of each row in the coordinates of `svd`: the full
row-overlap graph of a mask is nearly complete, and orders nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.spatial import cKDTree

from wavealign._extras import require
from wavealign._locks import ForkSafeLock
from wavealign.masks.block_mask import HeadMask, Int32Array
from wavealign.order.context import Draw, OrderContext
from wavealign.order.schedule import inverse
from wavealign.order.spectra import long_rows_first, singular_coordinates

_metis_lock = ForkSafeLock()  # its random numbers are the process's


def rcm(head: HeadMask, context: OrderContext, neighbours: int, rank: int) -> Int32Array:
    """Reverse Cuthill-McKee order of the neighbour graph, from the end with the longer rows.

    Cuthill & McKee 1969 (https://doi.org/10.1145/800195.805928), by scipy: breadth first, so that
    neighbours are few slots apart.

    Args:
        head, context, neighbours, rank: see `neighbour_graph`.
    """
    graph = neighbour_graph(head, neighbours, rank, context)
    order = np.asarray(reverse_cuthill_mckee(graph, symmetric_mode=True), dtype=np.int32)
    return long_rows_first(order, head)


def metis(head: HeadMask, context: OrderContext, neighbours: int, rank: int) -> Int32Array:
    """Cut the neighbour graph into parts of about a wave, fewest edges between them.

    Multilevel recursive bisection by METIS (Karypis & Kumar 1998,
    https://doi.org/10.1137/S1064827595287997), parts with the longer rows first.

    Args:
        head, context, neighbours, rank: see `neighbour_graph`.

    Raises:
        MissingCapabilityError: the extra `orders` isn't installed.
    """
    pymetis = require("pymetis", "orders", "the row order 'metis'")
    parts = min(-(-head.M // context.wave), head.M // 2)
    if parts < 2:
        return np.arange(head.M, dtype=np.int32)
    graph = neighbour_graph(head, neighbours, rank, context)
    seed = int(context.rng(Draw.SOLVER).integers(2**31))
    with _metis_lock.lock:
        _, labels = pymetis.part_graph(
            parts, pymetis.CSRAdjacency(graph.indptr, graph.indices), recursive=True,
            options=pymetis.Options(seed=seed, ufactor=1),
        )  # fmt: skip
    label = np.asarray(labels, dtype=np.int64)
    size = np.bincount(label, minlength=parts)
    mean_nnz = np.bincount(label, weights=head.row_nnz, minlength=parts) / np.maximum(size, 1)
    place = inverse(np.argsort(-mean_nnz, kind="stable"))
    return np.argsort(place[label], kind="stable").astype(np.int32)


def neighbour_graph(head: HeadMask, neighbours: int, rank: int, context: OrderContext) -> Any:
    """Rows joined to their nearest neighbours, either way: a symmetric csr matrix ``(M, M)``.

    Args:
        head, context: of the rows.
        neighbours: of each row.
        rank: coordinates of a row, in which nearest is meant.
    """
    points = singular_coordinates(head, rank, context)
    count = min(neighbours + 1, head.M)
    _, nearest = cKDTree(points).query(points, k=[*range(1, count + 1)])
    rows = np.repeat(np.arange(head.M, dtype=np.int32), count)
    columns = nearest.ravel().astype(np.int32)
    other = rows != columns
    ones = np.ones(int(other.sum()), dtype=np.int8)
    directed = scipy.sparse.csr_array((ones, (rows[other], columns[other])), shape=(head.M, head.M))
    graph = directed.maximum(directed.T).tocsr()
    graph.sort_indices()
    graph.indptr = graph.indptr.astype(np.int32)
    graph.indices = graph.indices.astype(np.int32)
    return graph
