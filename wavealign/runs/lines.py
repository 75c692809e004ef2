"""JSON lines on disk: written as they come, each whole or not at all."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from wavealign.errors import InputError, WriteError
from wavealign.npz import check_writable
from wavealign.runs.result import Result

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ModuleNotFoundError:  # not a POSIX system
    fcntl = None


class ResultWriter:
    """Writes rows as they come to ``PATH.partial`` and renames it to PATH on leaving.

    Leaving by an exception keeps the rows that were written; a file without rows isn't left,
    nor is a row that a full disk cut off. One process at a time, where the system has flock.

    Raises:
        InputError: the path can't be written, or another process writes it; on entering, too.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = check_writable(path)
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._rows = 0

    def __enter__(self) -> ResultWriter:
        try:
            self._stream = _claimed(self._partial)
        except BlockingIOError as problem:
            raise InputError(
                f"{self._path}: another process writes it; wait for it, or choose another file."
            ) from problem
        except OSError as problem:
            raise WriteError.of(self._path, problem) from problem
        return self

    def write(self, results: Iterable[Result]) -> None:
        """Append rows and hand them to the operating system.

        Raises:
            WriteError: a row couldn't be written to its end, e.g. on a full disk.
        """
        try:
            for result in results:
                self._append((result.to_json() + "\n").encode())
        except OSError as problem:
            kept = f"the {self._rows} rows before are kept" if self._rows else "nothing was kept"
            raise WriteError.of(self._path, problem, kept) from problem

    def _append(self, line: bytes) -> None:
        whole_bytes = self._stream.tell()
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._stream.truncate(whole_bytes)
            raise
        self._rows += 1

    def __exit__(self, *_: object) -> None:
        if fcntl is None:  # such systems don't rename open files
            self._stream.close()
        if self._rows:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()
        self._stream.close()  # only now may another process claim the name


def _claimed(path: Path) -> FileIO:
    """An empty file that no other process writes.

    Raises:
        BlockingIOError: another one does.
    """
    while True:
        stream = FileIO(path, "a")
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.close()
                raise
            except OSError:  # a file system without locks
                pass
            # Between opening and locking, the file may have been finished and renamed.
            if not (path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat())):
                stream.close()
                continue
        stream.truncate(0)
        return stream
