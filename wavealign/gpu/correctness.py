"""Is it the same attention? Against a float32 reference, with poisoned outputs, and poked."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wavealign._blocks import fold_columns
from wavealign.errors import WaveAlignError
from wavealign.gpu.execution import Execution
from wavealign.masks.block_mask import BlockMask

# bf16 operands leave 2^-9 per rounding of P and of O; fp16 an eighth of that.
_TOLERANCE_FRAC = {"bf16": 8e-3, "fp16": 1.5e-3}
_LSE_TOLERANCE = 2e-3
# A row whose values cancel keeps the rounding of what cancelled: its error is measured by no less
# than this share of its head's root mean square.
_LEAST_SCALE_FRAC = 1 / 16


class WrongResultError(WaveAlignError, RuntimeError):
    """A kernel computed something else than block-sparse attention of the mask."""


@dataclass(frozen=True)
class Verdict:
    """How far a launch is from the reference.

    Attributes:
        error_frac: ``|out - reference| / |reference|``, Frobenius norms.
        lse_error: largest difference of a log-sum-exp.
        row_error_frac: the same as `error_frac` of the row that is worst, by which a launch is
            judged; of no less than a sixteenth of its head's root mean square.
        worst_row: its sequence, head and query block.
    """

    error_frac: float
    lse_error: float
    row_error_frac: float
    worst_row: tuple[int, int, int]


def check_launch(launch: Execution, reference: tuple[Tensor, Tensor], label: str) -> Verdict:
    """Run with poisoned outputs and compare.

    Args:
        launch: what runs.
        reference: output and LSE, from `reference_attention`.
        label: for messages.

    Raises:
        WrongResultError: elements that weren't written, or a row with an error beyond rounding.
    """
    _poison(launch)
    out, lse = launch.attend()
    wanted, wanted_lse = reference
    if unwritten := int(torch.isnan(out).sum()):
        raise WrongResultError(f"{label}: {unwritten} elements of the output are NaN or unwritten.")
    error_frac, rows = _relative_errors(out, wanted, launch.sizes.block_q)
    worst = int(rows.argmax())
    b, h, i = (int(axis) for axis in np.unravel_index(worst, rows.shape))
    row_error_frac = float(rows[b, h, i])
    empty = torch.isneginf(wanted_lse)
    if not torch.equal(torch.isneginf(lse), empty):
        raise WrongResultError(f"{label}: LSE is -inf in other rows than those without blocks.")
    difference = (lse - wanted_lse)[~empty].abs()
    lse_error = float(difference.max()) if difference.numel() else 0.0
    dtype = launch.sizes.dtype
    limit = _TOLERANCE_FRAC[dtype]
    if not row_error_frac <= limit or not lse_error <= _LSE_TOLERANCE:
        raise WrongResultError(
            f"{label}: relative error {row_error_frac:.2e} in query block {i} of head {h}, "
            f"sequence {b} (at most {limit:.0e} for {dtype}), {error_frac:.2e} overall, "
            f"LSE off by {lse_error:.2e} (at most {_LSE_TOLERANCE:.0e})."
        )
    return Verdict(error_frac, lse_error, row_error_frac, (b, h, i))


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


def _relative_errors(out: Tensor, wanted: Tensor, block: int) -> tuple[float, Tensor]:
    """Overall, and of each row, ``[B, H, M]``.

    By sequence and head in turn, so that no second float32 copy of the output is made.
    """
    B, tokens, H, _ = out.shape
    lengths = fold_columns(wanted.new_ones(tokens, dtype=torch.float64), block)
    squares = wanted.new_empty(2, B, H, len(lengths), dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            difference = out[b, :, h].float() - wanted[b, :, h]
            for kind, values in enumerate((difference, wanted[b, :, h])):
                of_tokens = values.square().sum(-1, dtype=torch.float64)
                squares[kind, b, h] = fold_columns(of_tokens, block)
    (wrong, norm), whole = squares, squares.sum((1, 2, 3)).tolist()
    least = _LEAST_SCALE_FRAC**2 * norm.sum(-1, keepdim=True) / tokens * lengths
    rows = torch.where(wrong == 0, 0.0, wrong / torch.maximum(norm, least)).sqrt().cpu()
    return math.sqrt(whole[0] / whole[1]) if whole[1] else math.sqrt(whole[0]), rows
