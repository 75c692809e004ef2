"""The errors WaveAlign raises on purpose.

Each message names what was read, what was found, what was expected and what to do next.
The command line turns them into exit codes: `InputError` 2, `MissingCapabilityError` 3.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from wavealign.foreign import shown


class WaveAlignError(Exception):
    """Base of every error raised on purpose by this package; its message is one line, safe to show.

    Example:
        >>> import wavealign as wa
        >>> try:
        ...     wa.load_mask("nowhere.npz")
        ... except wa.WaveAlignError as problem:
        ...     print(f"{type(problem).__name__}: {problem}")
        InputError: nowhere.npz: no such file.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(shown(message))


class InputError(WaveAlignError, ValueError):
    """Something the caller gave (a file, an option, an array) can't be used as it is.

    Example:
        >>> import wavealign as wa
        >>> wa.load_device("h2000")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        wavealign.errors.InputError: unknown device 'h2000'. Did you mean 'h200'? Valid: ...
    """


class MissingCapabilityError(WaveAlignError, RuntimeError):
    """This machine or installation lacks what the request needs (a GPU, an extra).

    Example:
        >>> import torch
        >>> import wavealign as wa
        >>> q = torch.zeros(1, 1, 128, 64)
        >>> wa.attend(q, q, q, torch.ones(1, 1, 1, dtype=torch.bool))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        wavealign.errors.MissingCapabilityError: backend 'auto' needs ... an NVIDIA GPU, ...
    """


class WriteError(WaveAlignError, OSError):
    """A file couldn't be written to its end, e.g. on a full disk."""

    @classmethod
    def of(cls, path: object, problem: OSError, kept: str = "nothing was kept") -> WriteError:
        """The error that names the file, the system's reason and what is left.

        Args:
            path: of the file.
            problem: what the system said.
            kept: what is left of it.
        """
        reason = problem.strerror or str(problem)
        error = cls(f"{path}: can't be written ({reason}); {kept}.")
        error.strerror = reason
        return error


@contextmanager
def said_of(what: object) -> Iterator[None]:
    """Inside this block an `InputError` is said of something: a file, a line, an option.

    Raises:
        InputError: raised inside, with what it is about before its text.
    """
    try:
        yield
    except InputError as problem:
        raise InputError(f"{what}: {problem}") from problem


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> InputError:
    """An `InputError` for a name that isn't in a registry, with the nearest match.

    Args:
        kind: what the name stands for, e.g. ``"policy"``.
        name: what the caller wrote.
        valid: every name that would have been accepted.
    """
    names = list(valid)
    text = str(name)
    begun = [full for full in names if len(text) > 1 and full.startswith(text)]
    nearest = begun[:1] or difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return InputError(f"unknown {kind} '{name}'.{hint} Valid: {', '.join(names)}.")
