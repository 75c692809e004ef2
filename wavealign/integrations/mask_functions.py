"""Where an enabled transformer's masks come from: functions of Q and K."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from wavealign.errors import InputError
from wavealign.methods.registry import find_method
from wavealign.numbers import block_size


class MaskFunction(Protocol):
    """How a mask comes from Q and K.

    One with a parameter ``text_tokens`` is also told how many tokens of text end the sequence.
    """

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """From ``[B, tokens, H, D]`` to bool ``[H, M, N]`` or ``[B, H, M, N]``."""
        ...


def checked_function(method: MaskFunction, params: Any = None) -> MaskFunction:
    """The mask function that was given.

    Raises:
        InputError: what can't be called with Q and K, or parameters beside it.
    """
    if not callable(method):
        raise InputError(
            f"method is {type(method).__name__}; expected a method's name, or a function of Q and "
            "K that returns a mask."
        )
    if params is not None:
        raise InputError(f"params={params} beside a function, which has its own; leave it out.")
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # a builtin has none
        return method
    told = {"text_tokens": 0} if takes_text(method) else {}
    try:
        signature.bind(None, None, **told)
    except TypeError as problem:
        raise InputError(
            f"the mask function can't be called with Q and K ({problem}); expected (q, k), or (q, "
            "k, text_tokens)."
        ) from problem
    return method


def named_method(name: str, params: Any = None) -> MaskFunction:
    """A method of `wavealign.methods` as a function of Q, K and text tokens; it can be pickled.

    Raises:
        InputError: an unknown method, one that doesn't look at Q and K, or parameters of another.
    """
    chosen = find_method(name)
    params = chosen.settings(params)
    if not chosen.needs_qk:
        raise InputError(
            f"{name} doesn't look at Q and K; expected a method that does, or a function that "
            "returns a mask made beforehand: lambda q, k: mask."
        )
    return functools.partial(_masks, name, params)


def block_of(
    method: str | MaskFunction, params: Any, block: tuple[int, int] | None
) -> tuple[int, int]:
    """The block of the masks: a method's own, or a function's as it is given.

    Args:
        method: name of a method, or a function of Q and K.
        params: of a named method.
        block: what was asked for; None for the default.

    Raises:
        InputError: no two sizes, or not the method's own.
    """
    own = (128, 128)
    if isinstance(method, str):
        own = find_method(method).settings(params).block_size()
    if block is None:
        return own
    try:
        block = block_size(block)
    except InputError as problem:
        raise InputError(
            f"block={block}; expected two sizes in tokens, e.g. block=(128, 64)."
        ) from problem
    if isinstance(method, str) and block != own:
        raise InputError(
            f"block={block}: {method} makes blocks of {own[0]}x{own[1]}; leave block out, and "
            "give params another block where the method can."
        )
    return block


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
