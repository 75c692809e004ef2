"""Mask files that other programs write: block lists by counts, deltas or row pointers.

Each layout is recognised by the names of its arrays. Where a file fits several, nothing is
guessed: the error names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign.masks.block_mask import BlockMask
from wavealign.npz import ArrayFile

Ints = npt.NDArray[np.integer[Any]]
Tokens = tuple[int, int]


@dataclass(frozen=True)
class Given:
    """What the caller knows about a file.

    Attributes:
        block: tokens per query and K/V block, or None.
        tokens: query and key/value tokens, or None.
    """

    block: tuple[int, int] | None
    tokens: Tokens | None


@dataclass(frozen=True)
class Layout:
    """One way to write a mask.

    Attributes:
        name: as given to ``--format``.
        title: whose it is.
        needs: names of arrays that must be there.
        read: makes the mask and adds notes.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    read: Callable[[ArrayFile, Given, list[str]], BlockMask]

    def fits(self, file: ArrayFile) -> bool:
        """Whether the file has all that is needed."""
        return all(name in file for name in self.needs)


def _flex(file: ArrayFile, given: Given, notes: list[str]) -> BlockMask:
    lists = [("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")]
    notes.append("layout: FlexAttention BlockMask, partial and full blocks united")
    return _counted(file, given, notes, lists, "BLOCK_SIZE", "seq_lengths")


def _fa4(file: ArrayFile, given: Given, notes: list[str]) -> BlockMask:
    lists = [("mask_block_cnt", "mask_block_idx"), ("full_block_cnt", "full_block_idx")]
    notes.append("layout: FlashAttention-4 block lists, partial and full blocks united")
    return _counted(file, given, notes, lists, "block_size", "seq_len")


def _vsa(file: ArrayFile, given: Given, notes: list[str]) -> BlockMask:
    notes.append("layout: VSA index lists (query tile -> key tiles, padded)")
    if "variable_block_sizes" in file:
        sizes = file.array("variable_block_sizes")
        if len(set(sizes.ravel()[:-1].tolist())) > 1:
            notes.append("tiles of different sizes: every tile is counted as a full block")
    lists = [("q2k_num", "q2k_index")]
    return _counted(file, given, notes, lists, "block_size", "seq_len")


def _lut(file: ArrayFile, given: Given, notes: list[str]) -> BlockMask:
    """Each entry is the step from the block before it, the first one from block 0."""
    notes.append("layout: SpargeAttn look-up table (steps from block to block)")
    block = _block(file, "block_size", given, notes)
    lut, counts = _integers(file, "lut"), _integers(file, "valid_block_num")
    heads, M, N = _heads(file, "lut", lut)
    counts = _fitting(file, "valid_block_num", counts, lut.shape[:-1]).reshape(-1)
    used = _used(file, "valid_block_num", counts, N)
    steps = lut.reshape(-1, N)
    blocks = np.cumsum(np.where(used, steps, 0), axis=1, dtype=np.int64)
    wrong = used & ((blocks >= N) | (blocks < 0))
    if wrong.any():
        row = int(np.argmax(wrong.any(axis=1)))
        raise file.error(
            f"'lut' runs past its end: the steps of row {row} lead to K/V block "
            f"{blocks[row][wrong[row]][0]}, and there are {N}. Are its entries block numbers "
            "rather than steps?"
        )
    if (used[:, 1:] & (steps[:, 1:] <= 0)).any():
        raise file.error("'lut' holds a step of 0 or less behind the first; expected steps ahead.")
    return _mask(file, given, counts, blocks[used], (heads, M, N), block, "seq_len", notes)


