"""A call of `attend_with_importance`, checked, and what it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wavealign._devices import need_elements
from wavealign.errors import InputError
from wavealign.gpu.inputs import refuse_derivatives
from wavealign.numbers import block_size, whole_number
from wavealign.planning import DeviceSchedule

SCRATCH_BYTES = 8 * 2**30
"""Of a GPU's block log-sum-exps, by default."""

_MOST_AXES = 3


@dataclass(frozen=True, eq=False)
class Importance:
    """Attention over the evaluated blocks, and what it says of them.

    Rows without a key: output 0, LSE -inf, importance, entropy and distance 0.

    Attributes:
        out: ``[B, L, H, D]``, dtype of q.
        lse: float32 ``[B, H, L]``, natural logarithm, over the evaluated keys.
        weights: float32 ``[B, H, M, N]``: W; 0 for blocks that weren't evaluated.
        entropy: float32 ``[B, H, L]``, nats: LSE - E[z]; NaN in query blocks that
            `diagnose_every` left out; None unless asked for.
        distance: float32 ``[B, H, L]``: Σ_j w[i, j]·|i - j| in tokens, or in the units of the
            positions that were given; NaN and None like the entropy.
    """

    out: Tensor
    lse: Tensor
    weights: Tensor
    entropy: Tensor | None = None
    distance: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call; see `attend_with_importance` for what its attributes mean.

    Attributes:
        q: ``[B, tokens_q, H, D]``.
        k, v: ``[B, tokens_kv, H_kv, D]``.
        block: tokens of a query and of a K/V block.
        candidates: bool ``[1 or B, H, M, N]``, also given as ``[H, M, N]``; None for all blocks.
        schedule: the candidates as lists; None where there is no order to keep.
        reference_lse: float32 ``[B, H, tokens_q]`` or None.
        diagnostics: whether entropy and distance are wanted.
        diagnose_every: of the query blocks 0, n, 2n, ...
        positions: float ``[tokens, axes]`` or None.

    Raises:
        InputError: what doesn't fit together.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block: tuple[int, int] = (128, 128)
    candidates: Tensor | None = None
    schedule: DeviceSchedule | None = None
    reference_lse: Tensor | None = None
    diagnostics: bool = False
    diagnose_every: int = 1
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        _check_sequences(self.q, self.k, self.v)
        object.__setattr__(self, "block", block_size(self.block))
        if whole_number("diagnose_every", self.diagnose_every) < 1:
            raise InputError(f"diagnose_every={self.diagnose_every}; expected at least 1.")
        if self.diagnose_every > 1 and not self.diagnostics:
            raise InputError(f"diagnose_every={self.diagnose_every} without diagnostics=True.")
        if self.candidates is not None and self.candidates.ndim == 3:
            object.__setattr__(self, "candidates", self.candidates[None])
        _check_blocks(self)
        _check_rows(self)

    @property
    def block_q(self) -> int:
        """Tokens of a query block."""
        return self.block[0]

    @property
    def block_kv(self) -> int:
        """Tokens of a K/V block."""
        return self.block[1]

    @property
    def M(self) -> int:  # noqa: N802
        """Query blocks."""
        return math.ceil(self.q.shape[1] / self.block_q)

    @property
    def N(self) -> int:  # noqa: N802
        """K/V blocks."""
        return math.ceil(self.k.shape[1] / self.block_kv)

    def blocks_of_lists(self) -> Tensor | None:
        """The candidates, bool ``[1 or B, H, M, N]``; made of the schedule where there is one."""
        if self.schedule is None:
            return self.candidates
        counts, starts = self.schedule.counts, self.schedule.starts
        heads, M = counts.shape
        N, lists = self.N, self.schedule.indices.reshape(-1)
        places = torch.arange(N, device=counts.device)
        at = (starts[:, None] + places).clamp_max(lists.shape[0] - 1)
        held = torch.where(places < counts.reshape(-1, 1), lists[at].long(), N)
        blocks = torch.zeros(heads * M, N + 1, dtype=torch.bool, device=counts.device)
        blocks.scatter_(-1, held, True)
        return blocks[:, :N].reshape(-1, self.q.shape[2], M, N)


