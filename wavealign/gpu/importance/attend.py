"""Attention that says how much each K/V block mattered: the search step of GSRS.

The importance of block (u, v) is the mean over the queries of block u of the attention that they
give to the keys of block v,

    W[u, v] = 1/|u| · Σ_{i in u} exp(G[i, v] - L[i]),   G[i, v] = log Σ_{j in v} exp(z[i, j]),

with z = q·k/√D and L[i] the log-sum-exp of row i over the keys evaluated in this very call, so a
row of W sums to 1 over the evaluated blocks (GSRS, "Sparse Attention for Video Generation
Acceleration via Growing Sparsity and Reduced Search", eq. 5 and appendix A.2). With a
`reference_lse` of an earlier step in L's place the row sums to something else: AdaSpa's one-pass
search (arXiv 2502.21079).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavealign._extras import installed, require
from wavealign.errors import InputError, MissingCapabilityError, unknown_name
from wavealign.gpu.importance.call import SCRATCH_BYTES, Call, Importance
from wavealign.gpu.importance.chunked import attend_chunked
from wavealign.planning import DeviceSchedule

KERNELS = ("auto", "hopper", "triton", "torch")
_PREFERRED = ("hopper", "triton")  # by "auto" on a GPU, in this order
_TRITON_SIZES = (64, 128)  # of blocks and of heads


def attend_with_importance(
    q: Tensor, k: Tensor, v: Tensor, *, block: tuple[int, int] = (128, 128),
    candidates: Tensor | None = None, schedule: DeviceSchedule | None = None,
    reference_lse: Tensor | None = None, diagnostics: bool = False, diagnose_every: int = 1,
    positions: Tensor | None = None, kernel: str = "auto", scratch_bytes: int = SCRATCH_BYTES,
) -> Importance:  # fmt: skip
    """Attention over all blocks, or over candidates, with the importance of each; scale 1/√D.

    A NaN in q or k makes the rows that meet it NaN: output, LSE, and the importance of every
    evaluated block of their query block.

    Args:
        q: ``[B, tokens_q, H, D]``.
        k, v: ``[B, tokens_kv, H_kv, D]``; H_kv divides H (GQA).
        block: tokens of a query and of a K/V block; the last ones may be ragged.
        candidates: bool ``[H, M, N]``, ``[1, H, M, N]`` or ``[B, H, M, N]``, the blocks to
            evaluate; None for all.
        schedule: of `wavealign.planning.Planner`, in its default layout, for H or B·H heads: the
            candidates with the order of rows and visits, in place of `candidates`.
        reference_lse: float32 ``[B, H, tokens_q]`` to normalise the importance by, in place of
            this call's own LSE; output and LSE stay those of this call.
        diagnostics: also entropy and mean attention distance of the rows.
        diagnose_every: n for those of query blocks 0, n, 2n, ... alone, exact there and NaN
            elsewhere: on a GPU the other blocks then don't pay for them. 1 for every row.
        positions: ``[tokens, axes]`` coordinates of the tokens, at most 3 axes, in sequence
            order: distances are then Euclidean in them, in place of |i - j|.
        kernel: ``"triton"`` (bf16 and fp16, head_dim 64 and 128, blocks of 64 and 128 tokens),
            ``"hopper"`` (the same on compute capability 9.0, but distances in positions),
            ``"torch"`` (any float dtype, any device, in chunks), or ``"auto"``: on a GPU the first
            of hopper and triton that can, else torch.
        scratch_bytes: of a GPU's block log-sum-exps, ``4·block_q·M·width`` bytes a head (width:
            the longest list that fits, N without a schedule). Heads are taken in as few rounds as
            fit, one head at least (one K/V head's query heads by ``"hopper"``).

    Raises:
        InputError: what doesn't fit together.
        MissingCapabilityError: a kernel is asked for where it can't run.
    """
    call = Call(
        q, k, v, block, candidates, schedule, reference_lse, diagnostics, diagnose_every, positions
    )
    if kernel not in KERNELS:
        raise unknown_name("kernel", kernel, KERNELS)
    if kernel == "auto":
        fits = q.is_cuda and installed("triton")
        able = [k for k in _PREFERRED if fits and _lacks(k, q) is None and not _refusal(k, call)]
        kernel = able[0] if able else "torch"
    if kernel == "torch":
        with torch.autocast(q.device.type, enabled=False):
            return attend_chunked(call)
    if reason := _refusal(kernel, call):
        raise InputError(f"kernel='{kernel}' {reason}; kernel='torch' takes it.")
    require("triton", "gpu", f"kernel='{kernel}'")
    if lacking := _lacks(kernel, q):
        raise MissingCapabilityError(
            f"kernel='{kernel}' needs {lacking}; kernel='torch' computes the same anywhere."
        )
    from wavealign.gpu.importance.launch import Search

    return Search(call, scratch_bytes, hopper=kernel == "hopper").run()


def _refusal(kernel: str, call: Call) -> str | None:
    """Why a kernel doesn't take a call, in words."""
    dtype, D = str(call.q.dtype).removeprefix("torch."), call.q.shape[3]
    if dtype not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, not {dtype}"
    if D not in _TRITON_SIZES:
        return f"takes head dimensions 64 and 128, not {D}"
    if not set(call.block) <= set(_TRITON_SIZES):
        return f"takes blocks of 64 and 128 tokens, not {call.block_q}x{call.block_kv}"
    if kernel == "hopper" and call.diagnostics and call.positions is not None:
        return "has no distances in positions"
    return None


def _lacks(kernel: str, q: Tensor) -> str | None:
    """What a kernel needs and there isn't; None if nothing. Triton may be interpreted."""
    if not q.is_cuda:
        import triton

        if kernel == "triton" and triton.knobs.runtime.interpret:
            return None
        return f"q, k and v on an NVIDIA GPU, they are on {q.device}"
    if kernel == "hopper" and torch.cuda.get_device_capability(q.device)[0] != 9:
        return "a GPU of compute capability 9.0"
    return None
