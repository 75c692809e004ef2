"""Names of a package that load on first use, so that importing it stays light."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wavealign._moved import moved_name


def lazy_names(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package; names that moved away from it are found, too.

    Args:
        package: its name.
        homes: module → the names that it has.
    """

    def load(name: str) -> Any:
        for module, names in homes.items():
            if name in names:
                return getattr(importlib.import_module(module), name)
        return moved_name(package, name)

    return load
