"""Triton kernels: attention that leaves each (row, block)'s log-sum-exp, and what is made of them.

Phase 1 (`attend_blocks`) is a FlashAttention forward over lists of K/V blocks that also writes
G[i, v], the log-sum-exp of row i over the keys of block v. Phase 2 (`weigh_blocks`) turns G and the
row's final log-sum-exp L into W[u, v], the mean over the rows of exp(G - L).

Why G is written at all: the mean over rows can't be kept as one running sum per block, because
each of its terms is short of a factor exp(running maximum - L) of its own row, known only at the
end. What is exact is one number per row and block, or a second pass over Q·K. G costs 4 bytes per
row and block, written once and read once, beside the 4·D·block_kv operations that made it.

G comes almost free: the online softmax sums each tile's exp2(z - m), m the running maximum, anyway,
and G = m + log2 of that sum. The paper takes the block's own maximum there; the value is the same
but where a block lies 2^126 below what the row has seen, whose importance underflows to 0 then.

Layout of G: ``[heads, M, width, BLOCK_Q]``, query blocks in natural order and lists in visiting
order. Both phases touch runs of BLOCK_Q floats, and only blocks that a list holds are touched.

Everything is in powers of two: scores times log2(e)/√D.
"""

# triton.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

import triton
import triton.language as tl

