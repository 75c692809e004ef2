"""Is it the same attention? Against a float32 reference, with poisoned outputs, and poked."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wavealign.errors import WaveAlignError
from wavealign.gpu.execution import Execution
from wavealign.masks.block_mask import BlockMask

# bf16 operands leave 2^-9 per rounding of P and of O; fp16 an eighth of that.
_TOLERANCE_FRAC = {"bf16": 8e-3, "fp16": 1.5e-3}
_LSE_TOLERANCE = 2e-3


class WrongResultError(WaveAlignError, RuntimeError):
    """A kernel computed something else than block-sparse attention of the mask."""


@dataclass(frozen=True)
class Verdict:
    """How far a launch is from the reference.

    Attributes:
        error_frac: ``|out - reference| / |reference|``, Frobenius norms.
        lse_error: largest difference of a log-sum-exp.
    """

    error_frac: float
    lse_error: float


def check_launch(launch: Execution, reference: tuple[Tensor, Tensor], label: str) -> Verdict:
    """Run with poisoned outputs and compare.

    Args:
        launch: what runs.
        reference: output and LSE, from `reference_attention`.
        label: for messages.

    Raises:
        WrongResultError: elements that weren't written, or an error beyond rounding.
    """
    _poison(launch)
    out, lse = launch.attend()
    wanted, wanted_lse = reference
    if unwritten := int(torch.isnan(out).sum()):
        raise WrongResultError(f"{label}: {unwritten} elements of the output are NaN or unwritten.")
    error_frac = _relative_error(out, wanted)
    empty = torch.isneginf(wanted_lse)
    if not torch.equal(torch.isneginf(lse), empty):
        raise WrongResultError(f"{label}: LSE is -inf in other rows than those without blocks.")
    difference = (lse - wanted_lse)[~empty].abs()
    lse_error = float(difference.max()) if difference.numel() else 0.0
    dtype = launch.sizes.dtype
    limit = _TOLERANCE_FRAC[dtype]
    if not error_frac <= limit or not lse_error <= _LSE_TOLERANCE:
        raise WrongResultError(
            f"{label}: relative error {error_frac:.2e} (at most {limit:.0e} for {dtype}), "
            f"LSE off by {lse_error:.2e} (at most {_LSE_TOLERANCE:.0e})."
        )
    return Verdict(error_frac, lse_error)


def check_poke(launch: Execution, mask: BlockMask, label: str) -> None:
    """Poke V outside of the mask: rows that don't keep the poked block may not change by a bit.

    In each head the K/V block that most rows skip becomes NaN, so rows that keep it must turn
    NaN too. Nothing is checked where every row keeps every block.

    Args:
        launch: a schedule of this mask.
        mask: for every sequence.
        label: for messages.

    Raises:
        WrongResultError: a row read a V block that it doesn't keep, or not one that it does.
    """
    unpoked = launch.attend()[0].clone()
    poked = launch.inputs.v.clone()
    keeps = np.zeros((mask.H, mask.M), dtype=np.bool_)
    shared = launch.sizes.heads_per_kv_head
    for g in range(mask.H // shared):
        heads = slice(g * shared, (g + 1) * shared)
        kept = np.stack([mask.head(h).to_dense() for h in range(heads.start, heads.stop)])
        column = int(kept.sum((0, 1)).argmin())
        begin = column * mask.block_kv
        poked[:, begin : begin + mask.block_kv, g] = math.nan
        keeps[heads] = kept[..., column]
    out = launch.over(dataclasses.replace(launch.inputs, v=poked)).attend()[0]
    of_token = torch.from_numpy(keeps.repeat(mask.block_q, axis=1)[:, : mask.tokens_q].T.copy())
    reads = of_token.to(out.device)  # [tokens, H]
    changed = (out != unpoked).any(-1)  # NaN differs from everything
    if bool(changed[:, ~reads].any()):
        raise WrongResultError(f"{label}: rows changed with V blocks that they don't keep.")
    if not bool(changed[:, reads].all()):
        raise WrongResultError(f"{label}: rows didn't change with V blocks that they keep.")


def _poison(launch: Execution) -> None:
    for buffer in launch.buffers:
        buffer.fill_(math.nan)
    if not launch.buffers:
        # The kernel allocates its output: leave NaN where the allocator will look first.
        q = launch.attend()[0]
        trap = [torch.full_like(q, math.nan) for _ in range(3)]
        del trap


def _relative_error(out: Tensor, wanted: Tensor) -> float:
    """By sequence and head in turn, so that no second float32 copy of the output is made."""
    squares = norm = 0.0
    for b in range(out.shape[0]):
        for h in range(out.shape[2]):
            difference = out[b, :, h].float() - wanted[b, :, h]
            squares += float(difference.square().sum(dtype=torch.float64))
            norm += float(wanted[b, :, h].square().sum(dtype=torch.float64))
    return math.sqrt(squares / norm) if norm else math.sqrt(squares)
