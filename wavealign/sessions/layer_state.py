"""What a session knows of one layer of one branch, and whether a call goes on from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from wavealign.attention.plans import Plan, Prepared
from wavealign.errors import InputError
from wavealign.sessions.rule import Memory
from wavealign.sessions.tokens import TokenOrder

Signature = tuple[torch.Size, torch.dtype, torch.device, int]
"""Shape, dtype and device of q, and the tokens of text."""


@dataclass(frozen=True, eq=False)
class LayerState:
    """One layer of one branch, replaced as a whole after a call that went well.

    Attributes:
        signature: of its calls.
        order: of the tokens.
        prepared: what its plans have in common.
        next_step: the one that is expected; 0 only before the first call has ended.
        thread: of the last call.
        memory: the rule's; candidates as packed bits.
        plan: of the blocks in use; None before the first search.
        keep: these blocks, packed.
        first_policies: of the first plan, one a head; empty before it.
    """

    signature: Signature
    order: TokenOrder
    prepared: Prepared
    next_step: int = 0
    thread: int = 0
    memory: Memory = dataclasses.field(default_factory=Memory)
    plan: Plan | None = None
    keep: torch.Tensor | None = None
    first_policies: tuple[str, ...] = ()


def check_step(where: str, step: int, state: LayerState | None, steps: int) -> None:
    """Raise unless a step is the next one.

    Args:
        where: layer and branch, for messages.
        step: of the call.
        state: None before the first call.
        steps: of a run.

    Raises:
        InputError: a step beyond the run, called twice, or skipped.
    """
    expected = state.next_step if state is not None else 0
    if not 0 <= step < steps:
        raise InputError(
            f"{where}: step {step} of a run of {steps} steps (0 to {steps - 1}); another run "
            "begins with reset()."
        )
    if step < expected:
        raise InputError(
            f"{where}: step {step} was done already; expected step {expected}. Another run "
            "begins with reset()."
        )
    if step > expected:
        raise InputError(
            f"{where}: step {step} skips step {expected}; expected a call at every step. A cache "
            "that skips layers can't run with a session, nor guidance that begins late or pauses, "
            "nor a text that changes within the run."
        )


def told(signature: Signature) -> str:
    """A signature in words."""
    shape, dtype, device, text_tokens = signature
    text = f" with {text_tokens} tokens of text" if text_tokens else ""
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}{text}"
