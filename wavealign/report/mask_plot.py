"""Pictures of block masks (extra `report`): one panel a head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign.masks.block_mask import BlockMask, HeadMask
from wavealign.report.plots import INK, check_plot, new_figure, save

_PIXELS = 480  # of a panel's longer side; larger masks are averaged
_MOST = 16  # panels


def plot_masks(mask: BlockMask, heads: Sequence[int], title: str, path: str | Path) -> None:
    """A panel for each head: dark where blocks are kept, grey where part of a cell is.

    Args:
        mask: the mask; at most 16 of its heads are shown.
        heads: the heads' names, one each.
        title: above the picture.
        path: where to write it; the suffix chooses the format.
    """
    target = check_plot(path)
    shown = min(mask.H, _MOST)
    columns = min(shown, 4)
    lines = math.ceil(shown / columns)
    hidden = f" (first {shown} of {mask.H} heads)" if shown < mask.H else ""
    figure = new_figure(2.6 * columns + 0.3, 2.8 * lines + 0.5, title + hidden)
    axes: Any = figure.subplots(lines, columns, squeeze=False)
    for index, axis in enumerate(axes.flat):
        if index >= shown:
            axis.set_visible(False)
            continue
        head = mask.head(index)
        axis.imshow(
            coverage(head), cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto",
            extent=(0, mask.N, mask.M, 0),
        )  # fmt: skip
        density = len(head.indices) / (mask.M * mask.N)
        axis.set_title(f"head {heads[index]}, density {density:.2f}", fontsize=9, color=INK)
        axis.tick_params(labelsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("query block", fontsize=8)
    save(figure, target)


def coverage(head: HeadMask) -> npt.NDArray[np.float64]:
    """Share of kept blocks in every cell of a picture of at most 480 x 480 cells."""
    rows = np.repeat(np.arange(head.M), head.row_nnz)
    shape = (min(head.M, _PIXELS), min(head.N, _PIXELS))
    columns = head.indices.astype(np.int64)
    kept = np.zeros(shape)
    np.add.at(kept, (rows * shape[0] // head.M, columns * shape[1] // head.N), 1)
    row_sizes = np.bincount(np.arange(head.M) * shape[0] // head.M, minlength=shape[0])
    column_sizes = np.bincount(np.arange(head.N) * shape[1] // head.N, minlength=shape[1])
    return kept / np.outer(row_sizes, column_sizes)
