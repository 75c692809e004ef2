"""Profiles that ship as TOML files beside a package's code, or that a user has of their own."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from wavealign.errors import InputError, unknown_name
from wavealign.npz import need_file

Profile = TypeVar("Profile")


def profile_names(package: str) -> list[str]:
    """Names of the profiles in a package's folder ``profiles``."""
    folder = files(package) / "profiles"
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def read_profile(
    package: str, kind: str, name: str, parse: Callable[[Mapping[str, Any]], Profile]
) -> Profile:
    """A shipped profile by name, or one's own by path to a ``.toml``.

    Args:
        package: whose folder ``profiles`` is meant.
        kind: what it is a profile of, for messages.
        name: or a path.
        parse: makes a profile of a table; raises KeyError for what is missing, ValueError (or
            TypeError, AttributeError) for what is wrong.

    Raises:
        InputError: an unknown name, or a file that isn't a complete profile.
    """
    if name.endswith(".toml"):
        need_file(Path(name))  # a pipe would be waited for
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as problem:
            raise InputError(f"{name}: can't be read ({problem}).") from problem
    elif name in profile_names(package):
        text = (files(package) / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        raise unknown_name(kind, name, profile_names(package))
    try:
        return parse(tomllib.loads(text))
    except tomllib.TOMLDecodeError as problem:
        raise InputError(f"{name}: is not TOML ({problem}).") from problem
    except KeyError as problem:
        raise InputError(f"{name}: has no {problem}; expected a complete profile.") from problem
    except (TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise InputError(f"{name}: {problem}") from problem