def _scipy(file: ArrayFile, given: Given, notes: list[str]) -> BlockMask:
    kind = file.text("format")
    if kind not in ("csr", "bsr"):
        raise file.error(f"is a scipy matrix in format '{kind}'; convert it with .tocsr() first.")
    rows, columns = file.integers("shape", 2)
    data = file.array("data")
    pointers, indices = _integers(file, "indptr"), _integers(file, "indices")
    notes.append(f"layout: scipy {kind}, one head of {rows} x {columns}")
    if kind == "bsr":
        if data.ndim != 3:
            raise file.error(f"'data' of a bsr matrix has rank {data.ndim}; expected 3.")
        block = int(data.shape[1]), int(data.shape[2])
        if given.block not in (None, block):
            raise file.error(f"has blocks of {block[0]}x{block[1]}; leave --block out.")
        notes.append(f"block size: {block[0]}x{block[1]} tokens (from the blocks of 'data')")
        kept = np.asarray(data.reshape(len(data), -1).any(axis=1))
        shape = (1, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    else:
        block = _block(file, "block_size", given, notes)
        kept, shape = np.asarray(data.reshape(-1) != 0), (1, rows, columns)
    if len(kept) != len(indices):
        raise file.error(f"has {len(indices)} indices and {len(kept)} entries of 'data'.")
    if len(pointers) != shape[1] + 1 or (np.diff(pointers) < 0).any() or pointers[0] != 0:
        raise file.error(f"'indptr' isn't the row pointers of {shape[1]} rows.")
    if pointers[-1] != len(indices):
        raise file.error(f"'indptr' ends at {pointers[-1]}; expected {len(indices)}, the indices.")
    row_of = np.repeat(np.arange(shape[1]), np.diff(pointers))
    counts = np.bincount(row_of[kept], minlength=shape[1])
    return _mask(file, given, counts, indices[kept], shape, block, "seq_len", notes)


def _flashinfer(file: ArrayFile, given: Given, notes: list[str]) -> BlockMask:
    pointers, indices = _integers(file, "indptr"), _integers(file, "indices").reshape(-1)
    notes.append("layout: FlashInfer block-sparse rows (indptr, indices, R x C)")
    block = file.integers("R", 1)[0], file.integers("C", 1)[0]
    if given.block not in (None, block):
        raise file.error(f"has blocks of {block[0]}x{block[1]}; leave --block out.")
    notes.append(f"block size: {block[0]}x{block[1]} tokens (from 'R' and 'C')")
    pointers = pointers.reshape(-1, pointers.shape[-1])
    H, M = len(pointers), pointers.shape[1] - 1
    counts = np.diff(pointers, axis=1).reshape(-1)
    if M < 1 or (counts < 0).any() or counts.sum() != len(indices):
        raise file.error(
            f"'indptr' counts {counts.sum()} blocks and 'indices' holds {len(indices)}; expected "
            "ascending row pointers, [M+1] or [H, M+1]."
        )
    tokens = given.tokens
    if tokens is None and "M" in file and "N" in file:
        tokens = file.integers("M", 1)[0], file.integers("N", 1)[0]
        notes.append(f"sequence length: {tokens[0]} and {tokens[1]} tokens (from 'M' and 'N')")
    if tokens is None:
        raise file.error(
            "doesn't say how many K/V blocks there are; store 'M' and 'N' (tokens), or give "
            "--seq-len."
        )
    shape = (H, M, math.ceil(tokens[1] / block[1]))
    return _mask(file, Given(block, tokens), counts, indices, shape, block, "", notes)


def _variable(file: ArrayFile, given: Given, notes: list[str]) -> BlockMask:
    raise file.error(
        "holds blocks of variable sizes ('block_row_sz', 'block_col_sz'); a block mask has blocks "
        "of one size. Cut them to a fixed size first."
    )


LAYOUTS = (
    Layout("flex", "FlexAttention BlockMask", ("kv_num_blocks", "kv_indices"), _flex),
    Layout("fa4", "FlashAttention-4 lists", ("mask_block_cnt", "mask_block_idx"), _fa4),
    Layout("vsa", "VSA index lists", ("q2k_index", "q2k_num"), _vsa),
    Layout("sparge-lut", "SpargeAttn look-up table", ("lut", "valid_block_num"), _lut),
    Layout("scipy", "scipy csr or bsr", ("format", "indptr", "indices", "shape", "data"), _scipy),
    Layout("flashinfer", "FlashInfer rows", ("indptr", "indices", "R", "C"), _flashinfer),
    Layout(
        "variable", "blocks of variable sizes",
        ("block_mask_map", "block_row_sz", "block_col_sz"), _variable,
    ),
)  # fmt: skip


def _counted(
    file: ArrayFile,
    given: Given,
    notes: list[str],
    lists: list[tuple[str, str]],
    block_name: str,
    tokens_name: str,
) -> BlockMask:
    """Rows as the first ``counts`` entries of wider lists; what follows is filler."""
    block = _block(file, block_name, given, notes)
    present = [pair for pair in lists if pair[0] in file and pair[1] in file]
    arrays = [(_integers(file, count), _integers(file, index)) for count, index in present]
    leading = np.broadcast_shapes(*(index.shape[:-1] for _, index in arrays))
    width = max(index.shape[-1] for _, index in arrays)
    heads, M, _ = _heads(file, present[0][1], np.empty((*leading, 1)))
    tokens = _tokens(file, tokens_name, given)
    # The lists may be narrower than the K/V blocks (compact form); only a length says so.
    N = math.ceil(tokens[1] / block[1]) if tokens is not None else width
    rows, blocks = [], []
    for (count_name, index_name), (count, index) in zip(present, arrays, strict=True):
        counts = _fitting(file, count_name, count, index.shape[:-1])
        counts = np.broadcast_to(counts, leading).reshape(-1)
        entries = np.broadcast_to(index, (*leading, index.shape[-1])).reshape(len(counts), -1)
        used = _used(file, count_name, counts, entries.shape[1])
        found = entries[used]
        if found.size and (found.min() < 0 or found.max() >= N):
            wrong = int(found.min() if found.min() < 0 else found.max())
            raise file.error(
                f"'{index_name}' holds K/V block {wrong}; expected 0 to {N - 1}. "
                + (
                    f"The sequence length says {N} K/V blocks."
                    if tokens is not None
                    else f"The lists are {N} wide; if they are compact, give --seq-len."
                )
            )
        rows.append(np.repeat(np.arange(len(counts)), counts))
        blocks.append(found)
    row, column = np.concatenate(rows), np.concatenate(blocks)
    ranked = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=heads * M)
    shape = (heads, M, N)
    found_tokens = Given(given.block, tokens)
    return _mask(file, found_tokens, counts, column[ranked], shape, block, "", notes)


