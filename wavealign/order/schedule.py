"""A schedule: the row order and the visit order of every head of a mask, and its file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from wavealign.errors import InputError, said_of
from wavealign.masks.block_mask import BlockMask, HeadMask, Int32Array, Int64Array, row_pointers
from wavealign.masks.checks import check_pointers, outside
from wavealign.npz import ArrayFile, NpzFile, save_npz

SCHEDULE_SCHEMA = "wavealign.schedule/1"

AnyInt = TypeVar("AnyInt", bound=np.integer[Any])


@dataclass(frozen=True, eq=False)
class Schedule:
    """Everything needed to execute or simulate the rows of a mask.

    Attributes:
        row_order: int32 ``(H, M)``, slot in launch order → query block.
        indptr: int64 ``(H * M + 1,)``, rows by head and query block (not by slot).
        indices: int32 ``(nnz,)``, each row's K/V blocks in the order they are visited.
        shape: ``(H, M, N)``.
        policy: the recipe that made it.

    Example:
        >>> import numpy as np
        >>> import wavealign as wa
        >>> mask = wa.BlockMask.from_dense(np.tri(4))
        >>> longest_first = np.array([[3, 2, 1, 0]], np.int32)
        >>> mine = wa.Schedule(longest_first, mask.indptr, mask.indices, mask.shape, "mine")
        >>> mine.check(mask)
        >>> wa.simulate(mask, mine).policy
        'mine'
    """

    row_order: Int32Array
    indptr: Int64Array
    indices: Int32Array
    shape: tuple[int, int, int]
    policy: str

    def check(self, mask: BlockMask) -> None:
        """Raise unless this schedule runs exactly the blocks of `mask`, each row once.

        Raises:
            InputError: another mask's shape, a row order that isn't a permutation, a row that
                drops, adds or repeats a K/V block.
        """
        if self.shape != mask.shape:
            raise InputError(
                f"the schedule is for a mask [H, M, N] = {list(self.shape)}, this mask is "
                f"{list(mask.shape)}."
            )
        if self.row_order.shape != (mask.H, mask.M):
            raise InputError(
                f"row_order has shape {list(self.row_order.shape)}; expected "
                f"{[mask.H, mask.M]} (slot → query block, per head)."
            )
        for h in range(mask.H):
            order = self.row_order[h]
            if not np.array_equal(np.sort(order), np.arange(mask.M)):
                raise InputError(
                    f"row_order of head {h} is not a permutation of query blocks 0 to "
                    f"{mask.M - 1}: {_first_fault(order, mask.M)}."
                )
        if self.indptr.shape != mask.indptr.shape or not np.array_equal(self.indptr, mask.indptr):
            raise InputError(
                "the schedule's rows don't have the lengths of the mask's rows."
                + (_first_length_fault(self.indptr, mask))
            )
        if self.indices.shape != mask.indices.shape:
            raise InputError(
                f"the schedule lists {len(self.indices)} K/V blocks, the mask keeps {mask.nnz}."
            )
        for h in range(mask.H):
            _check_blocks(self.head_lists(h), mask.head(h), h)

    def head_lists(self, h: int) -> HeadMask:
        """The visiting lists of head `h`, as a view."""
        _, M, N = self.shape
        pointers = self.indptr[h * M : (h + 1) * M + 1]
        return HeadMask(pointers - pointers[0], self.indices[pointers[0] : pointers[-1]], M, N)

    def select_heads(self, heads: Sequence[int]) -> Schedule:
        """The schedule of only these heads, in this order."""
        _, M, N = self.shape
        lists = [self.head_lists(h) for h in heads]
        return Schedule(
            self.row_order[list(heads)],
            row_pointers(np.concatenate([part.row_nnz for part in lists])),
            np.concatenate([part.indices for part in lists]), (len(lists), M, N), self.policy,
        )  # fmt: skip

    def ragged_kv_first(self, mask: BlockMask) -> Schedule:
        """This schedule, with rows that hold a ragged last K/V block visiting it first.

        Some kernels mask keys out of range in the first block that they visit only. The other
        blocks keep their order; without a ragged block nothing changes.
        """
        return self if mask.tokens_kv % mask.block_kv == 0 else self.last_kv_first()

    def last_kv_first(self) -> Schedule:
        """This schedule, with rows that hold the last K/V block visiting it first."""
        last = self.shape[2] - 1
        indices = self.indices.copy()
        places = np.flatnonzero(indices == last)
        rows = np.searchsorted(self.indptr, places, side="right") - 1
        for begin, place in zip(self.indptr[rows], places, strict=True):
            indices[begin + 1 : place + 1] = self.indices[begin:place]
            indices[begin] = last
        return Schedule(self.row_order, self.indptr, indices, self.shape, self.policy)

    def save(self, path: str | Path) -> None:
        """Write the schedule (``wavealign.schedule/1``), whole or not at all.

        Raises:
            InputError: the path can't be written.
        """
        save_npz(
            path,
            {
                "schema": SCHEDULE_SCHEMA,
                "row_order": self.row_order,
                "indptr": self.indptr,
                "indices": self.indices,
                "shape": np.asarray(self.shape, dtype=np.int64),
                "policy": self.policy,
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a schedule file; `check` it against its mask before use.

        Raises:
            InputError: the file isn't a schedule.
        """
        with NpzFile(path) as file:
            if "schema" not in file or file.text("schema") != SCHEDULE_SCHEMA:
                found = f"'{file.text('schema')}'" if "schema" in file else "no schema"
                raise file.error(f"has {found}; expected a schedule, schema '{SCHEDULE_SCHEMA}'.")
            H, M, N = file.integers("shape", 3)
            row_order = read_numbers(file, "row_order", (H, M), M)
            indices = read_numbers(file, "indices", (None,), N)
            indptr = read_numbers(file, "indptr", (H * M + 1,), len(indices) + 1, np.int64)
            with file.blamed():
                check_pointers(indptr, len(indices), H * M)
            return cls(row_order, indptr, indices, (H, M, N), file.text("policy"))

    @classmethod
    def fitting(cls, path: str | Path, mask: BlockMask, heads: Sequence[int] | None) -> Schedule:
        """A schedule file for these heads of its mask, named after the file and its recipe.

        Args:
            path: of the file, which may hold more heads than run.
            mask: the heads that run.
            heads: their indices in the file; None where all of the file's run.

        Raises:
            InputError: the file isn't a schedule, or not one of this mask.
        """
        whole = schedule = cls.load(path)
        with said_of(path):
            if heads is not None and max(heads) < whole.shape[0]:
                schedule = whole.select_heads(heads)
            try:
                schedule.check(mask)
            except InputError as problem:
                try:  # it may be of these heads alone, in their order: `order --heads 1,0`
                    whole.check(mask)
                except InputError:
                    raise problem from None
                schedule = whole
        return dataclasses.replace(schedule, policy=f"{Path(path).name} ({schedule.policy})")


