"""Arrays of safetensors files and of torch's ``.pt``, beside npz: never code, one clear error."""

from __future__ import annotations

import math
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign._extras import require
from wavealign._memory import need_memory
from wavealign.archives import check_members, open_zip
from wavealign.errors import InputError, said_of
from wavealign.npz import ArrayFile, NpzFile, open_file
from wavealign.structures import read_json

_EXPORT = (
    "save its tensors instead, full blocks and partial ones: torch.save({'kv_num_blocks': "
    "m.kv_num_blocks, 'kv_indices': m.kv_indices, 'full_kv_num_blocks': m.full_kv_num_blocks, "
    "'full_kv_indices': m.full_kv_indices, 'BLOCK_SIZE': m.BLOCK_SIZE, 'seq_lengths': "
    "m.seq_lengths}, FILE)"
)

_MOST_ENTRIES = 2**30  # of a tensor that a few bytes stand for: 128 heads of 363,600 tokens
_MOST_PARTS, _MOST_DEPTH = 100_000, 32  # of a torch file's dicts and lists
_MOST_HEADER_BYTES = 100_000_000  # as safetensors has it


def open_arrays(path: str | Path, key: str | None = None) -> ArrayFile:
    """The arrays of a file, by its suffix: ``.safetensors``, ``.pt``, ``.pth``; else npz or npy.

    Raises:
        InputError: missing, damaged, or holding objects that would have to run code.
        MissingCapabilityError: the package that reads it isn't installed.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix == ".safetensors":
        return TensorFile(file, _safetensors(file), key)
    if suffix in (".pt", ".pth"):
        return TensorFile(file, _torch(file), key)
    return NpzFile(file, key)


class TensorFile(ArrayFile):
    """Arrays that were read already.

    Args:
        path: of the file.
        arrays: all that it holds, by name.
        key: see `ArrayFile`.
    """

    def __init__(self, path: Path, arrays: dict[str, npt.NDArray[Any]], key: str | None) -> None:
        self._arrays = arrays
        super().__init__(path, list(arrays), key)

    def _read(self, member: str, name: str) -> npt.NDArray[Any]:
        return self._arrays[member]


@contextmanager
def open_safetensors(path: Path, framework: str) -> Iterator[Any]:
    """A safetensors file, its header checked beyond what the library does.

    Args:
        path: of the file.
        framework: whose tensors to read: ``"numpy"``, or ``"pt"``.

    Raises:
        InputError: missing, damaged, or with two tensors of one name.
        MissingCapabilityError: safetensors isn't installed.
    """
    safetensors = require("safetensors", "methods", f"{path}")
    with said_of(path), open_file(path) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise InputError("is no safetensors file (its header would be too long).")
        with said_of("is damaged, cut off or no safetensors file; its header"):
            read_json(stream.read(length))
    try:
        opened = safetensors.safe_open(path, framework=framework)
    except Exception as problem:  # of the library, of the system, of its JSON
        raise InputError(
            f"{path}: is damaged, cut off or no safetensors file ({problem}); write it again."
        ) from problem
    with opened as file:
        yield file


def _safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    arrays = {}
    with open_safetensors(path, "numpy") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            try:
                arrays[name] = file.get_tensor(name)
            except Exception as problem:  # a dtype that numpy doesn't have, by several names
                kind = file.get_slice(name).get_dtype()
                raise InputError(f"{path}: {_not_read(name, kind, problem)}") from problem
    return arrays


def _torch(path: Path) -> dict[str, npt.NDArray[Any]]:
    torch = require("torch", "methods", f"{path}")
    with said_of(path), open_file(path) as stream:
        if zipfile.is_zipfile(stream):
            check_members(open_zip(stream))  # torch doesn't look at checksums
    try:
        with warnings.catch_warnings():
            # A bare pickle is warned about in torch's words before it is refused, or read.
            warnings.simplefilter("ignore", UserWarning)
            # Indices of sparse tensors that lead outside are found here, not by a crash later.
            with torch.sparse.check_sparse_tensor_invariants(True):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise InputError(
            f"{path}: holds Python objects that are more than tensors, which are never loaded; "
            f"if it is a BlockMask, {_EXPORT}."
        ) from problem
    except Exception as problem:  # whatever damage makes of its unpickler
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise InputError(f"{path}: is damaged or no torch file ({first}).") from problem
    arrays: dict[str, npt.NDArray[Any]] = {}
    with said_of(path):
        for count, (name, value) in enumerate(_parts(content)):
            if count == _MOST_PARTS:
                raise InputError(f"holds more than {_MOST_PARTS:,} parts; save one mask.")
            for key, array in _arrays(value, name):
                if key in arrays and not np.array_equal(arrays[key], array):
                    raise InputError(f"holds '{key}' twice, and they differ; expected one.")
                arrays[key] = array
        if not arrays:
            raise InputError("holds no tensor; expected a tensor or a dict of tensors.")
    return arrays


def _parts(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What nested dicts and lists hold, under names joined by ``/``, themselves among it."""
    yield name, value
    if isinstance(value, dict | list | tuple) and not _is_numbers(value):
        if depth == _MOST_DEPTH:
            raise InputError(
                f"holds itself, or dicts and lists {depth} deep; expected a dict of tensors."
            )
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _parts(item, f"{name}/{key}" if name else str(key), depth + 1)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(n) is int for n in value)


