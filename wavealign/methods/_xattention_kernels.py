"""Triton kernels of XAttention: block scores from Q and K, no product of cells in memory.

One program multiplies a tile of cell rows with a tile of cells (contraction S·D, float32 sums) and
leaves, for each cell row and K/V block, log2 of the block's sum of exponentials. A second kernel
turns these into shares of the row and adds up the rows of a query block. Between the two lie
``rows · N`` floats, so heads are worked through in chunks of row tiles.
"""

# triton.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from wavealign._devices import on_device

SCRATCH_BYTES = 2**30
_LANES = 4096  # elements that _block_scores holds at once
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tile:
    """How a program multiplies.

    Attributes:
        rows: cell rows, a power of two.
        cells: cells, a power of two.
        depth: elements of the contraction a step, at most.
        warps, stages: as Triton means them.
        ctas_per_sm: programs that fit on an SM; a chunk is a multiple of what the GPU runs at once.
        tma: load through tensor descriptors where Q and K allow it.
    """

    rows: int = 128
    cells: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    ctas_per_sm: int = 1
    tma: bool = True


HOPPER = Tile()
OLDER = Tile(rows=128, cells=128, warps=8, stages=2, tma=False)


def default_tile(device: torch.device) -> Tile:
    """A tile that fits the GPU's shared memory."""
    return HOPPER if torch.cuda.get_device_capability(device)[0] in (9, 10) else OLDER


@dataclass(frozen=True)
class Shape:
    """What the kernels have to know of a problem, in tokens, cells and blocks.

    Attributes:
        stride: S, tokens a cell.
        per_block: cells a block, a power of two.
        cells: true cells, ``ceil(L / S)``.
        blocks: true blocks, ``ceil(L / block)``.
        columns: blocks with the padding, N'.
        padded_keys: whether the keys of the padding take softmax mass.
        scale: of the product of two cells.
    """

    stride: int
    per_block: int
    cells: int
    blocks: int
    columns: int
    padded_keys: bool
    scale: float

    @property
    def held_cells(self) -> int:
        """Cells of the true blocks."""
        return self.blocks * self.per_block

    @property
    def key_limit(self) -> int:
        """Cells of the true blocks that take softmax mass."""
        return self.held_cells if self.padded_keys else self.cells

    def fits(self, tile: Tile) -> bool:
        """Whether blocks divide the tiles."""
        power = self.per_block & (self.per_block - 1) == 0
        return power and self.per_block <= min(tile.rows, tile.cells)


