"""Numbers, and what else a caller gives, checked: counts, shares, block sizes, truths, text."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from wavealign.errors import InputError


def whole_number(name: str, value: int) -> int:
    """An int, from any whole number (numpy's, too).

    Raises:
        InputError: something else; 10.0 and True are no counts.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise InputError(f"{name}: {value!r}; expected a whole number.")


def whole_numbers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """A tuple of ints.

    Raises:
        InputError: no sequence, or one that doesn't hold whole numbers alone.
    """
    return tuple(whole_number(name, value) for value in _listed(name, values))


def shares(name: str, values: Iterable[float]) -> tuple[float, ...]:
    """A tuple of numbers above 0 and up to 1.

    Raises:
        InputError: no sequence, or naming the first that is no such number.
    """
    return tuple(share(name, value) for value in _listed(name, values))


def share(name: str, value: float) -> float:
    """A number above 0 and up to 1.

    Raises:
        InputError: something else.
    """
    if not 0 < number(name, value) <= 1:
        raise InputError(f"{name} holds {value}; expected shares above 0 and up to 1.")
    return float(value)


def number(name: str, value: Any) -> float:
    """A float, from any number; text is none.

    Raises:
        InputError: something else.
    """
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise InputError(f"{name}: {value!r}; expected a number.")


def truth(name: str, value: bool) -> bool:
    """True or False themselves: "no" is as true as "yes".

    Raises:
        InputError: something else.
    """
    if not isinstance(value, bool):
        raise InputError(f"{name}: {value!r}; expected True or False.")
    return value


def text(name: str, value: str) -> str:
    """A string.

    Raises:
        InputError: something else.
    """
    if not isinstance(value, str):
        raise InputError(f"{name}: {value!r}; expected text.")
    return value


def _listed(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(values, Iterable) and not isinstance(values, str):
        return tuple(values)
    raise InputError(f"{name}: {values!r}; expected a sequence of numbers.")


def block_size(block: tuple[int, int], name: str = "block") -> tuple[int, int]:
    """Tokens of a query and of a K/V block, or of the sequences that ``name`` says.

    Raises:
        InputError: not two whole numbers, or one below 1.
    """
    sizes = whole_numbers(name, block)
    if len(sizes) != 2 or min(sizes) < 1:
        raise InputError(f"{name}={block}; expected two numbers of tokens, at least 1.")
    return sizes[0], sizes[1]
