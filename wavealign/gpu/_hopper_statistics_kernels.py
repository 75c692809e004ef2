"""What the Hopper kernel can say of a row beside its attention, a K/V block at a time.

The same quantities as in wavealign/gpu/importance/_kernels.py, which explains them: each
(row, block)'s log-sum-exp, and running sums for entropy and mean attention distance.
"""

# gluon.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


# fmt: off
@gluon.jit
def fast_log2(x):
    """The hardware's logarithm, off by at most 2^-22 of its value, or of 1; without a branch."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def store_block_sums(sums, visit, highest, block_total, first_row,
                     BLOCK_Q: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Write G of this row's visit, past L2: ``sums`` is ``[width, BLOCK_Q]``."""
    within = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    gl.store(sums + visit * BLOCK_Q + within, highest + fast_log2(block_total),
             cache_modifier=".cs")


@gluon.jit
def column_sums(p, layout: gl.constexpr):
    """Sums of p and of p·c over the columns c of a tile.

    A thread holds two columns of every eight. Taken as eights, the number of an eight is known at
    compile time and a factor in the instruction; as a table, the columns would take 32 registers
    and spill others.
    """
    ROWS: gl.constexpr = p.shape[0]
    EIGHTS: gl.constexpr = p.shape[1] // 8
    eights = p.reshape([ROWS, EIGHTS, 8])
    tile: gl.constexpr = eights.type.layout
    first = gl.arange(0, EIGHTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, tile))) * 8
    moments = gl.sum(eights * first.to(gl.float32)[None, :, None], axis=1)
    totals = gl.sum(eights, axis=1)
    within = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, tile)))
    moment = gl.sum(moments + totals * within.to(gl.float32)[None, :], axis=1)
    total = gl.sum(totals, axis=1)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    return (gl.convert_layout(total, rows, assert_trivial=True),
            gl.convert_layout(moment, rows, assert_trivial=True))


@gluon.jit
def block_travel(p, total, moment, block, head_row, BLOCK_KV: gl.constexpr, ROWS: gl.constexpr,
                 layout: gl.constexpr):
    """Sum of p·|i - j| over the keys of a block, of whose columns the sums are known."""
    rows = head_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    token = block * BLOCK_KV
    along = moment + (token - rows).to(gl.float32) * total
    behind = token >= head_row + ROWS
    ahead = token + BLOCK_KV <= head_row
    travel = along * (behind.to(gl.float32) - ahead.to(gl.float32))
    if not (behind or ahead):
        columns = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, layout))
        apart = (rows[:, None] - token - columns[None, :]).to(gl.float32)
        travel = gl.sum(p * gl.abs(apart), axis=1)
    return travel
# fmt: on
