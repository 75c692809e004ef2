"""What a mask looks like to the cache: density, row lengths, overlap, working set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wavealign.masks.block_mask import BlockMask, HeadMask, Int64Array


@dataclass(frozen=True)
class MaskStats:
    """Statistics of one head, or of all heads together.

    Attributes:
        head: head index, or None for all heads.
        density: kept blocks / all blocks.
        nnz: kept blocks.
        row_nnz_mean: mean K/V blocks per row.
        row_nnz_spread: standard deviation of the K/V blocks per row / their mean (population;
            0 where the mean is 0). For all heads: over all their rows.
        row_nnz_min: shortest row.
        row_nnz_max: longest row.
        empty_rows: rows without a K/V block.
        empty_heads: heads without a K/V block.
        neighbour_overlap: mean Jaccard overlap of rows i and i+1 of a head,
            shared blocks / blocks of either, over pairs that aren't both empty; None where
            no such pair exists.
        working_set_blocks: distinct K/V blocks that the head reads; for all heads, of the
            largest one, since heads run one after the other.
    """

    head: int | None
    density: float
    nnz: int
    row_nnz_mean: float
    row_nnz_spread: float
    row_nnz_min: int
    row_nnz_max: int
    empty_rows: int
    empty_heads: int
    neighbour_overlap: float | None
    working_set_blocks: int

    def working_set_bytes(self, kv_block_bytes: int) -> int:
        """The working set in bytes, at `kv_block_bytes` for K and V of a full block."""
        return self.working_set_blocks * kv_block_bytes


def mask_stats(mask: BlockMask) -> tuple[MaskStats, list[MaskStats]]:
    """Statistics over all heads, and of each head.

    Example:
        >>> import numpy as np
        >>> import wavealign as wa
        >>> whole, per_head = wa.mask_stats(wa.BlockMask.from_dense(np.tri(4)))
        >>> whole.density, whole.row_nnz_min, whole.row_nnz_max, per_head[0].working_set_blocks
        (0.625, 1, 4, 4)
    """
    touched, _ = mask.touched_kv_blocks
    rows = np.diff(mask.indptr).reshape(mask.H, mask.M)
    overlaps = [_neighbour_overlap(head) for head in mask.heads()]
    one_by_one = [slice(h, h + 1) for h in range(mask.H)]
    return _stats(None, mask.N, rows, overlaps, touched), [
        _stats(h, mask.N, rows[own], overlaps[own], touched[own])
        for h, own in enumerate(one_by_one)
    ]


def _stats(
    head: int | None,
    columns: int,
    row_nnz: Int64Array,
    overlaps: Sequence[tuple[float, int]],
    touched: Int64Array,
) -> MaskStats:
    """Of some heads: their rows' lengths ``(heads, M)``, overlaps and distinct K/V blocks."""
    overlap_sum, overlap_pairs = np.sum(overlaps, axis=0)
    mean = float(row_nnz.mean())
    return MaskStats(
        head=head, density=mean / columns, nnz=int(row_nnz.sum()), row_nnz_mean=mean,
        row_nnz_spread=float(row_nnz.std()) / mean if mean else 0.0, row_nnz_min=int(row_nnz.min()),
        row_nnz_max=int(row_nnz.max()), empty_rows=int(np.count_nonzero(row_nnz == 0)),
        empty_heads=int(np.count_nonzero(row_nnz.sum(axis=1) == 0)),
        neighbour_overlap=float(overlap_sum / overlap_pairs) if overlap_pairs else None,
        working_set_blocks=int(touched.max()),
    )  # fmt: skip


def _neighbour_overlap(head: HeadMask) -> tuple[float, int]:
    """Sum of the Jaccard overlaps of adjacent rows, and the number of pairs counted."""
    packed = np.packbits(head.to_dense(), axis=-1)
    shared = np.bitwise_count(packed[:-1] & packed[1:]).sum(axis=-1, dtype=np.int64)
    either = head.row_nnz[:-1] + head.row_nnz[1:] - shared
    counted = either > 0
    return float((shared[counted] / either[counted]).sum()), int(np.count_nonzero(counted))
