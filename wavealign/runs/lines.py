"""JSON lines on disk: written as they come, each whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import TypeVar

from wavealign.drafts import Draft
from wavealign.errors import InputError, WriteError, said_of
from wavealign.outputs import check_writable, is_stream, open_stream
from wavealign.runs.result import Result

_T = TypeVar("_T")


def append_line(stream: FileIO, text: str, sync: bool = False) -> None:
    """One more line at the end of a file, whole or not at all.

    Args:
        stream: opened to append, unbuffered: a buffer would be written after the file was cut back.
        text: the line.
        sync: it is on disk when this returns; otherwise the operating system has it.

    Raises:
        OSError: e.g. a full disk; the file is as it was.
    """
    before = stream.seek(0, os.SEEK_END) if stream.seekable() else None
    left = memoryview(text.encode() + b"\n")
    try:
        while left:
            left = left[stream.write(left) :]
        if sync:
            os.fsync(stream.fileno())
    except OSError:
        if before is not None:
            with contextlib.suppress(OSError):
                stream.truncate(before)
        raise


def read_lines(
    path: Path, parse: Callable[[str], _T], torn: Callable[[str], None] | None = None
) -> Iterator[_T]:
    """What the lines of a file say; blank ones say nothing.

    Args:
        path: the file.
        parse: of a line.
        torn: told of a last line without an end, which a kill cut off in mid-write and which is
            passed over; where nobody is told, such a line is one like the others.

    Raises:
        InputError: that of `parse`, with the line's place; the file can't be read, or isn't text.
    """
    try:
        # What was cut off may end inside a character.
        with path.open(encoding="utf-8", errors="strict" if torn is None else "replace") as stream:
            for number, line in enumerate(stream, 1):
                if torn is not None and not line.endswith("\n"):
                    torn(line)
                elif line.strip():
                    with said_of(f"{path}: line {number}"):
                        record = parse(line)
                    yield record
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(f"{path}: can't be read ({reason}); expected JSON lines.") from problem


def cut_torn_line(path: Path) -> int:
    """Take off a last line that doesn't end, so that the next one starts a line; its bytes."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return len(content) - whole


class ResultWriter:
    """Writes rows as they come, into a draft that becomes the file on leaving, or into a stream.

    Leaving by an exception keeps the rows that were written; a file without rows isn't left,
    nor is a row that a full disk cut off. One process at a time, where the system has flock.

    Raises:
        InputError: the path can't be written, or another process writes it; on entering, too.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = check_writable(path)
        self._rows = 0

    def __enter__(self) -> ResultWriter:
        try:
            self._draft = None if is_stream(self._path) else Draft(self._path)
            self._file = open_stream(self._path) if self._draft is None else self._draft.file
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
                append_line(self._file, result.to_json())
                self._rows += 1
        except OSError as problem:
            kept = f"the {self._rows} rows before are kept" if self._rows else "nothing was kept"
            raise WriteError.of(self._path, problem, kept) from problem

    def __exit__(self, *_: object) -> None:
        if self._draft is None:
            self._file.close()
            return
        if self._rows:
            try:
                check_writable(self._path)  # still
                self._draft.settle()
            except OSError as problem:
                kept = f"{self._draft.path} holds its rows"
                raise WriteError.of(self._path, problem, kept) from problem
        self._draft.drop()
