"""Reading and writing npz files: never pickle, one clear error, nothing half-written."""

from __future__ import annotations

import os
import stat
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from wavealign.archives import map_member, open_zip, read_member, read_npy
from wavealign.errors import InputError, said_of
from wavealign.outputs import note_read, whole_file

_ZIP_MAGIC = b"PK"
_NPY_MAGIC = b"\x93NUMPY"
_EXPORT_HINT = "save plain arrays with numpy.savez_compressed"


class ArrayFile:
    """Named arrays of one file, read on demand; a context manager that closes the file.

    Args:
        path: the file.
        names: of the arrays in the file.
        key: see only the arrays below this name, as if the file held nothing else: the
            array ``key`` itself, or all of ``key/...`` with that prefix taken off.

    Raises:
        InputError: nothing is named `key`.
    """

    def __init__(self, path: Path, names: list[str], key: str | None = None) -> None:
        self.path = path
        self._member = {name: name for name in names}
        if key is not None:
            below = {n.removeprefix(key + "/"): n for n in names if n.startswith(key + "/")}
            self._member = {"mask": key} if key in names else below
            if not self._member:
                self.close()
                raise self.error(f"holds nothing named '{key}'; it holds {_listed(names)}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; arrays that were read stay valid."""

    def _read(self, member: str, name: str) -> npt.NDArray[Any]:
        raise NotImplementedError

    @property
    def names(self) -> list[str]:
        """Names of the arrays, as seen below `key`."""
        return list(self._member)

    def error(self, text: str) -> InputError:
        """An `InputError` about this file."""
        return InputError(f"{self.path}: {text}")

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Inside this block an `InputError` about content is said to be this file's.

        Raises:
            InputError: raised inside, with the file's name before its text; or memory ran out.
        """
        try:
            with said_of(self.path):
                yield
        except MemoryError as problem:
            raise self.error(f"needs more memory than there is ({problem}).") from problem

    def __contains__(self, name: str) -> bool:
        return name in self._member

    def array(self, name: str) -> npt.NDArray[Any]:
        """The array `name`.

        Raises:
            InputError: it is missing, pickled or damaged.
        """
        if name not in self._member:
            raise self.error(f"has no array '{name}'; it holds {_listed(self.names)}.")
        return self._read(self._member[name], name)

    def text(self, name: str) -> str:
        """The array `name` as one string.

        Raises:
            InputError: it is missing, or anything else.
        """
        array = self.array(name)
        if array.size != 1 or array.dtype.kind not in "US":
            raise self.error(
                f"'{name}' is {array.dtype} of shape {array.shape}; expected one string."
            )
        one = array.reshape(1)
        # numpy makes strings of any 32 bits, of which Python then breaks.
        if array.dtype.kind == "U" and one.view(f"{array.dtype.str[0]}u4").max() > sys.maxunicode:
            raise self.error(f"'{name}' holds what is no character; expected one string.")
        try:
            return one[0].decode() if array.dtype.kind == "S" else str(one[0])
        except UnicodeDecodeError as problem:
            raise self.error(f"'{name}' isn't UTF-8 ({problem}).") from problem

    def integers(self, name: str, count: int) -> list[int]:
        """The array `name` as `count` whole numbers.

        Raises:
            InputError: it is missing, or anything else.
        """
        array = self.array(name)
        if array.size != count or array.dtype.kind not in "iu":
            raise self.error(
                f"'{name}' is {array.dtype} of shape {array.shape}; expected {count} whole numbers."
            )
        return [int(n) for n in array.reshape(-1)]


class NpzFile(ArrayFile):
    """The arrays of one ``.npz``, or the single array of a ``.npy``.

    Args:
        path: the file.
        key: see `ArrayFile`.

    Raises:
        InputError: the file is missing, not an npz, truncated, or holds pickled objects.
    """

    def __init__(self, path: str | Path, key: str | None = None) -> None:
        self.path = Path(path)
        with ExitStack() as stack:
            self._stream = stack.enter_context(open_file(self.path, "; expected an .npz"))
            magic = self._stream.read(len(_NPY_MAGIC))
            self._stream.seek(0)
            self._zip: zipfile.ZipFile | None = None
            names = ["array"]
            if magic.startswith(_ZIP_MAGIC):
                with self.blamed():
                    self._zip = open_zip(self._stream)
                names = self._members(self._zip.namelist())
            elif magic != _NPY_MAGIC:
                found = "an empty file" if not magic else f"a file that starts with {magic!r}"
                raise self.error(f"is not an npz; found {found}; {_EXPORT_HINT}.")
            super().__init__(self.path, names, key)
            stack.pop_all()

    def _members(self, members: list[str]) -> list[str]:
        strangers = [name for name in members if not name.endswith(".npy")]
        if strangers:
            kind = "a torch.save archive" if any("data.pkl" in s for s in strangers) else "a zip"
            raise self.error(f"is {kind}, not an npz (it holds '{strangers[0]}'); {_EXPORT_HINT}.")
        if not members:
            raise self.error(f"is an npz that holds no array; {_EXPORT_HINT}.")
        return [name.removesuffix(".npy") for name in members]

    def close(self) -> None:
        """Close the file; arrays that were read stay valid."""
        self._stream.close()

    def _read(self, member: str, name: str) -> npt.NDArray[Any]:
        with self.blamed():
            if self._zip is not None:
                return read_member(self._zip, self._zip.getinfo(f"{member}.npy"), name)
            self._stream.seek(0)
            return read_npy(self._stream, os.fstat(self._stream.fileno()).st_size, name)

    def mapped_or_read(self, name: str) -> npt.NDArray[Any]:
        """The array `name`, mapped into memory where it is stored as it is.

        Raises:
            InputError: see `array`.
        """
        mapped = None
        if self._zip is not None and name in self._member:
            info = self._zip.getinfo(f"{self._member[name]}.npy")
            with self.blamed():
                mapped = map_member(self.path, self._zip, info, name)
        return self.array(name) if mapped is None else mapped


def need_file(path: Path, expected: str = "") -> None:
    """Check that a file is there.

    Raises:
        InputError: it isn't, or is no file.
    """
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except (OSError, ValueError) as problem:
        raise _unreadable(path, problem) from problem
    if not regular:
        raise InputError(f"{path}: is not a file{expected}.")
    note_read(path)


def open_file(path: Path, expected: str = "") -> BinaryIO:
    """A file to read.

    Raises:
        InputError: it isn't there, is no file, or can't be read.
    """
    need_file(path, expected)
    try:
        return path.open("rb")
    except OSError as problem:
        raise _unreadable(path, problem) from problem


def _unreadable(path: Path, problem: Exception) -> InputError:
    reason = getattr(problem, "strerror", None) or problem
    return InputError(f"{path}: can't be read ({reason}).")


def _listed(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def save_npz(path: str | Path, arrays: Mapping[str, npt.ArrayLike]) -> None:
    """Write a compressed npz, whole or not at all.

    Raises:
        InputError: the path can't be written, or its name is that of another kind of file.
    """
    with whole_file(path, ".npz", "") as stream:
        np.savez_compressed(stream, allow_pickle=False, **dict(arrays))
