"""Block-sparse attention for Hopper in Gluon: TMA, warp specialisation, overlapped softmax.

One CTA per (launch slot, head, sequence), slots fastest and not persistent, so that the hardware's
launch order is the row order of the schedule. A CTA reads query block ``table[head, slot]``, walks
its K/V blocks from first to last, and writes its rows in place: nothing is moved.
"""

# gluon.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wavealign._devices import on_device
from wavealign.gpu._hopper_pipeline_kernels import consume, produce


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


# By block_q, as measured on an H200 (docs/results/h200.md).
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


@gluon.jit(do_not_specialize=["s_q", "s_kv", "heads", "group", "width", "m_blocks", "every"])
def _attend_rows(q_desc, k_desc, v_desc, out, lse, table, counts, starts, indices, record,
                 sums, entropy, distance, width, every, stride_b, stride_s, stride_h, s_q, s_kv,
                 heads, group, m_blocks, scale_log2,
                 D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
                 K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
                 PIN: gl.constexpr, RAGGED: gl.constexpr, TRACE: gl.constexpr,
                 SUMS: gl.constexpr, ENTROPY: gl.constexpr, DISTANCE: gl.constexpr,
                 SAMPLED: gl.constexpr, REGS: gl.constexpr, num_warps: gl.constexpr):
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
    job = (b, h, h // group, q_block * BLOCK_Q, n, q_block % every == 0)
    outputs = (out, lse, (stride_b, stride_s, stride_h))
    g = sums
    if SUMS:
        g = sums + (h * m_blocks + q_block).to(gl.int64) * width * BLOCK_Q
    statistics = (g, entropy, distance)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv,
                       scale_log2, heads, D, BLOCK_Q, BLOCK_KV, ROWS, RAGGED, PIN, SUMS, ENTROPY,
                       DISTANCE, SAMPLED)),
            (consume, (1, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv,
                       scale_log2, heads, D, BLOCK_Q, BLOCK_KV, ROWS, RAGGED, PIN, SUMS, ENTROPY,
                       DISTANCE, SAMPLED)),
            (produce, (descs, bufs, bars, job, row_list, BLOCK_KV, CONSUMERS, ROWS)),
        ], [num_warps, 1], [REGS, 24])
    else:
        gl.warp_specialize([
            (consume, (0, bufs, bars, job, row_list, outputs, statistics, s_q, s_kv,
                       scale_log2, heads, D, BLOCK_Q, BLOCK_KV, ROWS, RAGGED, PIN, SUMS, ENTROPY,
                       DISTANCE, SAMPLED)),
            (produce, (descs, bufs, bars, job, row_list, BLOCK_KV, CONSUMERS, ROWS)),
        ], [1], [24])
    if TRACE:
        entry = record + ((b * heads + h).to(gl.int64) * slots + slot) * 3
        gl.store(entry, begin)
        gl.store(entry + 1, _clock())
        gl.store(entry + 2, _smid().to(gl.int64))
# fmt: on


def _tiles(x: Tensor, rows: int) -> TensorDescriptor:
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
        every: entropy and distance of query blocks 0, n, 2n, ... only; those of others are not
            written.
    """

    sums: Tensor | None = None
    width: int = 0
    entropy: Tensor | None = None
    distance: Tensor | None = None
    every: int = 1


def attend_rows_hopper(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor, counts: Tensor,
    starts: Tensor, indices: Tensor, record: Tensor | None, scale_log2: float, block_q: int,
    block_kv: int, statistics: RowStatistics = RowStatistics(),
):  # fmt: skip
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
    with on_device(q):
        _attend_rows[(table.shape[1], heads, batch)](
            _tiles(q, block_q // shape.consumers), _tiles(k, block_kv), _tiles(v, block_kv),
            out, lse, table, counts, starts, indices, lse if record is None else record,
            *(lse if t is None else t for t in wanted), statistics.width, statistics.every,
            *out.stride()[:3], tokens_q, tokens_kv, heads, heads // k.shape[2],
            counts.shape[1], scale_log2,
            D=dim, BLOCK_Q=block_q, BLOCK_KV=block_kv, K_STAGES=shape.k_stages,
            V_STAGES=shape.v_stages, CONSUMERS=shape.consumers, PIN=shape.pin,
            RAGGED=tokens_kv % block_kv != 0, TRACE=record is not None,
            SUMS=wanted[0] is not None, ENTROPY=wanted[1] is not None,
            DISTANCE=wanted[2] is not None, SAMPLED=statistics.every > 1,
            **shape.launch_options,
        )  # fmt: skip