def read_numbers(
    file: ArrayFile, name: str, shape: tuple[int | None, ...], limit: int, kind: Any = np.int32
) -> npt.NDArray[Any]:
    """An array of a file as indices of query blocks, K/V blocks or entries.

    Args:
        file: whose array it is.
        name: of the array.
        shape: that it has; None for any length.
        limit: above all of its numbers, which begin at 0.
        kind: the dtype to return.

    Raises:
        InputError: another shape or dtype, or a number outside.
    """
    array = file.array(name)
    if array.dtype.kind not in "iu":
        raise file.error(f"'{name}' is {array.dtype}; expected whole numbers.")
    wanted = [have if n is None else n for n, have in zip(shape, array.shape, strict=False)]
    if array.ndim != len(shape) or wanted != list(array.shape):
        sizes = ", ".join("any" if n is None else str(n) for n in shape)
        raise file.error(f"'{name}' has shape {list(array.shape)}; expected [{sizes}].")
    if (wrong := outside(array, min(limit, np.iinfo(kind).max))) is not None:
        raise file.error(f"'{name}' holds {wrong}, beyond any block index: 0 to {limit - 1}.")
    return array.astype(kind, copy=False)


def inverse(permutation: npt.NDArray[AnyInt]) -> npt.NDArray[AnyInt]:
    """Where each entry stands: of a row order query block → slot, of a K/V order block → place."""
    places = np.empty_like(permutation)
    places[permutation] = np.arange(len(permutation), dtype=permutation.dtype)
    return places


def _first_fault(order: Int32Array, M: int) -> str:
    outside = order[(order < 0) | (order >= M)]
    if outside.size:
        return f"it names query block {outside[0]}"
    counts = np.bincount(order, minlength=M)
    return f"query block {int(np.argmax(counts > 1))} is named twice"


def _first_length_fault(indptr: Int64Array, mask: BlockMask) -> str:
    if indptr.shape != mask.indptr.shape:
        return f" It has {len(indptr) - 1} rows, the mask {mask.H * mask.M}."
    row = int(np.argmax(np.diff(indptr) != np.diff(mask.indptr)))
    return (
        f" Head {row // mask.M}, query block {row % mask.M}: {np.diff(indptr)[row]} instead of "
        f"{np.diff(mask.indptr)[row]} K/V blocks."
    )


def _check_blocks(lists: HeadMask, head: HeadMask, h: int) -> None:
    if lists.indices.size and (lists.indices.min() < 0 or lists.indices.max() >= head.N):
        raise InputError(f"head {h}: a K/V block lies outside 0 to {head.N - 1}.")
    wrong = np.flatnonzero((lists.to_dense() != head.to_dense()).any(axis=1))
    if wrong.size:
        raise InputError(
            f"head {h}, query block {wrong[0]}: the schedule drops, adds or repeats a K/V block "
            "of the mask."
        )
