"""Names of a package that load on first use, so that importing it stays light."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from wavealign._moved import moved_name


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package; names that moved away from it are found, too.

    Args:
        package: its name.
        homes: name → module that has it.
    """

    def load(name: str) -> Any:
        if name not in homes:
            return moved_name(package, name)
        return getattr(importlib.import_module(homes[name]), name)

    return load
