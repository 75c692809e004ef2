"""Arrays of safetensors files and of torch's ``.pt``, beside npz: never code, one clear error."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign._extras import require
from wavealign.errors import InputError
from wavealign.npz import ArrayFile, NpzFile, need_file

_EXPORT = (
    "save its tensors instead, full blocks and partial ones: torch.save({'kv_num_blocks': "
    "m.kv_num_blocks, 'kv_indices': m.kv_indices, 'full_kv_num_blocks': m.full_kv_num_blocks, "
    "'full_kv_indices': m.full_kv_indices, 'BLOCK_SIZE': m.BLOCK_SIZE, 'seq_lengths': "
    "m.seq_lengths}, FILE)"
)

_MOST_ENTRIES = 2**33


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


def _safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    safetensors = require("safetensors", "methods", f"{path}")
    need_file(path)
    arrays = {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                arrays[name] = file.get_tensor(name)
    except (safetensors.SafetensorError, OSError) as problem:
        raise InputError(
            f"{path}: is damaged, cut off or no safetensors file ({problem}); write it again."
        ) from problem
    except TypeError as problem:  # a dtype that numpy doesn't have
        raise InputError(
            f"{path}: can't be read as a mask ({problem}); save masks as bool or whole numbers."
        ) from problem
    return arrays


def _torch(path: Path) -> dict[str, npt.NDArray[Any]]:
    torch = require("torch", "methods", f"{path}")
    need_file(path)
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
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as problem:
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise InputError(f"{path}: is damaged or no torch file ({first}).") from problem
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        _flatten(content, "", arrays)
    except InputError as problem:
        raise InputError(f"{path}: {problem}") from problem
    if not arrays:
        raise InputError(f"{path}: holds no tensor; expected a tensor or a dict of tensors.")
    return arrays


def _flatten(value: Any, name: str, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Tensors, numbers and strings of nested dicts and lists, under names joined by ``/``."""
    below = f"{name}/" if name else ""
    numbers = isinstance(value, list | tuple) and value and all(isinstance(n, int) for n in value)
    if hasattr(value, "detach"):
        tensor = value.detach()
        layout = str(tensor.layout)
        if layout in ("torch.sparse_bsr", "torch.sparse_bsc"):
            for own, array in _blocks(tensor).items():
                # A file's one mask needs no name of its own, nor does what it says of itself.
                _put(own if name in ("", "mask") else f"{below}{own}", array, arrays)
            return
        if layout != "torch.strided":
            _need_room(tensor, tensor.shape)
            tensor = tensor.to_dense()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        try:
            array = tensor.resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError) as problem:  # numpy has no such numbers
            raise InputError(
                f"holds {tensor.dtype} on {tensor.device} that can't be read ({problem}); save "
                "masks as dense bool or whole numbers."
            ) from problem
        _put(name or "mask", array, arrays)
    elif numbers or isinstance(value, str | int | float):
        _put(name, np.asarray(value), arrays)
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _flatten(item, f"{below}{key}", arrays)


def _put(name: str, array: npt.NDArray[Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
    if name in arrays and not np.array_equal(arrays[name], array):
        raise InputError(f"says '{name}' twice, {arrays[name].tolist()} and {array.tolist()}.")
    arrays[name] = array


def _blocks(tensor: Any) -> dict[str, npt.NDArray[Any]]:
    """Which blocks of a block-sparse tensor of elements hold something: a mask that says all."""
    if tensor.dense_dim():
        raise InputError(
            f"holds a block-sparse tensor {list(tensor.shape)} whose elements are tensors; "
            "expected numbers."
        )
    block = tuple(tensor.values().shape[-2:])
    tokens = tuple(tensor.shape[-2:])
    H, M, N = tensor.shape[:-2].numel(), tokens[0] // block[0], tokens[1] // block[1]
    _need_room(tensor, (H, M, N))
    by_rows = str(tensor.layout) == "torch.sparse_bsr"
    pointers = tensor.crow_indices() if by_rows else tensor.ccol_indices()
    across = tensor.col_indices() if by_rows else tensor.row_indices()
    lines = M if by_rows else N
    pointers, across = pointers.reshape(H, lines + 1).numpy(), across.reshape(H, -1).numpy()
    holds = (tensor.values().reshape(H, across.shape[1], -1) != 0).any(-1).numpy()
    mask = np.zeros((H, M, N), dtype=np.bool_)
    for h in range(H):
        along = np.repeat(np.arange(lines), np.diff(pointers[h]))
        mask[(h, along, across[h]) if by_rows else (h, across[h], along)] = holds[h]
    return {"mask": mask, "block_size": np.asarray(block), "seq_len": np.asarray(tokens)}


def _need_room(tensor: Any, shape: Sequence[int]) -> None:
    """Raise before a few bytes of a sparse tensor become more memory than there is."""
    if math.prod(shape) > _MOST_ENTRIES:
        raise InputError(
            f"holds a sparse tensor ({tensor.layout}) of {' x '.join(map(str, shape))} entries, "
            "more than a mask of blocks can have; save which blocks are kept, not which elements."
        )