def _check_sequences(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        refuse_derivatives(name, tensor)
        need_elements(name, tensor)
        if tensor.ndim != 4 or 0 in tensor.shape:
            raise InputError(f"{name} is {list(tensor.shape)}; expected [B, tokens, heads, D].")
        if not tensor.is_floating_point():
            raise InputError(f"{name} is {tensor.dtype}; expected a floating-point dtype.")
        if tensor.dtype != q.dtype:
            raise InputError(f"{name} is {tensor.dtype}, q is {q.dtype}; expected the same.")
        _same_device(name, tensor, q)
    B, _, H, D = q.shape
    if k.shape != v.shape:
        raise InputError(f"k and v differ in shape ({list(k.shape)} and {list(v.shape)}).")
    if k.shape[0] != B or k.shape[3] != D or H % k.shape[2]:
        raise InputError(
            f"q is {list(q.shape)}, k and v are {list(k.shape)}; expected [B, tokens, heads, D] "
            "with the same B and D, and K/V heads that divide the query heads."
        )


def _check_blocks(call: Call) -> None:
    B, _, H, _ = call.q.shape
    candidates, schedule = call.candidates, call.schedule
    if candidates is not None and schedule is not None:
        raise InputError("candidates and a schedule; expected one of them.")
    if candidates is not None:
        if candidates.dtype != torch.bool:
            raise InputError(f"candidates are {candidates.dtype}; expected torch.bool.")
        if tuple(candidates.shape) not in ((B, H, call.M, call.N), (1, H, call.M, call.N)):
            raise InputError(
                f"candidates are {list(candidates.shape)}; expected [{B} or 1, {H}, {call.M}, "
                f"{call.N}] for {call.q.shape[1]} queries and {call.k.shape[1]} keys in blocks of "
                f"{call.block_q}x{call.block_kv}."
            )
        _same_device("candidates", candidates, call.q)
    if schedule is not None:
        shape = tuple(schedule.counts.shape)
        if shape not in ((H, call.M), (B * H, call.M)):
            raise InputError(
                f"the schedule is for {list(shape)} heads and query blocks; expected "
                f"[{H} or {B * H}, {call.M}]."
            )
        if (schedule.layout.rows, schedule.layout.walks) != ("table", "forwards"):
            raise InputError(
                "the schedule is for a kernel that gathers rows or walks backwards; plan with the "
                "default layout."
            )
        _same_device("the schedule", schedule.counts, call.q)


def _check_rows(call: Call) -> None:
    """What is given a query each: log-sum-exps and positions."""
    B, tokens, H, _ = call.q.shape
    reference, positions = call.reference_lse, call.positions
    if reference is not None:
        if tuple(reference.shape) != (B, H, tokens):
            raise InputError(
                f"reference_lse is {list(reference.shape)}; expected [B, H, tokens] = "
                f"{[B, H, tokens]}."
            )
        _same_device("reference_lse", reference, call.q)
    if positions is not None:
        wanted = f"expected [{tokens}, axes] with 1 to {_MOST_AXES} axes"
        if positions.ndim != 2 or positions.shape[0] != tokens:
            raise InputError(f"positions are {list(positions.shape)}; {wanted}.")
        if not 1 <= positions.shape[1] <= _MOST_AXES:
            raise InputError(f"positions have {positions.shape[1]} axes; {wanted}.")
        if call.k.shape[1] != tokens:
            raise InputError(
                f"positions for {tokens} queries and {call.k.shape[1]} keys; expected "
                "self-attention, as many of both."
            )
        _same_device("positions", positions, call.q)


def _same_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise InputError(f"{name} is on {tensor.device}, q on {q.device}; expected the same.")
