"""Where an enabled transformer's masks come from: functions of Q and K."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch


class MaskFunction(Protocol):
    """How a mask comes from Q and K.

    One with a parameter ``text_tokens`` is also told how many tokens of text end the sequence.
    """

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """From ``[B, tokens, H, D]`` to bool ``[H, M, N]`` or ``[B, H, M, N]``."""
        ...


def named_method(name: str, params: Any = None) -> MaskFunction:
    """A method of `wavealign.methods` as a function of Q, K and text tokens; it can be pickled.

    Raises:
        InputError: an unknown method.
    """
    from wavealign import methods

    methods.find_method(name)
    return functools.partial(_masks, name, params)


def takes_text(function: Callable[..., Any]) -> bool:
    """Whether a mask function is to be told how many tokens of text there are."""
    try:
        return "text_tokens" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin has no signature
        return False


def _masks(
    name: str, params: Any, q: torch.Tensor, k: torch.Tensor, text_tokens: int = 0
) -> torch.Tensor:
    from wavealign import methods
    from wavealign.methods.context import HeadContext

    context = HeadContext(0, q.shape[1], text_tokens=text_tokens)
    return methods.head_masks(name, q, k, params, context)