def _arrays(value: Any, name: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """A tensor, numbers or a string as arrays by name; nothing for what is neither."""
    if hasattr(value, "detach"):
        try:
            yield from _tensor(value.detach(), name)
        except InputError:
            raise
        except Exception as problem:
            raise InputError(
                _not_read(name, f"{value.dtype} on {value.device}", problem)
            ) from problem
    elif _is_numbers(value) or isinstance(value, str | int | float):
        yield name, np.asarray(value)


def _tensor(tensor: Any, name: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    layout = str(tensor.layout)
    if layout in ("torch.sparse_bsr", "torch.sparse_bsc"):
        # A file's one mask needs no name of its own, nor does what it says of itself.
        yield from _blocks(tensor, "" if name in ("", "mask") else f"{name}/")
        return
    if layout != "torch.strided":
        _need_room(tensor, tensor.shape, f"sparse tensor ({layout})")
        tensor = tensor.to_dense()
    elif tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        _need_room(tensor, tensor.shape, "tensor that says the same bytes again and again")
    if tensor.is_floating_point() and str(tensor.dtype).removeprefix("torch.") not in _NUMPY:
        tensor = tensor.float()
    yield name or "mask", tensor.resolve_conj().resolve_neg().numpy()


_NUMPY = ("float16", "float32", "float64")  # torch has more


def _blocks(tensor: Any, prefix: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Which blocks of a block-sparse tensor of elements hold something: a mask that says all."""
    values = tensor.values()
    block, tokens = tuple(values.shape[-2:]), tuple(tensor.shape[-2:])
    if 0 in tensor.shape or tensor.dense_dim():
        raise InputError(
            f"holds a sparse tensor of shape {list(tensor.shape)}; expected blocks of numbers."
        )
    H, M, N = tensor.shape[:-2].numel(), tokens[0] // block[0], tokens[1] // block[1]
    _need_room(tensor, (H, M, N), f"sparse tensor ({tensor.layout})")
    by_rows = str(tensor.layout) == "torch.sparse_bsr"
    pointers = tensor.crow_indices() if by_rows else tensor.ccol_indices()
    across = tensor.col_indices() if by_rows else tensor.row_indices()
    lines, kept = M if by_rows else N, across.shape[-1]
    pointers, across = pointers.reshape(H, lines + 1).numpy(), across.reshape(H, kept).numpy()
    holds = (values != 0).flatten(-2).any(-1).reshape(H, kept).numpy()
    mask = np.zeros((H, M, N), dtype=np.bool_)
    for h in range(H):
        along = np.repeat(np.arange(lines), np.diff(pointers[h]))
        mask[(h, along, across[h]) if by_rows else (h, across[h], along)] = holds[h]
    yield f"{prefix}mask", mask
    yield f"{prefix}block_size", np.asarray(block)
    yield f"{prefix}seq_len", np.asarray(tokens)


def _need_room(tensor: Any, shape: Sequence[int], kind: str) -> None:
    """Raise before a few bytes of a tensor become more memory than there is."""
    entries = math.prod(shape)
    if entries > _MOST_ENTRIES:
        raise InputError(
            f"holds a {kind} of {' x '.join(map(str, shape))} entries, more than a mask of blocks "
            "can have; save which blocks are kept, not which elements."
        )
    need_memory(entries * tensor.element_size(), f"a {kind} of {' x '.join(map(str, shape))}")


def _not_read(name: str, dtype: object, problem: Exception) -> str:
    return (
        f"'{name or 'mask'}' is {dtype}, which can't be read as a mask ({problem}); save masks as "
        "bool or whole numbers."
    )
