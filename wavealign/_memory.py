"""How much memory there is, looked at before a file's word about a size is taken."""

from __future__ import annotations

import contextlib
from pathlib import Path

from wavealign.errors import InputError
from wavealign.units import format_size


def need_memory(needed_bytes: int, what: str) -> None:
    """Check that there is memory for something, before it is asked for.

    Raises:
        InputError: there isn't.
    """
    free = _free_bytes()
    if free is not None and needed_bytes > free:
        raise InputError(
            f"{what} needs {format_size(needed_bytes)} of memory, and {format_size(free)} are free."
        )


def _free_bytes() -> int | None:
    """Memory that this process may get, as far as Linux says; None elsewhere."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # of a container; "max" is no number
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(found, default=None)
