"""Files that are written: checked before the work, whole or not at all, never over what is read.

A link is followed to the file that it names. A device that takes a stream, a pipe and a descriptor
of this process (``/dev/stdout``) are written into; nothing but a plain file is ever replaced.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from wavealign.drafts import Draft
from wavealign.errors import InputError, WriteError

_DESCRIPTORS = re.compile(r"/dev/(std(?:in|out|err))|(?:/dev|/proc/self)/fd/([0-9]{1,9})")
_STANDARD = ("stdin", "stdout", "stderr")
_NO_STREAMS = {
    stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a device that takes no stream",
}  # fmt: skip
_STREAMS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty")  # devices that are a stream
_READER_SECONDS = 5.0  # how long a pipe may wait for who reads it

_read: dict[tuple[int, int], str] | None = None  # by device and inode; None: anything may go


@contextlib.contextmanager
def inputs_kept(kept: bool = True) -> Iterator[None]:
    """Inside this block no file is written over that was read in it, whatever its name.

    Args:
        kept: False for a block inside such a one in which any file may be, again.
    """
    global _read
    before, _read = _read, {} if kept else None
    for descriptor, name in enumerate(_STANDARD):
        with contextlib.suppress(OSError):
            _note(os.fstat(descriptor), f"the file that is this program's {name}")
    try:
        yield
    finally:
        _read = before


def note_read(path: str | Path, name: str = "a file that is read") -> None:
    """Say that a file is read.

    Args:
        path: of the file.
        name: what it is, for whoever would overwrite it.
    """
    if _read is not None:
        with contextlib.suppress(OSError, ValueError):
            _note(Path(path).stat(), name)


def _note(found: os.stat_result, name: str) -> None:
    if _read is not None and stat.S_ISREG(found.st_mode):
        _read.setdefault((found.st_dev, found.st_ino), name)


def check_writable(path: str | Path, *kinds: str) -> Path:
    """The path, if a file can be written there; raises before any work is done.

    Args:
        path: of the file.
        kinds: suffixes, of which its name has one where it is to be a plain file; none for any.

    Raises:
        InputError: the folder is missing or not writable, the path is a folder or another thing
            that isn't written to, the name is of another kind of file, or the file is read.
    """
    with _refused(path) as target:
        found = _status(target)
        if is_stream(target):
            _check_stream(target)
            return target
        if found is not None and (name := (_read or {}).get((found.st_dev, found.st_ino))):
            raise InputError(f"{target}: would overwrite {name}; choose another one to write.")
        if kinds and target.suffix.lower() not in kinds:
            expected = " or ".join(filter(None, kinds))
            raise InputError(f"{target}: unknown kind of file; expected {expected}.")
        folder = Path(os.path.realpath(target)).parent
        if not folder.is_dir():
            named = folder if target.parent.is_dir() else target.parent  # or a link to nowhere
            raise InputError(f"{target}: can't be written, the folder {named} doesn't exist.")
        _try(folder)
        if found is not None and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return target


def check_folder(path: str | Path) -> Path:
    """The path, if it is a folder to write in, or one can be made there; nothing is made.

    Raises:
        InputError: it is something else, or can't be made or written.
    """
    with _refused(path) as folder:
        found = _status(folder)
        if found is not None and not stat.S_ISDIR(found.st_mode):
            raise InputError(f"{folder}: is a file; expected a folder.")
        _try(next(place for place in (folder, *folder.absolute().parents) if place.exists()))
    return folder


@contextlib.contextmanager
def _refused(path: str | Path) -> Iterator[Path]:
    """Inside this block what the system says of a path is an `InputError`."""
    if not os.fspath(path):
        raise InputError("the name of what is to be written is empty.")
    try:
        yield Path(path)
    except InputError:
        raise
    except (OSError, ValueError) as problem:  # a name with a zero byte, too
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(f"{path}: can't be written ({reason}).") from problem


def _status(path: Path) -> os.stat_result | None:
    """What is there, at the end of all links; None for nothing."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _try(folder: Path) -> None:
    """Make a file there that has no name: this tells more than permission bits, to root, too."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def is_stream(target: Path) -> bool:
    """Whether something is there that isn't a plain file, and never to be replaced."""
    found = _status(target)
    plain = found is None or stat.S_ISREG(found.st_mode)
    return _descriptor(target) is not None or not plain


def _descriptor(target: Path) -> int | None:
    """The descriptor of this process that a path is a name of, if it is one's."""
    match = _DESCRIPTORS.fullmatch(str(target))
    if match is None:
        return None
    return _STANDARD.index(match[1]) if match[1] else int(match[2])


def _check_stream(target: Path) -> None:
    """Raise where nothing can be written into it."""
    if (descriptor := _descriptor(target)) is not None:
        os.write(descriptor, b"")
        return
    found = target.stat()
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFIFO and not (kind == stat.S_IFCHR and found.st_rdev in _devices()):
        what = _NO_STREAMS.get(kind, "something else")
        raise InputError(f"{target}: is {what}; expected a file to write.")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _devices() -> set[int]:
    """The devices that take a stream, this process's terminal among them."""
    found = {Path(place).stat().st_rdev for place in _STREAMS if Path(place).exists()}
    for descriptor in range(len(_STANDARD)):
        with contextlib.suppress(OSError):
            found.add(os.fstat(descriptor).st_rdev)
    return found - {0}


def open_stream(target: Path) -> io.FileIO:
    """A stream into a pipe, a device or a descriptor, to be closed.

    Raises:
        InputError: a pipe that nobody reads.
        OSError: it can't be opened.
    """
    for said in filter(None, (sys.stdout, sys.stderr)):
        said.flush()  # stands before what comes
    if (descriptor := _descriptor(target)) is not None:
        return io.FileIO(os.dup(descriptor), "wb")
    until = time.monotonic() + _READER_SECONDS
    while True:
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            break
        except OSError as problem:
            if problem.errno != errno.ENXIO:
                raise
            if time.monotonic() > until:
                raise InputError(f"{target}: is a pipe that nobody reads.") from problem
        time.sleep(0.05)
    os.set_blocking(descriptor, True)
    return io.FileIO(descriptor, "wb")


@contextlib.contextmanager
def whole_file(path: str | Path, *kinds: str) -> Iterator[BinaryIO]:
    """A stream whose content becomes the file on leaving, or nothing does on an exception.

    Args:
        path: of the file.
        kinds: see `check_writable`.

    Raises:
        InputError: the path can't be written.
        WriteError: writing failed, e.g. on a full disk; what was there before is there.
    """
    target = check_writable(path, *kinds)
    try:
        if is_stream(target):
            content = io.BytesIO()  # a stream can't be sought, and has nothing of what fails
            yield content
            with io.BufferedWriter(open_stream(target)) as stream:
                stream.write(content.getbuffer())
            return
        draft = Draft(target)
        try:
            with io.BufferedWriter(draft.file) as stream:
                yield stream
                stream.flush()
                check_writable(target)  # still
                draft.settle()
        finally:
            draft.drop()
    except OSError as problem:
        raise WriteError.of(target, problem) from problem