# Lengths and counts change from call to call; what they divide by is worth no compilation.
_SIZES = [
    "tokens", "key_limit", "heads", "group", "first_tile", "tiles", "row_tiles", "column_tiles",
    "width", "true_cells", "blocks", "columns",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def _partial_sums(
    q, k, partials,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t,
    tokens, key_limit, heads, group, first_tile, tiles, row_tiles, column_tiles, width, scale_log2,
    S: tl.constexpr, D: tl.constexpr, PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, CELLS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    BAND: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One program per (row tile of the chunk, tile of cells).

    q, k: ``[B, H, L, D]`` by strides, or descriptors over ``[B, H, S, cells, D]``; partials float32
    ``[tiles * ROWS, width]``. Row tiles count over all sequences and heads. Programs run through
    BAND row tiles at a time, so that what is in flight at once shares its tiles in the L2.
    """
    program = tl.program_id(0)
    band = program // (BAND * column_tiles)
    within = program % (BAND * column_tiles)
    size = tl.minimum(tiles - band * BAND, BAND)
    place = band * BAND + within % size
    column = within // size
    tile = first_tile + place
    sequence = tile // row_tiles // heads
    head = tile // row_tiles % heads
    row = (tile % row_tiles) * ROWS
    first = column * CELLS
    STEPS: tl.constexpr = (D + DEPTH - 1) // DEPTH
    if not TMA:
        q += sequence.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h
        k += sequence.to(tl.int64) * k_stride_b + (head // group).to(tl.int64) * k_stride_h
        rows = (row + tl.arange(0, ROWS)) * S
        cells = (first + tl.arange(0, CELLS)) * S
        dims = tl.arange(0, DEPTH)
        q_at = q + rows.to(tl.int64)[:, None] * q_stride_t + dims[None, :]
        k_at = k + cells.to(tl.int64)[None, :] * k_stride_t + dims[:, None]
    acc = tl.zeros([ROWS, CELLS], tl.float32)
    for step in tl.range(0, S * STEPS, num_stages=STAGES):
        s = step // STEPS
        d = (step % STEPS) * DEPTH
        if TMA:
            queries = q.load([sequence, head, S - 1 - s, row, d]).reshape(ROWS, DEPTH)
            keys = k.load([sequence, head // group, s, first, d]).reshape(CELLS, DEPTH).T
        else:
            q_inside = (rows[:, None] + (S - 1 - s) < tokens) & (d + dims[None, :] < D)
            k_inside = (cells[None, :] + s < tokens) & (d + dims[:, None] < D)
            q_step = ((S - 1 - s) * q_stride_t + d).to(tl.int64)
            k_step = (s * k_stride_t + d).to(tl.int64)
            queries = tl.load(q_at + q_step, mask=q_inside, other=0.0)
            keys = tl.load(k_at + k_step, mask=k_inside, other=0.0)
        acc = tl.dot(queries, keys, acc)
    # Every tile has a cell below the limit, so that no row's peak is -inf.
    inside = first + tl.arange(0, CELLS) < key_limit
    acc = tl.where(inside[None, :], acc, float("-inf"))
    peak = tl.max(acc, 1) * scale_log2
    weights = tl.exp2(acc * scale_log2 - peak[:, None])
    BLOCKS: tl.constexpr = CELLS // PER_BLOCK
    if PER_BLOCK > 1:
        weights = tl.sum(weights.reshape(ROWS, BLOCKS, PER_BLOCK), 2)
    found = peak[:, None] + tl.log2(weights)
    target = (place * ROWS + tl.arange(0, ROWS)).to(tl.int64) * width
    blocks = column * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(partials + target[:, None] + blocks[None, :], found)


@triton.jit(do_not_specialize=_SIZES)
def _block_scores(
    partials, scores, true_cells, blocks, columns, padding_cells, width, first_tile, row_tiles,
    PER_BLOCK: tl.constexpr, PER_TILE: tl.constexpr, LANES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program per query block of the chunk: shares of its cell rows, added up.

    partials: of `_partial_sums`; scores float32 ``[tiles * PER_TILE, columns]``. Blocks of nothing
    but padding were never multiplied: each of their cells has the product 0.
    """
    program = tl.program_id(0)
    block = (first_tile + program // PER_TILE) % row_tiles * PER_TILE + program % PER_TILE
    if block < blocks:
        cells = tl.arange(0, PER_BLOCK)
        lanes = tl.arange(0, LANES)
        source = partials + (program * PER_BLOCK + cells).to(tl.int64)[:, None] * width
        if PADDED:
            peak = tl.zeros([PER_BLOCK], tl.float32)
            total = tl.zeros([PER_BLOCK], tl.float32) + padding_cells
        else:
            peak = tl.full([PER_BLOCK], float("-inf"), tl.float32)
            total = tl.zeros([PER_BLOCK], tl.float32)
        first = 0
        while first < blocks:
            at = first + lanes
            found = tl.load(source + at[None, :], mask=at[None, :] < blocks, other=float("-inf"))
            top = tl.maximum(peak, tl.max(found, 1))
            total = total * tl.exp2(peak - top) + tl.sum(tl.exp2(found - top[:, None]), 1)
            peak = top
            first += LANES
        log_total = peak + tl.log2(total)
        real = block * PER_BLOCK + cells < true_cells
        if PADDED:
            padding = tl.zeros([LANES], tl.float32) + tl.log2(PER_BLOCK + 0.0)
        else:
            padding = tl.full([LANES], float("-inf"), tl.float32)
        first = 0
        while first < columns:
            at = first + lanes
            found = tl.load(source + at[None, :], mask=at[None, :] < blocks, other=0.0)
            found = tl.where(at[None, :] < blocks, found, padding[None, :])
            share = tl.where(real[:, None], tl.exp2(found - log_total[:, None]), 0.0)
            tl.store(
                scores + program.to(tl.int64) * columns + at, tl.sum(share, 0), mask=at < columns
            )
            first += LANES


class Launch:
    """The kernels over all heads of a batch, a chunk of row tiles at a time.

    Args:
        q: bf16 or fp16 ``(B, H, L, D)``, any strides but the last's.
        k: ``(B, H', L, D)`` of the same dtype, H' a divisor of H.
        shape: see `Shape`.
        tile: see `Tile`.
        scratch_bytes: limit of the partial sums and of a chunk's scores, at least a row tile's.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, shape: Shape, tile: Tile, scratch_bytes: int
    ) -> None:
        B, self.heads, self.tokens, self.head_dim = q.shape
        self.q, self.k, self.shape, self.tile = q, k, shape, tile
        self.group = self.heads // k.shape[1]
        self.row_tiles = math.ceil(shape.held_cells / tile.rows)
        self.column_tiles = math.ceil(shape.held_cells / tile.cells)
        self.width = self.column_tiles * (tile.cells // shape.per_block)
        self.blocks_per_tile = tile.rows // shape.per_block
        self.tiles = B * self.heads * self.row_tiles
        tile_bytes = 4 * (tile.rows * self.width + self.blocks_per_tile * shape.columns)
        most = max(1, scratch_bytes // tile_bytes)
        wave = 1
        if q.is_cuda:
            sms = torch.cuda.get_device_properties(q.device).multi_processor_count
            wave = sms * tile.ctas_per_sm
        # Column tiles of a row tile make waves whole enough; only the bands should be.
        self.chunk = min(self.tiles, most // wave * wave or most)
        self.partials = q.new_empty(self.chunk * tile.rows, self.width, dtype=torch.float32)
        self.depth = min(tile.depth, max(16, triton.next_power_of_2(self.head_dim)))
        self.tma = tile.tma and _describable(q, shape.stride) and _describable(k, shape.stride)
        self._operands: tuple[object, object] = q, k
        if self.tma:
            self._operands = self._descriptor(q, tile.rows), self._descriptor(k, tile.cells)

    def chunks(self) -> range:
        """First row tile of every chunk."""
        return range(0, self.tiles, self.chunk)

    def scores(self, first_tile: int, scores: torch.Tensor) -> None:
        """Block scores of the row tiles from `first_tile` on, as many as `scores` has rows for.

        Args:
            first_tile: counted over sequences, heads and row tiles.
            scores: float32 ``(tiles * blocks_per_tile, N')``, written, except the rows of query
                blocks past the end.
        """
        shape, tile = self.shape, self.tile
        tiles = len(scores) // self.blocks_per_tile
        with on_device(self.q):
            _partial_sums[(tiles * self.column_tiles,)](
                *self._operands, self.partials, *self.q.stride()[:3], *self.k.stride()[:3],
                self.tokens, shape.key_limit, self.heads, self.group,
                first_tile, tiles, self.row_tiles, self.column_tiles, self.width,
                shape.scale * _LOG2_E,
                S=shape.stride, D=self.head_dim, PER_BLOCK=shape.per_block,
                ROWS=tile.rows, CELLS=tile.cells, DEPTH=self.depth, STAGES=tile.stages,
                BAND=16, TMA=self.tma, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
            _block_scores[(len(scores),)](
                self.partials, scores, shape.cells, shape.blocks, shape.columns,
                float((shape.columns - shape.blocks) * shape.per_block), self.width,
                first_tile, self.row_tiles,
                PER_BLOCK=shape.per_block, PER_TILE=self.blocks_per_tile,
                LANES=min(256, _LANES // shape.per_block),
                PADDED=shape.padded_keys and shape.columns > shape.blocks,
            )  # fmt: skip

    def _descriptor(self, x: torch.Tensor, rows: int) -> TensorDescriptor:
        """Over ``[B, H, S, cells, D]``: one load is one place of many cells."""
        S = self.shape.stride
        B, H, L, D = x.shape
        step = x.stride(2)
        # The stride of an axis of size 1 may be anything, and is told to the hardware.
        strides = [s if n > 1 else L * step for n, s in zip((B, H), x.stride()[:2], strict=True)]
        return TensorDescriptor(
            x, [B, H, S, L // S, D], [*strides, step, S * step, 1], [1, 1, 1, rows, self.depth]
        )


def _describable(x: torch.Tensor, stride: int) -> bool:
    """Whether the hardware's tensor descriptors can say how x lies in memory."""
    aligned = all(
        s * x.element_size() % 16 == 0 and (s > 0 or n == 1)
        for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)
    )
    return aligned and x.data_ptr() % 16 == 0 and x.shape[2] % stride == 0