# Hidden scores and the first running maximum are finite, so that no difference of two is NaN; the
# maximum lies above all hidden ones, so that their weights are exp2 of something hugely negative.
_HIDDEN = tl.constexpr(-3.0e38)
_LOWEST = tl.constexpr(-1.0e30)
_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_tile(
    source, strides, sequence, head, first, tokens,
    ROWS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tokens `first` and on of a head, ``[ROWS, D]``; zeros behind the last one."""
    if TMA:
        tile = source.load([sequence, head, first, 0]).reshape(ROWS, D)
    else:
        stride_b, stride_t, stride_h = strides
        rows = first + tl.arange(0, ROWS)
        base = source + sequence.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        at = rows.to(tl.int64)[:, None] * stride_t + tl.arange(0, D)[None, :]
        if MASKED:
            tile = tl.load(base + at, mask=rows[:, None] < tokens, other=0.0)
        else:
            tile = tl.load(base + at)
    return tile


@triton.jit
def _distances(positions, tokens, rows, columns, AXES: tl.constexpr):
    """Between the positions of rows and columns; of |rows - columns| without axes."""
    if AXES == 0:
        apart = tl.abs((rows[:, None] - columns[None, :]).to(tl.float32))
    else:
        squares = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
        for axis in tl.static_range(AXES):
            x = tl.load(positions + axis * tokens + rows, mask=rows < tokens, other=0.0)
            y = tl.load(positions + axis * tokens + columns, mask=columns < tokens, other=0.0)
            difference = x[:, None] - y[None, :]
            squares += difference * difference
        apart = tl.sqrt(squares)
    return apart


@triton.jit
def _log2(x, HARDWARE: tl.constexpr):
    """The hardware's logarithm, off by at most 2^-22 of its value, or of 1.

    `tl.log2` branches, and with branches in the loop ptxas runs all tensor-core products one by
    one. The interpreter has no inline assembly.
    """
    if HARDWARE:
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.log2(x)
    return result


@triton.jit
def _store_rows(out, result, sequence, head, rows, tokens, H, D: tl.constexpr):
    at = (sequence.to(tl.int64) * tokens + rows) * H + head
    at = at[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=rows[:, None] < tokens)


# Sizes that don't change the code: one compilation serves all shapes and rounds.
_SIZES = ["tokens_q", "tokens_kv", "H", "H_kv", "M", "N", "first_head", "list_heads", "width"]


@triton.jit(do_not_specialize=_SIZES)
def attend_blocks(
    q, k, v, out, lse, sums, entropy, distance, positions, table, counts, starts, indices,
    q_strides, k_strides, v_strides, scale_log2, tokens_q, tokens_kv, H, H_kv, M, N, first_head,
    list_heads, width,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TILE: tl.constexpr,
    DENSE: tl.constexpr, RAGGED: tl.constexpr, SUMS: tl.constexpr, ENTROPY: tl.constexpr,
    DISTANCE: tl.constexpr, AXES: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """One CTA per (slot, head of this round): a query block over its list, or over all (DENSE).

    table: int32 ``[list_heads, slots]``, of all query blocks or of a part of them.

    q, out: ``[B, tokens_q, H, D]``, out contiguous; k, v: ``[B, tokens_kv, H_kv, D]``; TMA: q, k
    and v are descriptors of ``[B, heads, tokens, D]``. lse, entropy, distance: ``[B, H,
    tokens_q]``; positions: float32 ``[AXES, tokens]``. Heads of all sequences are counted through,
    from `first_head` on; lists are those of ``head % list_heads``. SUMS: write G.

    ENTROPY keeps Σ p·x beside Σ p, where p = exp2(x) and x = z - m: one more multiply-add per
    score. When m rises by d, x falls by d and p shrinks, both factors of the row alone. The entropy
    log2 Σp - Σpx/Σp is then a difference of small numbers, unlike LSE - E[z].

    DISTANCE without AXES costs one multiply-add per score too: of a K/V block wholly behind (or
    ahead of) the query block, Σ p·|i - j| = ±(Σ p·j - i·Σ p). The blocks that overlap the query
    block are left out there, and their scores are computed once more at the end. With AXES every
    score pays for a square root.
    """
    slot = tl.program_id(0)
    local_head = tl.program_id(1)
    folded = first_head + local_head
    sequence = folded // H
    head = folded % H
    kv_head = head // (H // H_kv)
    listed = folded % list_heads
    block = tl.load(table + listed * tl.num_programs(0) + slot)
    count = N
    lists = indices
    if not DENSE:
        count = tl.minimum(tl.load(counts + listed * M + block), width)
        lists = indices + tl.load(starts + listed * M + block)
    first_row = block * BLOCK_Q
    within = tl.arange(0, BLOCK_Q)
    rows = first_row + within
    own = folded.to(tl.int64) * tokens_q + rows
    # Gone before the loop, so that the loop runs at least once: ptxas runs all tensor-core products
    # one by one where the accumulator may also come from a path around them.
    if count <= 0:
        nothing = tl.zeros([BLOCK_Q], tl.float32)
        acc = tl.zeros([BLOCK_Q, D], tl.float32)
        _store_rows(out, acc, sequence, head, rows, tokens_q, H, D)
        tl.store(lse + own, nothing - float("inf"), mask=rows < tokens_q)
        if ENTROPY:
            tl.store(entropy + own, nothing, mask=rows < tokens_q)
        if DISTANCE:
            tl.store(distance + own, nothing, mask=rows < tokens_q)
        return
    queries = _load_tile(q, q_strides, sequence, head, first_row, tokens_q, BLOCK_Q, D, TMA, True)

    highest = tl.full([BLOCK_Q], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    moment = tl.zeros([BLOCK_Q], tl.float32)
    travel = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    overlapping = 0
    in_tile = tl.arange(0, TILE).to(tl.float32)
    g = sums + ((local_head * M + block).to(tl.int64) * width) * BLOCK_Q + within
    for step in tl.range(0, count, num_stages=STAGES):
        kv_block = step
        if not DENSE:
            kv_block = tl.load(lists + step)
        block_total = tl.zeros([BLOCK_Q], tl.float32)
        for part in tl.static_range(BLOCK_KV // TILE):
            token = kv_block * BLOCK_KV + part * TILE
            keys = _load_tile(
                k, k_strides, sequence, kv_head, token, tokens_kv, TILE, D, TMA, RAGGED
            )
            values = _load_tile(
                v, v_strides, sequence, kv_head, token, tokens_kv, TILE, D, TMA, RAGGED
            )
            scores = tl.dot(queries, keys.T)
            columns = token + tl.arange(0, TILE)
            if RAGGED:  # noqa: SIM102 (one is constexpr, the other is not)
                if token + TILE > tokens_kv:
                    scores = tl.where(columns[None, :] < tokens_kv, scores, _HIDDEN)
            new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
            logits = scores * scale_log2 - new_highest[:, None]
            weights = tl.exp2(logits)
            fall = highest - new_highest
            shrink = tl.exp2(fall)
            tile_total = tl.sum(weights, 1)
            if ENTROPY:
                moment = (moment + fall * total) * shrink + tl.sum(weights * logits, 1)
            if DISTANCE:
                if AXES == 0:
                    along = tl.sum(weights * in_tile[None, :], 1)
                    along += (token - rows).to(tl.float32) * tile_total
                    behind = kv_block * BLOCK_KV >= first_row + BLOCK_Q
                    ahead = (kv_block + 1) * BLOCK_KV <= first_row
                    side = behind.to(tl.float32) - ahead.to(tl.float32)
                    travel = travel * shrink + side * along
                else:
                    apart = _distances(positions, tokens_q, rows, columns, AXES)
                    travel = travel * shrink + tl.sum(weights * apart, 1)
            total = total * shrink + tile_total
            block_total = block_total * shrink + tile_total
            if SUMS and part == BLOCK_KV // TILE - 1:
                # A streaming store: K and V are what L2 is for.
                block_sums = new_highest + _log2(block_total, HARDWARE)
                tl.store(g + step * BLOCK_Q, block_sums, cache_modifier=".cs")
            acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
            highest = new_highest
        if DISTANCE and AXES == 0:
            place = kv_block - first_row // BLOCK_KV
            span: tl.constexpr = (BLOCK_Q + BLOCK_KV - 1) // BLOCK_KV
            meets = (place >= 0) & (place < span)
            overlapping |= tl.where(meets, 1 << tl.where(meets, place, 0), 0)

    if DISTANCE and AXES == 0:
        span_tiles: tl.constexpr = ((BLOCK_Q + BLOCK_KV - 1) // BLOCK_KV) * (BLOCK_KV // TILE)
        for tile in range(span_tiles):
            if (overlapping >> (tile // (BLOCK_KV // TILE))) & 1:
                token = first_row // BLOCK_KV * BLOCK_KV + tile * TILE
                columns = token + tl.arange(0, TILE)
                keys = _load_tile(
                    k, k_strides, sequence, kv_head, token, tokens_kv, TILE, D, TMA, True
                )
                scores = tl.dot(queries, keys.T)
                scores = tl.where(columns[None, :] < tokens_kv, scores, _HIDDEN)
                weights = tl.exp2(scores * scale_log2 - highest[:, None])
                apart = _distances(positions, tokens_q, rows, columns, AXES)
                travel += tl.sum(weights * apart, 1)

    nonzero = tl.where(total == 0.0, 1.0, total)
    _store_rows(out, acc / nonzero[:, None], sequence, head, rows, tokens_q, H, D)
    real = rows < tokens_q
    log_total = tl.log2(nonzero)
    log_sum = tl.where(total == 0.0, -float("inf"), (highest + log_total) * _LN2)
    tl.store(lse + own, log_sum, mask=real)
    if ENTROPY:
        tl.store(entropy + own, (log_total - moment / nonzero) * _LN2, mask=real)
    if DISTANCE:
        tl.store(distance + own, travel / nonzero, mask=real)


@triton.jit(do_not_specialize=["tokens_q", "N", "first_head", "list_heads", "width"])
def weigh_blocks(
    sums, lse, weights, counts, starts, indices, tokens_q, N, first_head, list_heads, width,
    BLOCK_Q: tl.constexpr, PLACES: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """One program per (query block, head of this round): W of its list from G and the LSE.

    lse: float32 ``[B, H, tokens_q]``, the call's own or a reference; weights: float32 ``[B, H, M,
    N]``, 0 on entry. Rows of LSE -inf count as rows, and give nothing.
    """
    block = tl.program_id(0)
    local_head = tl.program_id(1)
    M = tl.num_programs(0)
    folded = first_head + local_head
    count = N
    lists = indices
    if not DENSE:
        listed = folded % list_heads
        count = tl.minimum(tl.load(counts + listed * M + block), width)
        lists = indices + tl.load(starts + listed * M + block)
    within = tl.arange(0, BLOCK_Q)
    rows = block * BLOCK_Q + within
    own = lse + folded.to(tl.int64) * tokens_q + rows
    log_sum = tl.load(own, mask=rows < tokens_q, other=-float("inf")) * _LOG2E
    gives = log_sum != -float("inf")
    share = 1.0 / tl.minimum(tokens_q - block * BLOCK_Q, BLOCK_Q).to(tl.float32)
    g = sums + (local_head * M + block).to(tl.int64) * width * BLOCK_Q + within[None, :]
    row = weights + (folded.to(tl.int64) * M + block) * N
    for first in range(0, count, PLACES):
        places = first + tl.arange(0, PLACES)
        held = places < count
        block_sums = tl.load(g + places[:, None] * BLOCK_Q, mask=held[:, None], other=0.0)
        parts = tl.where(gives[None, :], tl.exp2(block_sums - log_sum[None, :]), 0.0)
        kv_blocks = places
        if not DENSE:
            kv_blocks = tl.load(lists + places, mask=held, other=0)
        tl.store(row + kv_blocks, tl.sum(parts, 1) * share, mask=held)
