"""Optional dependencies: one place that says what to install."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from wavealign.errors import MissingCapabilityError


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: e.g. ``"matplotlib"``.
        extra: the extra of this package that brings it.
        purpose: what it is needed for, e.g. ``"--plot"``.

    Raises:
        MissingCapabilityError: it isn't installed, with the install line.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != module.partition(".")[0]:
            raise  # installed, but broken: its own message says more
        raise MissingCapabilityError(
            f"{purpose} needs {module}, which isn't installed: pip install 'wavealign[{extra}]'"
        ) from problem


@functools.cache
def installed(module: str) -> bool:
    """Whether a module is there to be imported; looked up once a process."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the module's parent
        return False
