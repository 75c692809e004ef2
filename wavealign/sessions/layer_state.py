"""What a session knows of one layer of one branch, and whether a call goes on from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from wavealign.attention.plans import Plan, Prepared
from wavealign.errors import InputError
from wavealign.sessions.rule import Memory
from wavealign.sessions.tokens import TokenOrder


@dataclass(frozen=True, eq=False)
class LayerState:
    """One layer of one branch, replaced as a whole after a call that went well.

    Attributes:
        signature: shape, dtype and device of its calls, and their tokens of text.
        order: of the tokens.
        prepared: what its plans have in common.
        next_step: the one that is expected.
        memory: the rule's; candidates as packed bits.
        plan: of the blocks in use; None before the first search.
        keep: these blocks, packed.
        first_policies: of the first plan, one a head; empty before it.
    """

    signature: tuple[object, ...]
    order: TokenOrder
    prepared: Prepared
    next_step: int = 0
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
            f"{where}: step {step} of a run of {steps} steps (0 to "
            f"{steps - 1}); another run begins with reset()."
        )
    if step < expected:
        raise InputError(
            f"{where}: step {step} was done already; expected step {expected}. Another run "
            "begins with reset()."
        )
    if step > expected:
        raise InputError(f"{where}: step {step} skips step {expected}.")


def check_signature(
    where: str, step: int, state: LayerState, signature: tuple[object, ...]
) -> None:
    """Raise unless a call is like the ones before it.

    Args:
        where: of the call, for the message.
        step: of the call.
        state: what is known of the layer.
        signature: of the call.

    Raises:
        InputError: another shape, dtype, device or number of text tokens.
    """
    if state.signature != signature:
        raise InputError(
            f"{where}: q is {_told(signature)} at step {step} and was "
            f"{_told(state.signature)} before; expected the same to the end of the run. "
            "Another run begins with reset()."
        )


def _told(signature: tuple[object, ...]) -> str:
    shape, dtype, device, text_tokens = signature
    assert isinstance(shape, tuple)
    text = f" with {text_tokens} tokens of text" if text_tokens else ""
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}{text}"
