"""Mask files: the native npz schema and bare arrays, read strictly.

The native schema is ``wavealign.mask/1`` (docs/formats.md): ``mask``, or ``mask_packed`` and
``shape``, or ``indptr``, ``indices`` and ``shape``; with ``block_size`` and optionally
``seq_len`` and ``meta``. A single bare array of rank 2, 3 or 4 is read too when the block
size is given by the caller.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign.masks.block_mask import BlockMask
from wavealign.npz import NpzFile, save_npz

MASK_SCHEMA = "wavealign.mask/1"
_LAYOUTS = {
    "dense": ("mask",),
    "packed": ("mask_packed", "shape"),
    "csr": ("indptr", "indices", "shape"),
}
_EXPECTED = (
    "expected schema='wavealign.mask/1' with 'mask', or 'mask_packed' and 'shape', or 'indptr', "
    "'indices' and 'shape'; or a single bool array"
)


@dataclass(frozen=True)
class LoadedMask:
    """A mask and how its file was understood.

    Attributes:
        mask: the mask.
        name: the file's stem, followed by ``:key`` when a part of the file was read.
        understood_as: one sentence a line: layout, dtype, where block size and lengths are from.
    """

    mask: BlockMask
    name: str
    understood_as: tuple[str, ...]


def load_mask(
    path: str | Path, block: tuple[int, int] | None = None, key: str | None = None
) -> LoadedMask:
    """Read a mask file.

    Args:
        path: an ``.npz`` (native schema, or one bare array) or an ``.npy``.
        block: tokens per query block and per K/V block; needed where the file doesn't say,
            refused where it says something else.
        key: read only the arrays ``key`` or ``key/...`` of a file that holds several masks.

    Raises:
        InputError: anything that isn't a mask, with the file, what was found and what to do.
    """
    with NpzFile(path, key) as file:
        layout = _detect(file)
        if "schema" in file and file.text("schema") != MASK_SCHEMA:
            raise file.error(
                f"has schema '{file.text('schema')}'; this version reads '{MASK_SCHEMA}'."
            )
        notes: list[str] = []
        block_size = _block_size(file, block, notes)
        arguments: dict[str, Any] = {"block": block_size, "meta": _meta(file)}
        if "seq_len" in file:
            tokens_q, tokens_kv = file.integers("seq_len", 2)
            arguments["tokens"] = (tokens_q, tokens_kv)
        mask = _read(file, layout, arguments, notes)
        notes.append(
            f"sequence length: {mask.tokens_q} query and {mask.tokens_kv} key/value tokens "
            + ("(from 'seq_len')" if "seq_len" in file else "(every block full; no 'seq_len')")
        )
    name = Path(path).stem if key is None else f"{Path(path).stem}:{key}"
    return LoadedMask(mask, name, tuple(notes))


def save_mask(path: str | Path, mask: BlockMask) -> None:
    """Write a mask in the native schema, bit-packed, whole or not at all.

    Raises:
        InputError: the path can't be written.
    """
    packed = np.stack([np.packbits(head.to_dense(), axis=-1) for head in mask.heads()])
    save_npz(
        path,
        {
            "schema": MASK_SCHEMA,
            "mask_packed": packed,
            "shape": np.asarray(mask.shape, dtype=np.int64),
            "block_size": np.asarray([mask.block_q, mask.block_kv], dtype=np.int64),
            "seq_len": np.asarray([mask.tokens_q, mask.tokens_kv], dtype=np.int64),
            "meta": json.dumps(dict(mask.meta), sort_keys=True),
        },
    )


def _detect(file: NpzFile) -> str:
    """The layout's name, or the name of the single bare array behind ``"bare:"``."""
    names = set(file.names)
    marks = {"dense": "mask", "packed": "mask_packed", "csr": "indptr"}
    found = [layout for layout, mark in marks.items() if mark in names]
    if len(found) > 1:
        held = " and ".join(f"'{marks[layout]}'" for layout in found)
        raise file.error(f"holds {held}; expected one layout of the mask, not {len(found)}.")
    if found:
        missing = [name for name in _LAYOUTS[found[0]] if name not in names]
        if missing:
            raise file.error(f"has '{marks[found[0]]}' but no '{missing[0]}'; {_EXPECTED}.")
        return found[0]
    if "schema" not in names:
        arrays = names - {"block_size", "seq_len", "meta"}
        if len(arrays) == 1:
            return "bare:" + arrays.pop()
        parts = sorted({name.rpartition("/")[0] for name in names if name.endswith("mask_packed")})
        hint = f" Choose one with --key, e.g. --key {parts[0]}." if parts and parts[0] else ""
        raise file.error(
            f"holds {len(names)} arrays and no schema, so it isn't clear which is the mask; "
            f"{_EXPECTED}.{hint}"
        )
    raise file.error(f"holds no mask; {_EXPECTED}.")


