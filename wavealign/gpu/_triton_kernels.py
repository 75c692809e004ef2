"""Triton kernels: block-sparse attention through a row table, block moves, a streaming read."""

# triton.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wavealign._devices import on_device


@triton.jit
def attend_rows(
    q, k, v, out, lse, table, counts, starts, indices, record,
    scale_log2, tokens_q, tokens_kv, H, H_kv,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TILE: tl.constexpr,
    RAGGED: tl.constexpr, TRACE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One CTA per (slot, head, sequence): query block ``table[head, slot]`` over its list.

    q, out: ``[B, tokens_q, H, D]``; k, v: ``[B, tokens_kv, H_kv, D]``; lse: ``[B, H, tokens_q]``;
    table, counts: ``[H, M]``; starts: ``[H * M]``. The softmax works in powers of two on scores
    times `scale_log2`.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    M = tl.num_programs(0)
    if TRACE:
        started = _global_timer()
    kv_head = head // (H // H_kv)
    block = tl.load(table + head * M + slot)
    row = head * M + block
    count = tl.load(counts + row)
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, D)
    q_offsets = ((sequence.to(tl.int64) * tokens_q + rows[:, None]) * H + head) * D + dims[None, :]
    queries = tl.load(q + q_offsets, mask=rows[:, None] < tokens_q, other=0.0)

    highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    SUB: tl.constexpr = BLOCK_KV // TILE
    lists = indices + tl.load(starts + row)
    for step in tl.range(0, count * SUB, num_stages=STAGES):
        token = tl.load(lists + step // SUB) * BLOCK_KV + (step % SUB) * TILE
        tokens = token + tl.arange(0, TILE)
        offsets = (sequence.to(tl.int64) * tokens_kv + tokens[:, None]) * (H_kv * D)
        offsets += kv_head * D + dims[None, :]
        if RAGGED:
            inside = tokens[:, None] < tokens_kv
            keys = tl.load(k + offsets, mask=inside, other=0.0)
            values = tl.load(v + offsets, mask=inside, other=0.0)
        else:
            keys = tl.load(k + offsets)
            values = tl.load(v + offsets)
        scores = tl.dot(queries, keys.T)
        if RAGGED:
            scores = tl.where(tokens[None, :] < tokens_kv, scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        # A tile that lies wholly behind the last token leaves -inf, and -inf minus -inf is NaN.
        safe = tl.where(new_highest == -float("inf"), 0.0, new_highest) if RAGGED else new_highest
        weights = tl.exp2(scores * scale_log2 - safe[:, None])
        shrink = tl.exp2(highest - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        highest = new_highest

    nonzero = tl.where(total == 0.0, 1.0, total)
    result = acc / nonzero[:, None]
    tl.store(out + q_offsets, result.to(out.dtype.element_ty), mask=rows[:, None] < tokens_q)
    LN2: tl.constexpr = 0.6931471805599453
    log_sum = tl.where(total == 0.0, -float("inf"), (highest + tl.log2(nonzero)) * LN2)
    tl.store(lse + (sequence * H + head) * tokens_q + rows, log_sum, mask=rows < tokens_q)
    if TRACE:
        entry = record + ((sequence * H + head) * M + slot).to(tl.int64) * 3
        tl.store(entry, started)
        tl.store(entry + 1, _global_timer())
        tl.store(entry + 2, _sm_id().to(tl.int64))


@triton.jit
def _global_timer():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _sm_id():
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _move(
    source, target, table, tokens, M, H,
    D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Copy query block ``table[h, slot]`` of ``[B, tokens, H, D]`` to or from its slot."""
    slot = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    block = tl.load(table + head * M + slot)
    within = tl.arange(0, BLOCK)
    dims = tl.arange(0, D_PADDED)
    natural = block * BLOCK + within
    launched = slot * BLOCK + within
    natural_at = ((sequence * tokens + natural[:, None]) * H + head) * D + dims[None, :]
    launched_at = ((sequence * M * BLOCK + launched[:, None]) * H + head) * D + dims[None, :]
    real = (natural[:, None] < tokens) & (dims[None, :] < D)
    if GATHER:
        tl.store(
            target + launched_at, tl.load(source + natural_at, mask=real, other=0.0),
            mask=dims[None, :] < D,
        )  # fmt: skip
    else:
        tl.store(target + natural_at, tl.load(source + launched_at, mask=real), mask=real)


def move_blocks(
    source: Tensor, row_order: Tensor, block: int, out: Tensor, *, gather: bool
) -> None:
    """`gather_blocks` or `scatter_blocks` (wavealign.gpu.move) on a GPU."""
    H, M = row_order.shape
    B, D = source.shape[0], source.shape[3]
    tokens = (source if gather else out).shape[1]
    with on_device(source):
        _move[(M, H, B)](
            source, out, row_order, tokens, M, H,
            D=D, D_PADDED=triton.next_power_of_2(D), BLOCK=block, GATHER=gather,
        )  # fmt: skip


@triton.jit
def _stream_read(source, sums, CHUNK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(source + at)))


def stream_read(source: Tensor, sums: Tensor) -> None:
    """Read a float32 tensor once, each element by one CTA: the profiler's control kernel.

    `sums` takes a float32 for each 8192 elements; the length of `source` is a multiple of that.
    """
    with on_device(source):
        _stream_read[(source.numel() // STREAM_CHUNK,)](source, sums, CHUNK=STREAM_CHUNK)


STREAM_CHUNK = 8192
