"""What a sparse method does at each step of a denoising run: the frame that all of them share.

A method is a `Rule`: at a step it attends to everything ("full"), looks for the blocks that
matter ("search"), or attends to the blocks found before ("reuse"). What it remembers between
searches is a `Memory`; `wavealign.sessions` keeps one for each layer and branch, orders tokens,
plans schedules and runs the kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from wavealign.errors import InputError
from wavealign.numbers import whole_number, whole_numbers
from wavealign.planning import DeviceSchedule

Action = Literal["full", "search", "reuse"]


def run_length(steps: int) -> int:
    """How many steps a run has.

    Raises:
        InputError: no whole number, or none at all.
    """
    if whole_number("steps", steps) < 1:
        raise InputError(f"a run of {steps} steps; expected at least 1.")
    return whole_number("steps", steps)


class SearchesAtSteps:
    """What a rule, a frozen dataclass, does when if it searches at given steps.

    Attributes:
        search_steps: ascending, counted from 0. Up to the first of them attention is full.
        steps: of the run.
    """

    search_steps: Sequence[int]
    steps: int

    def check_steps(self) -> None:
        """Make them ints.

        Raises:
            InputError: no search step, steps out of order or beyond the run, or what is no step.
        """
        object.__setattr__(self, "search_steps", whole_numbers("search steps", self.search_steps))
        object.__setattr__(self, "steps", run_length(self.steps))
        found = list(self.search_steps)
        if not found:
            raise InputError("search steps: none; expected at least one.")
        if any(b <= a for a, b in itertools.pairwise(found)):
            raise InputError(f"search steps {found} are out of order; expected them ascending.")
        if found[0] < 0 or found[-1] >= self.steps:
            raise InputError(
                f"search steps {found} of a run of {self.steps} steps; expected 0 to "
                f"{self.steps - 1}. Is steps={self.steps} right?"
            )

    def action(self, step: int) -> Action:
        """See `Rule.action`."""
        if step < self.search_steps[0]:
            return "full"
        return "search" if step in self.search_steps else "reuse"

    def uses(self, step: int) -> int:
        """See `Rule.uses`."""
        later = [s for s in self.search_steps if s > step]
        return (later[0] if later else self.steps) - step - 1


@dataclass(frozen=True, eq=False)
class StepCall:
    """Queries, keys and values of one layer and branch at a step, in token order.

    Attributes:
        step: from 0.
        q, k, v: ``[B, L, H, D]``.
        block: tokens of a query and of a K/V block.
        text_tokens: at the end of the sequence.
        schedule: the memory's candidates with an order of rows and visits, where one was planned.
    """

    step: int
    q: Tensor
    k: Tensor
    v: Tensor
    block: tuple[int, int]
    text_tokens: int = 0
    schedule: DeviceSchedule | None = None


@dataclass(frozen=True, eq=False)
class Memory:
    """What a rule remembers between searches.

    Attributes:
        candidates: bool ``[B, H, M, N]``, the blocks that later searches look at; None for all.
        lse: float32 ``[B, H, L]``, log-sum-exp of an earlier step.
    """

    candidates: Tensor | None = None
    lse: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Found:
    """What a search gives.

    Attributes:
        out: attention of this step, ``[B, L, H, D]``.
        keep: bool ``[B, H, M, N]``, the blocks of the next steps.
        memory: for the next search.
        finite: bool, 0-dimensional, on the device: whether all scores were numbers.
        otherwise: what it means if they weren't.
    """

    out: Tensor
    keep: Tensor
    memory: Memory
    finite: Tensor
    otherwise: str = "NaN or infinity in the scores of q and k; expected finite numbers"


class Rule(Protocol):
    """A method over the steps of a run."""

    takes_schedule: ClassVar[bool]
    """Whether its searches attend to the memory's candidates, and so can read them in order."""

    @property
    def name(self) -> str:
        """As in ``wavealign.sessions.SESSIONS``."""

    @property
    def steps(self) -> int:
        """Of the run."""

    def action(self, step: int) -> Action:
        """What is done at a step."""

    def uses(self, step: int) -> int:
        """Steps that reuse what is found at this step."""

    def search(self, call: StepCall, memory: Memory, attend: Callable[[], Tensor]) -> Found:
        """Attend and look for the blocks of the next steps.

        Args:
            call: the step's inputs.
            memory: what the last search left.
            attend: attention over the blocks found last (all, before the first search), for
                rules that don't compute it themselves.
        """


def all_finite(*tensors: Tensor) -> Tensor:
    """Whether no tensor holds NaN or +inf, 0-dimensional, on the device; -inf counts as a number.

    A row that attends to nothing has log-sum-exp -inf.
    """
    flags = [(t < float("inf")).all() for t in tensors]
    return torch.stack(flags).all()


def spread_nan(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to some blocks with the NaN that skipped ones would have brought, in place.

    A query that holds NaN or infinity makes its row NaN, a key or value its whole head: for
    infinity more rows than attention to everything would. The host doesn't wait.

    Args:
        out, q: ``[B, L, H, D]``.
        k, v: the same, or a divisor of the heads.
    """
    rows, keys, values = (
        0 * torch.linalg.vector_norm(x, torch.inf, dim)  # 0, or NaN
        for x, dim in ((q, (3,)), (k, (1, 3)), (v, (1, 3)))
    )
    heads = (keys + values).repeat_interleave(q.shape[2] // k.shape[2], 1)
    return out.add_((rows + heads[:, None])[..., None])
