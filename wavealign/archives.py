"""Arrays inside zip and npy files: what a header says is held against what is there, then read.

numpy reads as many bytes as an array's header declares. Nobody looks whether the member of the zip
has as many, so its checksum is looked at by accident alone. Here a member must be exactly as long
as its header says, and is read, or mapped, to its end. Errors are about content: who opened the
file puts its name before them.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from wavealign._memory import need_memory
from wavealign.errors import InputError

AGAIN = "write the file again"
_COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA}
_FLAGS = {0x1: "encrypted", 0x20: "a patch", 0x40: "encrypted", 0x2000: "encrypted"}
_MOST_TIMES = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}  # longer than it stands there
_MOST_DESCRIPTOR_BYTES = 24  # sizes and checksum behind a member that was written as it came
_MOST_HEADER_BYTES = 1 << 16  # of an array: numpy itself takes 10,000 characters
_CHUNK_BYTES = 1 << 24


def open_zip(stream: IO[bytes]) -> zipfile.ZipFile:
    """A zip, whose directory lists members that lie apart in the file and can be read.

    Raises:
        InputError: it is damaged, or holds what can't be read: encrypted or patched members, two
            of one name or in one place, another compression, or sizes that the file hasn't got.
    """
    try:
        archive = zipfile.ZipFile(stream)
    except Exception as problem:  # a damaged directory breaks zipfile in many ways
        raise InputError(f"is damaged or cut off ({problem}); {AGAIN}.") from problem
    end: int = archive.start_dir
    for info in sorted(archive.infolist(), key=lambda info: -info.header_offset):
        name = info.filename
        for flag, kind in _FLAGS.items():
            if info.flag_bits & flag:
                raise InputError(f"member '{name}' is {kind}; expected plain members; {AGAIN}.")
        if info.compress_type not in _COMPRESSIONS:
            raise InputError(
                f"member '{name}' has compression method {info.compress_type}; expected stored or "
                f"deflated; {AGAIN}."
            )
        if info.file_size > info.compress_size * _MOST_TIMES.get(info.compress_type, math.inf):
            raise InputError(
                f"member '{name}' declares {info.file_size:,} bytes and {info.compress_size:,} "
                f"stand for them; {AGAIN}."
            )
        with _blamed(f"member '{name}'"), archive.open(info):
            pass  # its own header says what the directory says
        rest = end - _data_start(stream, info) - info.compress_size
        if not 0 <= rest <= _MOST_DESCRIPTOR_BYTES:
            raise InputError(
                f"member '{name}' doesn't end where the next, or the directory, begins; {AGAIN}."
            )
        end = info.header_offset
    if end:
        raise InputError(f"has {end:,} bytes that its directory doesn't list; {AGAIN}.")
    names = archive.namelist()
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"holds two members named '{twice}'; expected one; {AGAIN}.")
    return archive


def _data_start(stream: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Where the data of a member begin: behind its header, its name and an extra field."""
    stream.seek(info.header_offset + 26)
    name_bytes, extra_bytes = struct.unpack("<HH", stream.read(4))
    return info.header_offset + 30 + int(name_bytes + extra_bytes)


def check_members(archive: zipfile.ZipFile) -> None:
    """Hold every member against its checksum.

    Raises:
        InputError: one is damaged.
    """
    for info in archive.infolist():
        with _blamed(f"member '{info.filename}'"), archive.open(info) as stream:
            while stream.read(_CHUNK_BYTES):
                pass


def read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> npt.NDArray[Any]:
    """The array of a member.

    Args:
        archive: made by `open_zip`.
        info: of the member.
        name: of the array, for errors.

    Raises:
        InputError: it is damaged, pickled, or no array of the length that it has.
    """
    with _blamed(f"array '{name}'"), archive.open(info) as stream:
        return read_npy(stream, info.file_size, name)


def map_member(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str
) -> npt.NDArray[Any] | None:
    """The array of a member that is stored as it is, mapped into memory; None for another.

    Its checksum is looked at once a file and process: as long as reading it takes.

    Args:
        path: of the archive.
        archive, info, name: see `read_member`.

    Raises:
        InputError: see `read_member`.
    """
    if info.compress_type != zipfile.ZIP_STORED:
        return None
    with _blamed(f"array '{name}'"):
        with archive.open(info) as stream:
            head = _Header.of(stream.read(_MOST_HEADER_BYTES), info.file_size, name)
        if head.fortran or not head.data_bytes:
            return None
        about = path.stat()
        _check_once(path, info.filename, about.st_dev, about.st_ino, about.st_mtime_ns)
        with path.open("rb") as file:
            start = _data_start(file, info) + head.length
        return np.memmap(path, head.dtype, "r", offset=start, shape=head.shape)


@lru_cache(maxsize=1024)
def _check_once(path: Path, member: str, *_: int) -> None:
    """Read a member to its end, where zipfile compares checksums; what is cached is that it may."""
    with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        while stream.read(_CHUNK_BYTES):
            pass


def read_npy(stream: IO[bytes], held_bytes: int, name: str) -> npt.NDArray[Any]:
    """The array that a stream holds from here to its end.

    Args:
        stream: at the magic of an ``.npy``.
        held_bytes: how long it is.
        name: of the array, for errors.

    Raises:
        InputError: a header that can't be read, or says another length; too little memory.
    """
    with _blamed(f"array '{name}'"):
        start = stream.read(_MOST_HEADER_BYTES)
        head = _Header.of(start, held_bytes, name)
        need_memory(head.data_bytes, f"array '{name}' of shape {list(head.shape)}")
        data = np.empty(head.data_bytes, np.uint8)
        chunk, at = start[head.length :], 0
        while chunk:
            data[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
            at += len(chunk)
            chunk = stream.read(_CHUNK_BYTES)
        if at < len(data):
            raise EOFError(f"it ends after {at:,} of {len(data):,} bytes")
        return data.view(head.dtype).reshape(head.shape, order="F" if head.fortran else "C")


@dataclass(frozen=True)
class _Header:
    """Of an ``.npy``; `length` is its own, in bytes."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    length: int

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, start: bytes, held_bytes: int, name: str) -> _Header:
        """The header that a file or member of so many bytes starts with."""
        file = io.BytesIO(start)
        try:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran, dtype = read(file)
        except Exception as problem:  # it is parsed as Python, with all that may go wrong there
            raise InputError(f"array '{name}': can't be read ({problem}); {AGAIN}.") from problem
        if dtype.hasobject:
            raise InputError(
                f"array '{name}': holds pickled Python objects, which are never loaded; save plain "
                "arrays with numpy.savez_compressed."
            )
        head = cls(shape, fortran, dtype, file.tell())
        sizes = all(type(n) is int and n >= 0 for n in shape)
        if not sizes or head.length + head.data_bytes != held_bytes or not dtype.itemsize:
            raise InputError(
                f"array '{name}' says that it is {dtype} of shape {shape}, and holds "
                f"{max(0, held_bytes - head.length):,} bytes of data; {AGAIN}."
            )
        return head


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Inside this block whatever damage makes of zipfile and numpy is an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except MemoryError as problem:
        raise InputError(f"{what} needs more memory than there is.") from problem
    except Exception as problem:
        raise InputError(f"{what} is damaged or cut off ({problem}); {AGAIN}.") from problem
