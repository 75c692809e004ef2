"""Files in the making: beside their place, on disk before they come there, one process each."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import stat
from pathlib import Path
from typing import Any

from wavealign.errors import InputError

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ModuleNotFoundError:  # not a POSIX system
    fcntl = None

_MOST_NAME_BYTES = 255 - len(".999.partial")


class Draft:
    """A new file, ``NAME.partial`` or a name like it that is free, beside the file that it becomes.

    Args:
        target: that file, checked (see `wavealign.outputs`).

    Attributes:
        file: to write, unbuffered.
        path: of the draft.

    Raises:
        InputError: another process writes for the same place.
        OSError: it can't be made.
    """

    def __init__(self, target: Path) -> None:
        self._place = Path(os.path.realpath(target))
        stem = os.fsdecode(os.fsencode(self._place.name)[:_MOST_NAME_BYTES])
        for number in itertools.count(1):
            self.path = self._place.with_name(f"{stem}{f'.{number}' * (number > 1)}.partial")
            with contextlib.suppress(FileExistsError):
                self.file = io.FileIO(self.path, "xb")
                break
            if _is_locked(self.path):
                raise InputError(
                    f"{target}: another process writes it; wait for it, or choose another file."
                )
        self._settled = False
        with contextlib.suppress(OSError):  # a file system without locks
            lock(self.file)

    def settle(self) -> None:
        """Put it, once it is on disk, into its place, with the permissions of what was there.

        Raises:
            OSError: it can't be put there.
        """
        with contextlib.suppress(FileNotFoundError):
            self.path.chmod(stat.S_IMODE(self._place.stat().st_mode))
        os.fsync(self.file.fileno())
        if fcntl is None:  # such systems don't rename open files
            self.file.close()
        self.path.replace(self._place)
        self._settled = True
        with contextlib.suppress(OSError):  # of a system that opens no folders
            folder = os.open(self._place.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def drop(self) -> None:
        """Take it away, unless it is settled, and only then let other processes claim the name."""
        if not self._settled:
            self.path.unlink(missing_ok=True)
        self.file.close()


def lock(file: Any) -> None:
    """Claim a file until it is closed, where the system has flock; a killed process holds none.

    Raises:
        BlockingIOError: another process has claimed it.
        OSError: the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(path: Path) -> bool:
    """Whether a process has claimed a file; a link, or what can't be opened, is nobody's."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with contextlib.suppress(OSError):
        descriptor = os.open(path, flags)
        try:
            lock(descriptor)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False
