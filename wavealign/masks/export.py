"""Writing masks in the forms that kernels and other programs take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign._extras import require
from wavealign.errors import InputError, unknown_name
from wavealign.masks.block_mask import BlockMask
from wavealign.npz import save_npz
from wavealign.outputs import check_writable, whole_file
from wavealign.structures import json_text

Arrays = dict[str, npt.NDArray[Any]]


def packed(mask: BlockMask) -> Arrays:
    """The native schema, one bit a block."""
    heads = [np.packbits(head.to_dense(), axis=-1) for head in mask.heads()]
    return {"mask_packed": np.stack(heads), **_native(mask)}


def _native(mask: BlockMask) -> Arrays:
    return {
        "schema": np.asarray("wavealign.mask/1"),
        "shape": np.asarray(mask.shape, dtype=np.int64),
        **_sizes(mask),
        "meta": np.asarray(json_text(dict(mask.meta), sort_keys=True)),
    }


def _sizes(mask: BlockMask, block: str = "block_size", tokens: str = "seq_len") -> Arrays:
    """Block size and sequence lengths under the names that a form has for them."""
    return {
        block: np.asarray([mask.block_q, mask.block_kv], dtype=np.int64),
        tokens: np.asarray([mask.tokens_q, mask.tokens_kv], dtype=np.int64),
    }


def _lists(mask: BlockMask) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Counts ``[1, H, M]`` and lists ``[1, H, M, N]``, zeros behind each row's blocks."""
    counts = np.diff(mask.indptr)
    lists = np.zeros((len(counts), mask.N), dtype=np.int32)
    lists[np.arange(mask.N)[None, :] < counts[:, None]] = mask.indices
    shape = (1, mask.H, mask.M)
    return counts.astype(np.int32).reshape(shape), lists.reshape(*shape, mask.N)


def _flex(mask: BlockMask) -> Arrays:
    counts, lists = _lists(mask)
    return {
        "kv_num_blocks": np.zeros_like(counts),
        "kv_indices": np.zeros_like(lists),  # as wide: compiled kernels take one width for both
        "full_kv_num_blocks": counts,
        "full_kv_indices": lists,
        **_sizes(mask, "BLOCK_SIZE", "seq_lengths"),
    }


def _fa4(mask: BlockMask) -> Arrays:
    counts, lists = _lists(mask)
    return {
        "mask_block_cnt": np.zeros_like(counts),
        "mask_block_idx": np.zeros_like(lists[..., :1]),
        "full_block_cnt": counts,
        "full_block_idx": lists,
        **_sizes(mask),
    }


def _scipy(mask: BlockMask) -> Arrays:
    if mask.H != 1:
        raise InputError(f"scipy holds one head and the mask has {mask.H}; choose one by --heads.")
    return {
        "format": np.asarray(b"csr"),
        "shape": np.asarray([mask.M, mask.N]),
        "indptr": mask.indptr.astype(np.int32),
        "indices": mask.indices,
        "data": np.ones(mask.nnz, dtype=np.bool_),
        **_sizes(mask),
    }


FORMS: Mapping[str, Callable[[BlockMask], Arrays]] = {
    "packed": packed,
    "csr": lambda mask: {"indptr": mask.indptr, "indices": mask.indices, **_native(mask)},
    "flex": _flex, "fa4": _fa4, "scipy": _scipy,
}  # fmt: skip
"""What `wavealign mask convert --to` writes; the first two are the native schema."""


def check_target(path: str | Path, form: str) -> Path:
    """The path, if a mask can be written there in this form; raises before any work is done.

    Raises:
        InputError: an unknown form or suffix, a form that the container can't hold, or a path
            that can't be written.
        MissingCapabilityError: safetensors isn't installed.
    """
    if form not in FORMS:
        raise unknown_name("form", form, FORMS)
    target = check_writable(path, ".npz", ".safetensors")
    if target.suffix.lower() == ".safetensors":
        if form in ("packed", "csr", "scipy"):
            raise InputError(
                f"{target}: form '{form}' holds text, which safetensors can't; write an .npz."
            )
        require("safetensors", "methods", f"{target}")
    return target


def export_mask(path: str | Path, mask: BlockMask, form: str = "packed") -> None:
    """Write a mask as npz or safetensors (by suffix), whole or not at all.

    Block lists of kernels say that every block is full: nothing inside a block is masked.

    Args:
        path: the file to write.
        mask: the mask.
        form: one of `FORMS`.

    Raises:
        InputError: see `check_target`, or several heads where the form holds one.
        MissingCapabilityError: safetensors isn't installed.
    """
    target = check_target(path, form)
    arrays = FORMS[form](mask)
    if target.suffix.lower() != ".safetensors":
        save_npz(target, arrays)
        return
    numpy_side = require("safetensors.numpy", "methods", f"{target}")
    with whole_file(target) as stream:
        stream.write(numpy_side.save({name: np.ascontiguousarray(a) for name, a in arrays.items()}))