def _block_size(file: NpzFile, given: tuple[int, int] | None, notes: list[str]) -> tuple[int, int]:
    if "block_size" not in file:
        if given is None:
            raise file.error(
                "doesn't say its block size; give it with --block, e.g. --block 128x128 (query x "
                "K/V tokens), or store 'block_size'."
            )
        notes.append(f"block size: {given[0]}x{given[1]} tokens (query x K/V; given)")
        return given
    block_q, block_kv = file.integers("block_size", 2)
    if block_q < 1 or block_kv < 1:
        raise file.error(f"has block_size {block_q}x{block_kv}; expected positive sizes.")
    if given is not None and given != (block_q, block_kv):
        raise file.error(
            f"has block_size {block_q}x{block_kv}, but {given[0]}x{given[1]} was asked for; "
            "leave --block out."
        )
    notes.append(f"block size: {block_q}x{block_kv} tokens (query x K/V; from 'block_size')")
    return block_q, block_kv


def _meta(file: NpzFile) -> dict[str, Any]:
    if "meta" not in file:
        return {}
    try:
        meta = json.loads(file.text("meta"))
    except json.JSONDecodeError as problem:
        raise file.error(f"'meta' is not JSON ({problem}).") from problem
    if not isinstance(meta, dict):
        raise file.error("'meta' is not a JSON object.")
    return meta


def _read(file: NpzFile, layout: str, arguments: dict[str, Any], notes: list[str]) -> BlockMask:
    if layout == "csr":
        shape = _shape(file)
        indptr, indices = file.array("indptr"), file.array("indices")
        for name, array in (("indptr", indptr), ("indices", indices)):
            if array.dtype.kind not in "iu" or array.ndim != 1:
                raise file.error(
                    f"'{name}' is {array.dtype} of rank {array.ndim}; expected a rank-1 array of "
                    "whole numbers."
                )
        notes.insert(0, f"layout: csr ('indptr', 'indices'), [H, M, N] = {list(shape)}")
        with file.blamed():
            return BlockMask.from_csr(indptr, indices, shape, **arguments)
    if layout == "packed":
        return _read_packed(file, arguments, notes)
    name = layout.removeprefix("bare:") if layout.startswith("bare:") else "mask"
    array = file.array(name)
    if array.ndim not in (2, 3, 4):
        raise file.error(
            f"'{name}' has rank {array.ndim}, shape {array.shape}; expected [M, N], [H, M, N] or "
            "[B, H, M, N]."
        )
    if 0 in array.shape:
        raise file.error(f"'{name}' has shape {array.shape}: an axis of size 0.")
    folded = " (batch folded into heads)" if array.ndim == 4 else ""
    notes.insert(0, f"layout: '{name}', {array.dtype} of shape {list(array.shape)}{folded}")
    checked = _as_bool(file, name, array)
    with file.blamed():
        return BlockMask.from_dense(checked, **arguments)


def _read_packed(file: NpzFile, arguments: dict[str, Any], notes: list[str]) -> BlockMask:
    H, M, N = _shape(file)
    packed = file.array("mask_packed")
    if packed.dtype != np.uint8:
        raise file.error(f"'mask_packed' is {packed.dtype}; expected uint8 from numpy.packbits.")
    expected = (H, M, -(-N // 8))
    if packed.shape != expected and not (H == 1 and packed.shape == expected[1:]):
        raise file.error(
            f"'mask_packed' has shape {packed.shape} and 'shape' says {(H, M, N)}; expected "
            f"{expected} packed bytes."
        )
    notes.insert(0, f"layout: 'mask_packed' (bits along N, big-endian), [H, M, N] = {[H, M, N]}")
    with file.blamed():
        return BlockMask.from_packed(packed.reshape(expected), N, **arguments)


def _shape(file: NpzFile) -> tuple[int, int, int]:
    H, M, N = file.integers("shape", 3)
    if min(H, M, N) < 1:
        raise file.error(f"'shape' is {(H, M, N)}; expected [H, M, N], each at least 1.")
    return H, M, N


def _as_bool(file: NpzFile, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array as something whose non-zero entries are the kept blocks, or an error."""
    if array.dtype == np.bool_:
        return array
    if array.dtype.kind not in "iuf":
        raise file.error(f"'{name}' is {array.dtype}; expected bool (or only zeros and ones).")
    for part in array.reshape(-1, *array.shape[-2:]):
        wrong = part[(part != 0) & (part != 1)]
        if wrong.size:
            raise file.error(
                f"'{name}' is {array.dtype} and holds {wrong[0]}; expected bool, or only zeros "
                "and ones. Threshold scores first, e.g. scores > cutoff."
            )
    return array
