"""Triton kernel: top-p of rows of scores without sorting them."""

# triton.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from wavealign._devices import on_device

MOST_COLUMNS = 16384


@triton.jit(
    do_not_specialize=[
        "share_bits", "columns", "kept_columns", "rows_per_head", "row_tiles", "first_tile",
    ]
)  # fmt: skip
def _top_p_rows(
    scores, keep, share_bits, columns, kept_columns, rows_per_head, row_tiles, first_tile,
    PER_TILE: tl.constexpr, INCLUSIVE: tl.constexpr, FORCED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program a row: bisection over the bits of a float for the score that crosses the share.

    scores float32 ``[tiles * PER_TILE, columns]``, not negative; keep uint8
    ``[heads, rows_per_head, kept_columns]``. Sums are float64; equal scores go to the lower index.
    """
    program = tl.program_id(0)
    tile = first_tile + program // PER_TILE
    head = (tile // row_tiles).to(tl.int64)
    row = tile % row_tiles * PER_TILE + program % PER_TILE
    if row < rows_per_head:
        lanes = tl.arange(0, LANES)
        inside = lanes < columns
        values = tl.load(scores + program.to(tl.int64) * columns + lanes, mask=inside, other=0.0)
        bits = tl.where(inside, values.to(tl.int32, bitcast=True), -1)
        values = values.to(tl.float64)
        wanted = tl.sum(values, 0) * share_bits.to(tl.float64, bitcast=True)
        # The lowest score whose larger ones don't fill the share: non-negative floats sort as ints.
        low = -1
        high = tl.maximum(tl.max(bits, 0), 0)
        while high - low > 1:
            middle = low + (high - low) // 2
            above = tl.sum(tl.where(bits > middle, values, 0.0), 0)
            fits = above < wanted if INCLUSIVE else above <= wanted
            low = tl.where(fits, low, middle)
            high = tl.where(fits, middle, high)
        above = tl.sum(tl.where(bits > high, values, 0.0), 0)
        equal = bits == high
        before = tl.cumsum(equal.to(tl.int32), 0)
        crossing = high.to(tl.float32, bitcast=True).to(tl.float64)
        if INCLUSIVE:
            chosen = above + (before - 1).to(tl.float64) * crossing < wanted
        else:
            chosen = above + before.to(tl.float64) * crossing <= wanted
        chosen = (bits > high) | (equal & chosen) | (lanes == tl.argmax(bits, 0))
        if FORCED:
            rejected = tl.sum((chosen & inside).to(tl.int32), 0) < columns
            chosen = chosen | ((lanes == 0) & rejected)
        target = keep + (head * rows_per_head + row) * kept_columns
        tl.store(target + lanes, chosen.to(tl.uint8), mask=lanes < kept_columns)


def launch_top_p(
    scores: torch.Tensor,
    keep: torch.Tensor,
    share: float,
    convention: str,
    *,
    forced_column: bool = False,
    first_tile: int = 0,
    row_tiles: int | None = None,
    per_tile: int = 1,
) -> None:
    """`top_p` (wavealign.methods.select) on a GPU.

    Args:
        scores: float32 ``(R, N')``, contiguous: rows in tiles of `per_tile`, from `first_tile` on.
        keep: bool ``(H, M, N)``, contiguous, written; N up to N', columns behind N are dropped.
        share, convention: see `top_p`.
        forced_column: keep column 0 in every row that rejects anything.
        first_tile: counted over all heads.
        row_tiles: tiles a head; the last may hold rows past M, which are left out.
        per_tile: rows a tile.
    """
    rows, columns = scores.shape
    lanes = max(16, triton.next_power_of_2(columns))
    with on_device(scores):
        _top_p_rows[(rows,)](
            scores, keep.view(torch.uint8), struct.unpack("<q", struct.pack("<d", share))[0],
            columns, keep.shape[2], keep.shape[1], row_tiles or keep.shape[1], first_tile,
            PER_TILE=per_tile, INCLUSIVE=convention == "inclusive", FORCED=forced_column,
            LANES=lanes, num_warps=min(16, max(1, lanes // 512)),
        )  # fmt: skip
