"""Block-sparse attention for Hopper in Gluon: TMA, warp specialisation, overlapped softmax.

One CTA per (launch slot, head, sequence), slots fastest and not persistent, so that the hardware's
launch order is the row order of the schedule. A CTA reads query block ``table[head, slot]``, walks
its K/V blocks from first to last, and writes its rows in place: nothing is moved.
"""

# gluon.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wavealign.gpu._hopper_statistics_kernels import (
    block_travel,
    column_sums,
    fast_log2,
    store_block_sums,
)


@dataclass(frozen=True)
class CtaShape:
    """How a CTA is built.

    Attributes:
        consumers: partitions of four warps that compute 64 rows each; one more warp loads.
        k_stages, v_stages: of the rings of K and V blocks.
        ctas_per_sm: CTAs that have to fit on an SM.
        pin: keep ptxas from waiting for the second product ahead of the softmax.
    """

    consumers: int
    k_stages: int
    v_stages: int
    ctas_per_sm: int
    pin: bool

    @property
    def launch_options(self) -> dict[str, int]:
        """Warps of a consumer, registers at the entry, registers of a consumer."""
        warps = 4 * self.consumers + 4  # the loading warp takes a whole warpgroup's registers
        entry = min(255, 65536 // (self.ctas_per_sm * warps * 32)) // 8 * 8
        consumer = min(240, (entry * warps - 24 * 4) // (4 * self.consumers) // 8 * 8)
        return {"num_warps": 4, "maxnreg": entry, "REGS": consumer}


# By block_q, as measured on an H200 (docs/results-h200.md).
CTA_SHAPES = {
    128: CtaShape(consumers=2, k_stages=2, v_stages=2, ctas_per_sm=1, pin=True),
    64: CtaShape(consumers=1, k_stages=2, v_stages=1, ctas_per_sm=2, pin=False),
}


# fmt: off
@gluon.jit
def _clock():
    """Nanoseconds of the GPU's global timer."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def _smid():
    """The SM this CTA runs on."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pin(total):
    """Hold back the next wait until the softmax sums exist.

    ptxas hoists the wait for the second product above the exponentials, which undoes their
    overlap. It moves nothing across a conditional exit, so here is one that hangs on the sums
    (of positive terms) and is never taken.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; mov.b32 $0, $1; setp.lt.f32 p, $1, 0fBF800000; @p exit; }",
        "=r,r", [total], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _load_block(desc, b, h, block, ROWS: gl.constexpr, smem, full, stage):
    """Start the copy of a block into a stage of a ring; rows past the end arrive as zeros."""
    bar = full.index(stage)
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [b, h, block * ROWS, 0], bar, smem.index(stage))


@gluon.jit
def _load_queries(q_desc, b, h, row, q_smem, q_full, n,
                  CONSUMERS: gl.constexpr, ROWS: gl.constexpr):
    """Start the copy of the query block, one barrier per consumer."""
    for c in gl.static_range(CONSUMERS):
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes, pred=n > 0)
        tma.async_copy_global_to_shared(
            q_desc, [b, h, row + c * ROWS, 0], q_full.index(c), q_smem.index(c), pred=n > 0)


@gluon.jit
def _produce(descs, bufs, bars, job, row_list, BLOCK_KV: gl.constexpr, CONSUMERS: gl.constexpr,
             ROWS: gl.constexpr):
    """The producer warp: loads K(i + 1), then V(i), in the order in which they are needed."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem = bufs
    q_full, k_full, k_empty, v_full, v_empty = bars
    b, h, hkv, row, n = job
    K_STAGES: gl.constexpr = k_smem.shape[0]
    V_STAGES: gl.constexpr = v_smem.shape[0]
    _load_queries(q_desc, b, h, row, q_smem, q_full, n, CONSUMERS, ROWS)
    if n > 0:
        block = gl.load(row_list)
        # The list is read two entries ahead, so that its latency hides behind the waits.
        following = gl.load(row_list + gl.minimum(1, n - 1))
        _load_block(k_desc, b, hkv, block, BLOCK_KV, k_smem, k_full, 0)
        for i in range(n):
            ahead = gl.load(row_list + gl.minimum(i + 2, n - 1))
            j = i + 1
            if j < n:
                mbarrier.wait(k_empty.index(j % K_STAGES), ((j // K_STAGES) & 1) ^ 1)
                _load_block(k_desc, b, hkv, following, BLOCK_KV, k_smem, k_full, j % K_STAGES)
            mbarrier.wait(v_empty.index(i % V_STAGES), ((i // V_STAGES) & 1) ^ 1)
            _load_block(v_desc, b, hkv, block, BLOCK_KV, v_smem, v_full, i % V_STAGES)
            block = following
            following = ahead


@gluon.jit
def _mask_keys(s, block, s_kv, BLOCK_KV: gl.constexpr, layout: gl.constexpr,
               HIDDEN: gl.constexpr):
    """Hide the keys past the end: only the last K/V block has any."""
    left = s_kv - block * BLOCK_KV
    if left < BLOCK_KV:
        cols = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, layout))
        s = gl.where((cols < left)[None, :], s, HIDDEN)
    return s


@gluon.jit
def _store(out, lse, acc, log_sum, head_row, s_q, strides, b, h, heads,
           D: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Write the rows below s_q, straight from the accumulator's registers."""
    stride_b, stride_s, stride_h = strides
    rows = head_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    inside = rows < s_q
    base = out + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
    gl.store(base + rows.to(gl.int64)[:, None] * stride_s + cols[None, :],
             acc.to(out.dtype.element_ty), mask=inside[:, None])
    gl.store(lse + (b * heads + h).to(gl.int64) * s_q + rows, log_sum, mask=inside)


@gluon.jit
def _store_rows(target, values, head_row, s_q, b, h, heads, ROWS: gl.constexpr,
                layout: gl.constexpr):
    """Write a float32 per row below s_q."""
    rows = head_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    gl.store(target + (b * heads + h).to(gl.int64) * s_q + rows, values, mask=rows < s_q)


@gluon.jit
def _consume(w: gl.constexpr, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv,
             scale_log2, heads, D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
             ROWS: gl.constexpr, RAGGED: gl.constexpr, PIN: gl.constexpr, SUMS: gl.constexpr,
             ENTROPY: gl.constexpr, DISTANCE: gl.constexpr):
    """Attention of ROWS query rows over their list of K/V blocks.

    In step i the product Q K(i)^T is issued ahead of P(i - 1) V(i - 1), so the softmax of block i
    runs while the tensor cores work on the second product; the accumulator is rescaled after that
    product has landed.
    """
    q_smem, k_smem, v_smem = bufs
    q_full, k_full, k_empty, v_full, v_empty = bars
    b, h, _, row, n = job
    out, lse, strides = outputs
    sums, entropy, distance = statistics
    K_STAGES: gl.constexpr = k_smem.shape[0]
    V_STAGES: gl.constexpr = v_smem.shape[0]
    WARPS: gl.constexpr = ROWS // 16
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_KV, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # Finite where weights are multiplied by their exponents: 0 times -inf is NaN.
    HIDDEN: gl.constexpr = -3.0e38 if ENTROPY else float("-inf")
    dtype: gl.constexpr = q_smem.dtype
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    s_zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, S_LAYOUT)
    head_row = row + w * ROWS

    if n > 0:
        q = q_smem.index(w).reshape([ROWS, D])
        block = 0
        following = 0
        if RAGGED or DISTANCE:
            block = gl.load(row_list)
            following = gl.load(row_list + gl.minimum(1, n - 1))
        mbarrier.wait(q_full.index(w), 0)
        mbarrier.wait(k_full.index(0), 0)
        keys = k_smem.index(0).reshape([BLOCK_KV, D]).permute([1, 0])
        s = warpgroup_mma(q, keys, s_zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s, ))
        mbarrier.arrive(k_empty.index(0), count=1)
        if RAGGED:
            s = _mask_keys(s, block, s_kv, BLOCK_KV, S_LAYOUT, HIDDEN)
        m = gl.max(s, axis=1) * scale_log2
        x = s * scale_log2 - m[:, None]
        p = gl.exp2(x)
        if DISTANCE:
            total, along = column_sums(p, S_LAYOUT)
        else:
            total = gl.sum(p, axis=1)
        moment = gl.zeros([ROWS], gl.float32, S_ROWS)
        travel = gl.zeros([ROWS], gl.float32, S_ROWS)
        if SUMS:
            store_block_sums(sums, 0, m, total, w * ROWS, BLOCK_Q, ROWS, S_LAYOUT)
        if ENTROPY:
            moment = gl.sum(p * x, axis=1)
        if DISTANCE:
            travel = block_travel(p, total, along, block, head_row, BLOCK_KV, ROWS, S_LAYOUT)
        p16 = gl.convert_layout(p.to(dtype), P_LAYOUT)

        for i in range(1, n):
            k_stage = i % K_STAGES
            v_stage = (i - 1) % V_STAGES
            block = following
            if RAGGED or DISTANCE:
                following = gl.load(row_list + gl.minimum(i + 1, n - 1))
            mbarrier.wait(k_full.index(k_stage), (i // K_STAGES) & 1)
            keys = k_smem.index(k_stage).reshape([BLOCK_KV, D]).permute([1, 0])
            s = warpgroup_mma(q, keys, s_zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), ((i - 1) // V_STAGES) & 1)
            values = v_smem.index(v_stage).reshape([BLOCK_KV, D])
            acc = warpgroup_mma(p16, values, acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s, ))
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            if RAGGED:
                s = _mask_keys(s, block, s_kv, BLOCK_KV, S_LAYOUT, HIDDEN)
            m_new = gl.maximum(m, gl.max(s, axis=1) * scale_log2)
            alpha = gl.exp2(m - m_new)
            x = s * scale_log2 - m_new[:, None]
            p = gl.exp2(x)
            if DISTANCE:
                block_total, along = column_sums(p, S_LAYOUT)
            else:
                block_total = gl.sum(p, axis=1)
            if ENTROPY:
                moment = (moment + (m - m_new) * total) * alpha + gl.sum(p * x, axis=1)
            total = total * alpha + block_total
            if SUMS:
                store_block_sums(sums, i, m_new, block_total, w * ROWS, BLOCK_Q, ROWS, S_LAYOUT)
            if DISTANCE:
                travel = travel * alpha + block_travel(
                    p, block_total, along, block, head_row, BLOCK_KV, ROWS, S_LAYOUT)
            if PIN:
                total = _pin(total)
            m = m_new
            acc = warpgroup_mma_wait(0, deps=(acc, ))
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]
            p16 = gl.convert_layout(p.to(dtype), P_LAYOUT)

        v_stage = (n - 1) % V_STAGES
        mbarrier.wait(v_full.index(v_stage), ((n - 1) // V_STAGES) & 1)
        acc = warpgroup_mma(p16, v_smem.index(v_stage).reshape([BLOCK_KV, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc, ))
        acc = acc * gl.convert_layout(1.0 / total, O_ROWS)[:, None]
        log_sum = gl.convert_layout((m + gl.log2(total)) * 0.6931471805599453, O_ROWS)
        _store(out, lse, acc, log_sum, head_row, s_q, strides, b, h, heads, D, ROWS, O_LAYOUT)
        if ENTROPY:
            _store_rows(entropy, (fast_log2(total) - moment / total) * 0.6931471805599453,
                        head_row, s_q, b, h, heads, ROWS, S_LAYOUT)
        if DISTANCE:
            _store_rows(distance, travel / total, head_row, s_q, b, h, heads, ROWS, S_LAYOUT)
    else:
        log_sum = gl.full([ROWS], float("-inf"), gl.float32, O_ROWS)
        _store(out, lse, acc, log_sum, head_row, s_q, strides, b, h, heads, D, ROWS, O_LAYOUT)
        nothing = gl.zeros([ROWS], gl.float32, S_ROWS)
        if ENTROPY:
            _store_rows(entropy, nothing, head_row, s_q, b, h, heads, ROWS, S_LAYOUT)
        if DISTANCE:
            _store_rows(distance, nothing, head_row, s_q, b, h, heads, ROWS, S_LAYOUT)


@gluon.jit(do_not_specialize=["s_q", "s_kv", "heads", "group", "width", "m_blocks"])
def _attend_rows(q_desc, k_desc, v_desc, out, lse, table, counts, starts, indices, record,
                 sums, entropy, distance, width, stride_b, stride_s, stride_h, s_q, s_kv, heads,
                 group, m_blocks, scale_log2,
                 D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
                 K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
                 PIN: gl.constexpr, RAGGED: gl.constexpr, TRACE: gl.constexpr,
                 SUMS: gl.constexpr, ENTROPY: gl.constexpr, DISTANCE: gl.constexpr,
                 REGS: gl.constexpr, num_warps: gl.constexpr):
    """One CTA: one query block of one head of one batch entry."""
    ROWS: gl.constexpr = BLOCK_Q // CONSUMERS
    slot = gl.program_id(0)
    h = gl.program_id(1)
    b = gl.program_id(2)
    slots = gl.num_programs(0)
    if TRACE:
        begin = _clock()
    q_block = gl.load(table + h * slots + slot)
    n = gl.load(counts + h * m_blocks + q_block)
    if SUMS:
        n = gl.minimum(n, width)
    row_list = indices + gl.load(starts + h * m_blocks + q_block)

    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [K_STAGES, 1, 1, BLOCK_KV, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, BLOCK_KV, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
    for c in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(c), count=1)
        mbarrier.init(k_empty.index(c), count=CONSUMERS)
    for c in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(c), count=1)
        mbarrier.init(v_empty.index(c), count=CONSUMERS)
    fence_async_shared()  # The copy engine must see the barriers initialised.

    descs = (q_desc, k_desc, v_desc)
    bufs = (q_smem, k_smem, v_smem)
    bars = (q_full, k_full, k_empty, v_full, v_empty)
    job = (b, h, h // group, q_block * BLOCK_Q, n)
    outputs = (out, lse, (stride_b, stride_s, stride_h))
    g = sums
    if SUMS:
        g = sums + (h * m_blocks + q_block).to(gl.int64) * width * BLOCK_Q
    statistics = (g, entropy, distance)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (0, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv,
                        scale_log2, heads, D, BLOCK_Q, BLOCK_KV, ROWS, RAGGED, PIN, SUMS, ENTROPY,
                        DISTANCE)),
            (_consume, (1, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv,
                        scale_log2, heads, D, BLOCK_Q, BLOCK_KV, ROWS, RAGGED, PIN, SUMS, ENTROPY,
                        DISTANCE)),
            (_produce, (descs, bufs, bars, job, row_list, BLOCK_KV, CONSUMERS, ROWS)),
        ], [num_warps, 1], [REGS, 24])
    else:
        gl.warp_specialize([
            (_consume, (0, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv,
                        scale_log2, heads, D, BLOCK_Q, BLOCK_KV, ROWS, RAGGED, PIN, SUMS, ENTROPY,
                        DISTANCE)),
            (_produce, (descs, bufs, bars, job, row_list, BLOCK_KV, CONSUMERS, ROWS)),
        ], [1], [24])
    if TRACE:
        entry = record + ((b * heads + h).to(gl.int64) * slots + slot) * 3
        gl.store(entry, begin)
        gl.store(entry + 1, _clock())
        gl.store(entry + 2, _smid().to(gl.int64))
# fmt: on


def _tiles(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """``[B, S, H, D]`` as tiles ``[1, 1, rows, D]`` of ``[B, H, S, D]``; D is contiguous."""
    batch, length, heads, dim = x.shape
    block = [1, 1, rows, dim]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    strides = [x.stride(0), x.stride(2), x.stride(1), 1]
    return TensorDescriptor(x, [batch, heads, length, dim], strides, block, layout)


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """What a launch writes beside its attention; None for what it shouldn't.

    Attributes:
        sums: float32 ``[H, M, width, block_q]``: each (row, block)'s log-sum-exp, base 2, in
            visiting order. For one sequence; longer lists are cut at `width`.
        width: of `sums`.
        entropy: float32 ``[B, H, S_q]``, nats.
        distance: float32 ``[B, H, S_q]``, mean |i - j| in tokens.
    """

    sums: torch.Tensor | None = None
    width: int = 0
    entropy: torch.Tensor | None = None
    distance: torch.Tensor | None = None


def attend_rows_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    indices: torch.Tensor,
    record: torch.Tensor | None,
    scale_log2: float,
    block_q: int,
    block_kv: int,
    statistics: RowStatistics = RowStatistics(),
):
    """Launch the kernel.

    Args:
        q, out: ``[B, S_q, H, D]``, D contiguous.
        k, v: ``[B, S_kv, H_kv, D]``.
        lse: float32 ``[B, H, S_q]``, contiguous.
        table: int32 ``[H, slots]``, slot → query block; other query blocks are left alone.
        counts: int32 ``[H, M]``, K/V blocks of each query block.
        starts: int64 ``[H * M]``, where the list of each query block begins.
        indices: int32 ``[nnz]``.
        record: int64 ``[B * H * slots, 3]`` for start, end (ns) and SM of each CTA; None for none.
        scale_log2: log2(e) times the scale of the scores, positive.
        block_q, block_kv: tokens of a block.
        statistics: what else to write.
    """
    wanted = (statistics.sums, statistics.entropy, statistics.distance)
    batch, tokens_q, heads, dim = q.shape
    tokens_kv = k.shape[1]
    shape = CTA_SHAPES[block_q]
    _attend_rows[(table.shape[1], heads, batch)](
        _tiles(q, block_q // shape.consumers), _tiles(k, block_kv), _tiles(v, block_kv),
        out, lse, table, counts, starts, indices, lse if record is None else record,
        *(lse if t is None else t for t in wanted), statistics.width,
        *out.stride()[:3], tokens_q, tokens_kv, heads, heads // k.shape[2],
        counts.shape[1], scale_log2,
        D=dim, BLOCK_Q=block_q, BLOCK_KV=block_kv, K_STAGES=shape.k_stages,
        V_STAGES=shape.v_stages, CONSUMERS=shape.consumers, PIN=shape.pin,
        RAGGED=tokens_kv % block_kv != 0, TRACE=record is not None,
        SUMS=wanted[0] is not None, ENTROPY=wanted[1] is not None, DISTANCE=wanted[2] is not None,
        **shape.launch_options,
    )  # fmt: skip
