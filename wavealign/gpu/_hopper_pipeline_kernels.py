"""What the warps of a CTA do: one loads blocks, the others compute attention (Hopper, in Gluon).

A producer warp copies K and V blocks into rings in shared memory by TMA. Each consumer, four warps,
computes 64 query rows and overlaps the softmax of a block with the second product of the last one.
"""

# gluon.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wavealign.gpu._hopper_statistics_kernels import (
    block_travel,
    column_sums,
    fast_log2,
    store_block_sums,
)


# fmt: off
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
def produce(descs, bufs, bars, job, row_list, BLOCK_KV: gl.constexpr, CONSUMERS: gl.constexpr,
             ROWS: gl.constexpr):
    """The producer warp: loads K(i + 1), then V(i), in the order in which they are needed."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem = bufs
    q_full, k_full, k_empty, v_full, v_empty = bars
    b, h, hkv, row, n, _ = job
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
def _attend(w: gl.constexpr, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv,
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
    b, h, _, row, n, _ = job
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


@gluon.jit
def consume(w: gl.constexpr, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv,
            scale_log2, heads, D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
            ROWS: gl.constexpr, RAGGED: gl.constexpr, PIN: gl.constexpr, SUMS: gl.constexpr,
            ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, SAMPLED: gl.constexpr):
    """A consumer's four warps.

    SAMPLED: entropy and distance only where the job says so. Both loops are there, and the one
    without accumulators doesn't pay for them.
    """
    if SAMPLED:
        if job[5]:
            _attend(w, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv, scale_log2,
                    heads, D, BLOCK_Q, BLOCK_KV, ROWS, RAGGED, PIN, SUMS, ENTROPY, DISTANCE)
        else:
            _attend(w, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv, scale_log2,
                    heads, D, BLOCK_Q, BLOCK_KV, ROWS, RAGGED, PIN, SUMS, False, False)
    else:
        _attend(w, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv, scale_log2,
                heads, D, BLOCK_Q, BLOCK_KV, ROWS, RAGGED, PIN, SUMS, ENTROPY, DISTANCE)
# fmt: on
