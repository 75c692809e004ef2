"""Mask files: the native npz schema and bare arrays, read strictly.

The native schema is ``wavealign.mask/1`` (docs/formats.md): ``mask``, or ``mask_packed`` and
``shape``, or ``indptr``, ``indices`` and ``shape``; with ``block_size`` and optionally
``seq_len`` and ``meta``. A single bare array of rank 2, 3 or 4 is read too when the block
size is given by the caller, and so are the layouts of other programs (`wavealign.masks.layouts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wavealign.errors import said_of, unknown_name
from wavealign.masks.block_mask import BlockMask
from wavealign.masks.checks import zeros_and_ones
from wavealign.masks.export import packed
from wavealign.masks.layouts import LAYOUTS, Layout, Reading, length_note, lengths
from wavealign.npz import ArrayFile, save_npz
from wavealign.structures import read_json
from wavealign.tensor_files import open_arrays

MASK_SCHEMA = "wavealign.mask/1"
_MARKS = {"mask": (), "mask_packed": ("shape",), "indptr": ("indices", "shape")}
"""The array that each of our layouts is known by, and what else it needs."""

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
    path: str | Path,
    block: tuple[int, int] | None = None,
    key: str | None = None,
    form: str | None = None,
    tokens: tuple[int, int] | None = None,
) -> LoadedMask:
    """Read a mask file.

    Args:
        path: an ``.npz``, ``.npy``, ``.safetensors`` or ``.pt`` file: the native schema, one
            bare array, or one of `wavealign.masks.layouts`.
        block: tokens per query block and per K/V block; needed where the file doesn't say,
            refused where it says something else.
        key: read only the arrays ``key`` or ``key/...`` of a file that holds several masks.
        form: read it as this, where a file fits several: "native", "dense" or the name of a
            layout.
        tokens: query and key/value tokens, where the file doesn't say.

    Raises:
        InputError: anything that isn't a mask, with the file, what was found and what to do.
        MissingCapabilityError: what reads this kind of file isn't installed.

    Example:
        >>> import numpy as np
        >>> import wavealign as wa
        >>> np.savez("bare.npz", mask=np.eye(8, dtype=bool))  # the file doesn't say its block size
        >>> loaded = wa.load_mask("bare.npz", block=(128, 64))
        >>> loaded.mask.shape, loaded.mask.tokens_q, loaded.mask.tokens_kv
        ((1, 8, 8), 1024, 512)
        >>> loaded.understood_as[0]
        "layout: 'mask', bool of shape [8, 8]"
    """
    with open_arrays(path, key) as file:
        at = Reading(file, block, tokens)
        foreign = _foreign(file, form)
        mask = _native(at) if foreign is None else foreign.read(at)
    name = Path(path).stem if key is None else f"{Path(path).stem}:{key}"
    return LoadedMask(mask, name, tuple(at.notes))


def _native(at: Reading) -> BlockMask:
    """A mask of our own schema, or a bare array."""
    file, name = at.file, _detect(at.file)
    if "schema" in file and file.text("schema") != MASK_SCHEMA:
        raise file.error(f"has schema '{file.text('schema')}'; this version reads '{MASK_SCHEMA}'.")
    known = {"block": _block_size(at), "meta": _meta(file), "tokens": lengths(at)}
    mask = _read(at, name, known)
    origin = "every block full; no 'seq_len'" if at.tokens is None else "given"
    origin = "from 'seq_len'" if "seq_len" in file else origin
    at.notes.append(f"{length_note(mask)} ({origin})")
    return mask


def _foreign(file: ArrayFile, form: str | None) -> Layout | None:
    """The layout of another program that the file has, or None where it is one of our own.

    Raises:
        InputError: it fits several, or not the one that was asked for.
    """
    by_name = {layout.name: layout for layout in LAYOUTS}
    if form is not None:
        if form not in ("native", "dense", *by_name):
            raise unknown_name("format", form, ["native", "dense", *by_name])
        asked = by_name.get(form)
        if asked is not None and not asked.fits(file):
            missing = [name for name in asked.needs if name not in file]
            raise file.error(f"isn't {asked.title}: it has no '{missing[0]}'.")
        return asked
    if "schema" in file:
        return None
    found = [layout for layout in LAYOUTS if layout.fits(file)]
    own = [mark for mark in ("mask", "mask_packed") if mark in file]
    rows = {"indptr", *_MARKS["indptr"]}
    if rows <= set(file.names) and not any(layout.name == "scipy" for layout in found):
        own.append("indptr")
    if found and len(found) + bool(own) > 1:
        names = [f"{layout.name} ({', '.join(layout.needs)})" for layout in found]
        names += [f"native ('{own[0]}')"] if own else []
        raise file.error(
            f"can be read in {len(names)} ways: {'; '.join(names)}. Choose with --format, e.g. "
            f"--format {found[0].name}."
        )
    return found[0] if found else None


def save_mask(path: str | Path, mask: BlockMask) -> None:
    """Write a mask in the native schema, bit-packed, whole or not at all.

    Raises:
        InputError: the path can't be written.

    Example:
        >>> import numpy as np
        >>> import wavealign as wa
        >>> mask = wa.BlockMask.from_dense(np.eye(8), block=(128, 64), meta={"model": "mine"})
        >>> wa.save_mask("masks.npz", mask)
        >>> found = wa.load_mask("masks.npz").mask
        >>> found.digest == mask.digest, found.block_kv, found.meta
        (True, 64, {'model': 'mine'})
    """
    save_npz(path, packed(mask))


def _detect(file: ArrayFile) -> str:
    """The array that the layout is known by, or the single bare array."""
    names = set(file.names)
    found = [mark for mark in _MARKS if mark in names]
    if len(found) > 1:
        held = " and ".join(f"'{mark}'" for mark in found)
        raise file.error(f"holds {held}; expected one layout of the mask, not {len(found)}.")
    if found:
        missing = [name for name in _MARKS[found[0]] if name not in names]
        if missing:
            raise file.error(f"has '{found[0]}' but no '{missing[0]}'; {_EXPECTED}.")
        return found[0]
    if "schema" not in names:
        arrays = names - {"block_size", "seq_len", "meta"}
        if len(arrays) == 1:
            return arrays.pop()
        parts = sorted({name.rpartition("/")[0] for name in names if name.endswith("mask_packed")})
        choices = [name for name in parts if name] or sorted(arrays)
        hint = f" Choose one with --key, e.g. --key {choices[0]}." if choices else ""
        raise file.error(
            f"holds {len(names)} arrays and no schema, so it isn't clear which is the mask; "
            f"{_EXPECTED}.{hint}"
        )
    raise file.error(f"holds no mask; {_EXPECTED}.")


def _block_size(at: Reading) -> tuple[int, int]:
    file, given = at.file, at.block
    if "block_size" not in file:
        if given is None:
            raise file.error(
                "doesn't say its block size; give it with --block, e.g. --block 128x128 (query x "
                "K/V tokens), or store 'block_size'."
            )
        at.notes.append(f"block size: {given[0]}x{given[1]} tokens (query x K/V; given)")
        return given
    block_q, block_kv = file.integers("block_size", 2)
    if block_q < 1 or block_kv < 1:
        raise file.error(f"has block_size {block_q}x{block_kv}; expected positive sizes.")
    if given not in (None, (block_q, block_kv)):
        raise file.error(
            f"has block_size {block_q}x{block_kv}, but {given[0]}x{given[1]} was asked for; "
            "leave --block out."
        )
    at.notes.append(f"block size: {block_q}x{block_kv} tokens (query x K/V; from 'block_size')")
    return block_q, block_kv


def _meta(file: ArrayFile) -> dict[str, Any]:
    if "meta" not in file:
        return {}
    text = file.text("meta")
    with file.blamed(), said_of("'meta'"):
        meta = read_json(text)
    if not isinstance(meta, dict):
        raise file.error("'meta' is not a JSON object.")
    return meta


def _read(at: Reading, name: str, known: dict[str, Any]) -> BlockMask:
    """The mask that the array `name` holds; its note stands first."""
    file, notes = at.file, at.notes
    if name == "indptr":
        shape = _shape(file)
        indptr, indices = file.array("indptr"), file.array("indices")
        for part, array in (("indptr", indptr), ("indices", indices)):
            if array.dtype.kind not in "iu" or array.ndim != 1:
                raise file.error(
                    f"'{part}' is {array.dtype} of rank {array.ndim}; expected a rank-1 array of "
                    "whole numbers."
                )
        notes.insert(0, f"layout: csr ('indptr', 'indices'), [H, M, N] = {list(shape)}")
        with file.blamed():
            return BlockMask.from_csr(indptr, indices, shape, **known)
    if name == "mask_packed":
        return _read_packed(at, known)
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
    with file.blamed():
        zeros_and_ones(array, f"'{name}'")
        return BlockMask.from_dense(array.astype(bool, copy=False), **known)


def _read_packed(at: Reading, known: dict[str, Any]) -> BlockMask:
    file = at.file
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
    at.notes.insert(0, f"layout: 'mask_packed' (bits along N, big-endian), [H, M, N] = {[H, M, N]}")
    with file.blamed():
        return BlockMask.from_packed(packed.reshape(expected), N, **known)


def _shape(file: ArrayFile) -> tuple[int, int, int]:
    H, M, N = file.integers("shape", 3)
    if min(H, M, N) < 1:
        raise file.error(f"'shape' is {(H, M, N)}; expected [H, M, N], each at least 1.")
    return H, M, N
