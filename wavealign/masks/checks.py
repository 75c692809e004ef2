"""Checks of what block masks are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign.errors import InputError

_Int32Array = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]


def zeros_and_ones(array: npt.NDArray[Any], what: str) -> None:
    """Check that an array's non-zero entries are the kept blocks: bool, or only 0 and 1.

    Args:
        array: ``(..., M, N)``.
        what: the array in the words of the error, e.g. ``"'mask'"``.

    Raises:
        InputError: another dtype, or another value.
    """
    if array.dtype == np.bool_:
        return
    if array.dtype.kind not in "iuf":
        raise InputError(f"{what} is {array.dtype}; expected bool (or only zeros and ones).")
    for part in array.reshape(-1, *array.shape[-2:]):
        wrong = part[(part != 0) & (part != 1)]
        if wrong.size:
            raise InputError(
                f"{what} is {array.dtype} and holds {wrong[0]}; expected bool, or only zeros "
                "and ones. Threshold scores first, e.g. scores > cutoff."
            )


def outside(values: npt.NDArray[Any], limit: int) -> int | None:
    """A value that doesn't lie in 0 to `limit` - 1; None where all do."""
    if not values.size or (values.min() >= 0 and values.max() < limit):
        return None
    return int(values.min() if values.min() < 0 else values.max())


def block_pair(block: tuple[int, int]) -> tuple[int, int]:
    """A block size, if it is two sizes.

    Raises:
        InputError: it isn't, e.g. one number.
    """
    if not isinstance(block, Sequence) or len(block) != 2:
        raise InputError(
            f"block is {block!r}; expected tokens per query block and per K/V block, "
            "e.g. (128, 64)."
        )
    return block


def check_pointers(indptr: _Int64Array, nnz: int, rows: int) -> None:
    """Check CSR row pointers ``(rows + 1,)`` of `nnz` entries.

    Args:
        indptr: the pointers.
        nnz: entries that they point into.
        rows: H*M.

    Raises:
        InputError: another shape, a first or last pointer that is off, or pointers that fall.
    """
    if indptr.shape != (rows + 1,):
        raise InputError(
            f"indptr has shape {indptr.shape}; expected ({rows + 1},): one more than H*M rows."
        )
    if indptr[0] != 0 or indptr[-1] != nnz:
        raise InputError(
            f"indptr runs from {indptr[0]} to {indptr[-1]}; expected 0 to {nnz}, the number of "
            "indices."
        )
    steps = np.diff(indptr)
    if steps.size and steps.min() < 0:
        row = int(np.argmax(steps < 0))
        raise InputError(
            f"indptr is not sorted: it falls from {indptr[row]} to {indptr[row + 1]} at row {row}."
        )


def check_csr(indptr: _Int64Array, indices: _Int32Array, rows: int, columns: int) -> None:
    """Check CSR lists: blocks that exist, ascending inside a row, none twice.

    Args:
        indptr: pointers ``(rows + 1,)``.
        indices: K/V blocks.
        rows, columns: H*M and N.

    Raises:
        InputError: what is wrong, and where.
    """
    check_pointers(indptr, len(indices), rows)
    if outside(indices, columns) is not None:
        raise InputError(f"indices must lie in 0 to {columns - 1}.")
    falls = _falls(indptr, indices)
    if falls.size:
        row = int(np.searchsorted(indptr, falls[0] + 1, side="right")) - 1
        raise InputError(
            f"row {row} lists K/V block {indices[falls[0] + 1]} twice or out of order; expected "
            "ascending, unique blocks."
        )


def _falls(indptr: _Int64Array, indices: _Int32Array) -> _Int64Array:
    """Positions whose successor, inside the same row, isn't larger."""
    falls = np.flatnonzero(indices[1:] <= indices[:-1])
    # A fall from the last entry of a row to the first of a later one is no fault.
    return falls[~np.isin(falls + 1, indptr)] if falls.size else falls


def sort_rows(indptr: _Int64Array, indices: _Int32Array) -> _Int32Array:
    """The lists with every row ascending."""
    if not _falls(indptr, indices).size:
        return indices
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return indices[np.lexsort((indices, rows))]