def _mask(
    file: ArrayFile,
    given: Given,
    counts: Ints,
    indices: Ints,
    shape: tuple[int, int, int],
    block: tuple[int, int],
    tokens_name: str,
    notes: list[str],
) -> BlockMask:
    tokens = _tokens(file, tokens_name, given)
    indptr = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    notes.append(f"[H, M, N] = {list(shape)} (a batch is folded into heads)")
    with file.blamed():
        return BlockMask.from_csr(indptr, indices, shape, block, tokens)


def _block(file: ArrayFile, name: str, given: Given, notes: list[str]) -> tuple[int, int]:
    if name not in file:
        if given.block is None:
            raise file.error(
                f"doesn't say its block size ('{name}'); give it with --block, e.g. --block "
                "128x128 (query x K/V tokens)."
            )
        notes.append(f"block size: {given.block[0]}x{given.block[1]} tokens (given)")
        return given.block
    array = file.array(name)
    block_q, block_kv = file.integers(name, 2) if array.size == 2 else file.integers(name, 1) * 2
    if min(block_q, block_kv) < 1:
        raise file.error(f"has {name} {block_q}x{block_kv}; expected positive sizes.")
    if given.block not in (None, (block_q, block_kv)):
        raise file.error(f"has {name} {block_q}x{block_kv}; leave --block out.")
    notes.append(f"block size: {block_q}x{block_kv} tokens (from '{name}')")
    return block_q, block_kv


def _tokens(file: ArrayFile, name: str, given: Given) -> Tokens | None:
    if name not in file:
        return given.tokens
    q, kv = file.integers(name, 2)
    if given.tokens not in (None, (q, kv)):
        raise file.error(f"has {name} {q}x{kv}; leave --seq-len out.")
    return q, kv


def _integers(file: ArrayFile, name: str) -> Ints:
    array = file.array(name)
    if array.dtype.kind not in "iu" or array.ndim < 1:
        raise file.error(f"'{name}' is {array.dtype} of rank {array.ndim}; expected whole numbers.")
    return array.astype(np.int64)


def _heads(file: ArrayFile, name: str, array: npt.NDArray[Any]) -> tuple[int, int, int]:
    """Heads with the batch folded in, rows, width of lists ``[..., M, K]``."""
    if array.ndim not in (2, 3, 4) or 0 in array.shape:
        raise file.error(
            f"'{name}' has shape {list(array.shape)}; expected [M, K], [H, M, K] or [B, H, M, K]."
        )
    return math.prod(array.shape[:-2]), array.shape[-2], array.shape[-1]


def _fitting(file: ArrayFile, name: str, counts: Ints, shape: tuple[int, ...]) -> Ints:
    """Counts of the shape that the lists have, singleton axes stretched."""
    try:
        return np.asarray(np.broadcast_to(counts, shape))
    except ValueError as problem:
        raise file.error(
            f"'{name}' has shape {list(counts.shape)}; expected {list(shape)}, one a row."
        ) from problem


def _used(file: ArrayFile, name: str, counts: Ints, width: int) -> npt.NDArray[np.bool_]:
    if counts.size and (counts.min() < 0 or counts.max() > width):
        wrong = int(counts.min() if counts.min() < 0 else counts.max())
        raise file.error(f"'{name}' counts {wrong} blocks in a row; expected 0 to {width}.")
    return np.asarray(np.arange(width)[None, :] < counts[:, None])
