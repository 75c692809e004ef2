"""From a schedule to the arrays that a kernel reads: rows as launched, lists as walked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wavealign.gpu.capabilities import Capabilities
from wavealign.masks.block_mask import BlockMask, HeadMask, Int32Array, Int64Array
from wavealign.order.schedule import Schedule


@dataclass(frozen=True, eq=False)
class KernelLists:
    """A schedule in one backend's convention, rows by slot, or by query block and a table.

    Attributes:
        counts: int32 ``(H, M)``, K/V blocks of each row.
        indptr: int64 ``(H * M + 1,)``, where each row's list begins.
        indices: int32 ``(nnz,)``, lists in memory order: a kernel that walks backwards reads
            each from its end.
        table: int32 ``(H, M)``, slot → query block, where rows are stored by query block; None
            where they are stored by slot.
    """

    counts: Int32Array
    indptr: Int64Array
    indices: Int32Array
    table: Int32Array | None

    def padded(self, width: int | None = None) -> Int32Array:
        """The lists as int32 ``(H, M, width)``, unused places 0; by default as wide as needed."""
        H, M = self.counts.shape
        width = max(1, int(self.counts.max())) if width is None else width
        lists = np.zeros((H * M, width), dtype=np.int32)
        rows = np.repeat(np.arange(H * M), self.counts.ravel())
        places = np.arange(len(self.indices)) - np.repeat(self.indptr[:-1], self.counts.ravel())
        lists[rows, places] = self.indices
        return lists.reshape(H, M, width)


def as_executed(schedule: Schedule, mask: BlockMask, capabilities: Capabilities) -> Schedule:
    """The schedule that a backend really runs: the same but for what its kernel insists on."""
    return schedule.ragged_kv_first(mask) if capabilities.ragged_kv_first else schedule


def kernel_lists(schedule: Schedule, capabilities: Capabilities) -> KernelLists:
    """A schedule (see `as_executed`) in the backend's list convention."""
    H, M, N = schedule.shape
    indptr, indices = schedule.indptr, schedule.indices
    if capabilities.rows == "gathered":
        rows = (schedule.row_order + M * np.arange(H, dtype=np.int64)[:, None]).ravel()
        taken = HeadMask(indptr, indices, H * M, N).take_rows(rows)
        indptr, indices = taken.indptr, taken.indices
    if capabilities.walks == "backwards":
        indices = _reversed(indptr, indices)
    counts = np.diff(indptr).astype(np.int32).reshape(H, M)
    table = schedule.row_order if capabilities.rows == "table" else None
    return KernelLists(counts, indptr, indices, table)


def resident(schedule: Schedule, blocks: int) -> Schedule:
    """The compute limit's schedule: the same rows and lengths, K/V folded into `blocks` blocks.

    It repeats blocks, so its output is no attention; only its time is of interest. With few
    enough blocks every read but the first few hits L2.
    """
    folded = (schedule.indices % min(blocks, max(1, schedule.shape[2] - 1))).astype(np.int32)
    return Schedule(
        schedule.row_order, schedule.indptr, folded, schedule.shape, f"{schedule.policy} in L2"
    )


def _reversed(indptr: Int64Array, indices: Int32Array) -> Int32Array:
    counts = np.diff(indptr)
    places = np.arange(len(indices))
    mirrored = np.repeat(indptr[:-1] + indptr[1:] - 1, counts) - places
    return indices[mirrored]
