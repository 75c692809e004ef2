"""Mask files that other programs write: block lists by counts, deltas or row pointers.

Each layout is recognised by the names of its arrays. Where a file fits several, nothing is
guessed: the error names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign.masks.block_mask import BlockMask, row_pointers
from wavealign.masks.checks import outside
from wavealign.npz import ArrayFile

Ints = npt.NDArray[np.integer[Any]]
Pair = tuple[int, int]


@dataclass
class Reading:
    """A file that is being read as a mask.

    Attributes:
        file: its arrays.
        block, tokens: what the caller knows: tokens per query and K/V block, query and key/value
            tokens; or None.
        notes: how the file was understood, a sentence each.
    """

    file: ArrayFile
    block: Pair | None
    tokens: Pair | None
    notes: list[str] = field(default_factory=list)


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
    read: Callable[[Reading], BlockMask]

    def fits(self, file: ArrayFile) -> bool:
        """Whether the file has all that is needed."""
        return all(name in file for name in self.needs)


def _counted(
    at: Reading,
    said: str,
    lists: list[tuple[str, str]],
    block_name: str = "block_size",
    tokens_name: str = "seq_len",
) -> BlockMask:
    """Rows as the first ``counts`` entries of wider lists; what follows is filler."""
    at.notes.append(f"layout: {said}")
    file = at.file
    if "variable_block_sizes" in file:
        sizes = file.array("variable_block_sizes")
        if len(set(sizes.ravel()[:-1].tolist())) > 1:
            at.notes.append("tiles of different sizes: every tile is counted as a full block")
    block = _block(at, block_name)
    present = []
    for pair in lists:
        here = [name for name in pair if name in file]
        if len(here) == 1:
            missing = pair[1 - pair.index(here[0])]
            raise file.error(
                f"has '{here[0]}' and no '{missing}', so blocks would be lost; save both."
            )
        present += [pair] if here else []
        if not here:
            at.notes.append(f"no '{pair[0]}': blocks are those of '{lists[0][1]}' alone")
    arrays = [(_integers(file, count), _integers(file, index)) for count, index in present]
    leading = np.broadcast_shapes(*(index.shape[:-1] for _, index in arrays))
    width = max(index.shape[-1] for _, index in arrays)
    heads, M = _heads(file, present[0][1], (*leading, 1))
    tokens = lengths(at, tokens_name)
    # The lists may be narrower than the K/V blocks (compact form); only a length says so.
    N = math.ceil(tokens[1] / block[1]) if tokens is not None else width
    rows, blocks = [], []
    for (count_name, index_name), (count, index) in zip(present, arrays, strict=True):
        counts = _fitting(file, count_name, count, index.shape[:-1])
        counts = np.broadcast_to(counts, leading).reshape(-1)
        entries = np.broadcast_to(index, (*leading, index.shape[-1])).reshape(len(counts), -1)
        found = entries[_used(file, count_name, counts, entries.shape[1])]
        if (wrong := outside(found, N)) is not None:
            why = (
                f"The sequence length says {N} K/V blocks."
                if tokens is not None
                else f"The lists are {N} wide; if they are compact, give --seq-len."
            )
            raise file.error(
                f"'{index_name}' holds K/V block {wrong}; expected 0 to {N - 1}. {why}"
            )
        rows.append(np.repeat(np.arange(len(counts)), counts))
        blocks.append(found)
    row, column = np.concatenate(rows), np.concatenate(blocks)
    counts = np.bincount(row, minlength=heads * M)
    return _mask(at, counts, column[np.argsort(row, kind="stable")], (heads, M, N), block, tokens)


def _lut(at: Reading) -> BlockMask:
    """Each entry is the step from the block before it, the first one from block 0."""
    file = at.file
    at.notes.append("layout: SpargeAttn look-up table (steps from block to block)")
    block = _block(at)
    lut, counts = _integers(file, "lut"), _integers(file, "valid_block_num")
    (heads, M), N = _heads(file, "lut", lut.shape), lut.shape[-1]
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
    return _mask(at, counts, blocks[used], (heads, M, N), block, lengths(at))


def _scipy(at: Reading) -> BlockMask:
    file = at.file
    kind = file.text("format")
    if kind not in ("csr", "bsr"):
        raise file.error(f"is a scipy matrix in format '{kind}'; convert it with .tocsr() first.")
    rows, columns = file.integers("shape", 2)
    data = file.array("data")
    pointers, indices = _integers(file, "indptr"), _integers(file, "indices")
    at.notes.append(f"layout: scipy {kind}, one head of {rows} x {columns}")
    if kind == "bsr":
        if data.ndim != 3:
            raise file.error(f"'data' of a bsr matrix has rank {data.ndim}; expected 3.")
        block = _own_block(at, (data.shape[1], data.shape[2]), "blocks of", "the blocks of 'data'")
        kept = np.asarray(data.reshape(len(data), -1).any(axis=1))
        shape = (1, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    else:
        block = _block(at)
        kept, shape = np.asarray(data.reshape(-1) != 0), (1, rows, columns)
    if len(kept) != len(indices):
        raise file.error(f"has {len(indices)} indices and {len(kept)} entries of 'data'.")
    if len(pointers) != shape[1] + 1 or (np.diff(pointers) < 0).any() or pointers[0] != 0:
        raise file.error(f"'indptr' isn't the row pointers of {shape[1]} rows.")
    if pointers[-1] != len(indices):
        raise file.error(f"'indptr' ends at {pointers[-1]}; expected {len(indices)}, the indices.")
    row_of = np.repeat(np.arange(shape[1]), np.diff(pointers))
    counts = np.bincount(row_of[kept], minlength=shape[1])
    return _mask(at, counts, indices[kept], shape, block, lengths(at))


def _flashinfer(at: Reading) -> BlockMask:
    file = at.file
    pointers, indices = _integers(file, "indptr"), _integers(file, "indices").reshape(-1)
    at.notes.append("layout: FlashInfer block-sparse rows (indptr, indices, R x C)")
    size = file.integers("R", 1)[0], file.integers("C", 1)[0]
    block = _own_block(at, size, "blocks of", "'R' and 'C'")
    pointers = pointers.reshape(-1, pointers.shape[-1])
    H, M = len(pointers), pointers.shape[1] - 1
    counts = np.diff(pointers, axis=1).reshape(-1)
    if M < 1 or (counts < 0).any() or counts.sum() != len(indices):
        raise file.error(
            f"'indptr' counts {counts.sum()} blocks and 'indices' holds {len(indices)}; expected "
            "ascending row pointers, [M+1] or [H, M+1]."
        )
    tokens = at.tokens
    if tokens is None and "M" in file and "N" in file:
        tokens = file.integers("M", 1)[0], file.integers("N", 1)[0]
        at.notes.append(f"sequence length: {tokens[0]} and {tokens[1]} tokens (from 'M' and 'N')")
    if tokens is None:
        raise file.error(
            "doesn't say how many K/V blocks there are; store 'M' and 'N' (tokens), or give "
            "--seq-len."
        )
    return _mask(at, counts, indices, (H, M, math.ceil(tokens[1] / block[1])), block, tokens)


def _variable(at: Reading) -> BlockMask:
    raise at.file.error(
        "holds blocks of variable sizes ('block_row_sz', 'block_col_sz'); a block mask has blocks "
        "of one size. Cut them to a fixed size first."
    )


_flex = partial(
    _counted, said="FlexAttention BlockMask, partial and full blocks united",
    lists=[("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")],
    block_name="BLOCK_SIZE", tokens_name="seq_lengths",
)  # fmt: skip
_fa4 = partial(
    _counted,
    said="FlashAttention-4 block lists, partial and full blocks united",
    lists=[("mask_block_cnt", "mask_block_idx"), ("full_block_cnt", "full_block_idx")],
)
_vsa = partial(
    _counted,
    said="VSA index lists (query tile -> key tiles, padded)",
    lists=[("q2k_num", "q2k_index")],
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


def _own_block(at: Reading, block: Pair, has: str, origin: str) -> Pair:
    """The block size that the file has, if the caller doesn't say another one."""
    if at.block not in (None, block):
        raise at.file.error(f"has {has} {block[0]}x{block[1]}; leave --block out.")
    at.notes.append(f"block size: {block[0]}x{block[1]} tokens (from {origin})")
    return block


def _block(at: Reading, name: str = "block_size") -> Pair:
    if name not in at.file:
        if at.block is None:
            raise at.file.error(
                f"doesn't say its block size ('{name}'); give it with --block, e.g. --block "
                "128x128 (query x K/V tokens)."
            )
        at.notes.append(f"block size: {at.block[0]}x{at.block[1]} tokens (given)")
        return at.block
    size = at.file.array(name).size
    q, kv = at.file.integers(name, 2) if size == 2 else at.file.integers(name, 1) * 2
    if min(q, kv) < 1:
        raise at.file.error(f"has {name} {q}x{kv}; expected positive sizes.")
    return _own_block(at, (q, kv), name, f"'{name}'")


def lengths(at: Reading, name: str = "seq_len") -> Pair | None:
    """Query and key/value tokens, from the file or the caller; None where neither knows.

    Raises:
        InputError: they differ.
    """
    if name not in at.file:
        return at.tokens
    q, kv = at.file.integers(name, 2)
    if at.tokens not in (None, (q, kv)):
        raise at.file.error(f"has {name} {q}x{kv}; leave --seq-len out.")
    return q, kv


def _integers(file: ArrayFile, name: str) -> Ints:
    array = file.array(name)
    if array.dtype.kind not in "iu" or array.ndim < 1:
        raise file.error(f"'{name}' is {array.dtype} of rank {array.ndim}; expected whole numbers.")
    return array.astype(np.int64)


def _heads(file: ArrayFile, name: str, shape: tuple[int, ...]) -> Pair:
    """Heads with the batch folded in, and rows, of lists ``[..., M, K]``."""
    if len(shape) not in (2, 3, 4) or 0 in shape:
        raise file.error(
            f"'{name}' has shape {list(shape)}; expected [M, K], [H, M, K] or [B, H, M, K]."
        )
    return math.prod(shape[:-2]), shape[-2]


def _fitting(file: ArrayFile, name: str, counts: Ints, shape: tuple[int, ...]) -> Ints:
    """Counts of the shape that the lists have, singleton axes stretched."""
    try:
        return np.asarray(np.broadcast_to(counts, shape))
    except ValueError as problem:
        raise file.error(
            f"'{name}' has shape {list(counts.shape)}; expected {list(shape)}, one a row."
        ) from problem


def _used(file: ArrayFile, name: str, counts: Ints, width: int) -> npt.NDArray[np.bool_]:
    if (wrong := outside(counts, width + 1)) is not None:
        raise file.error(f"'{name}' counts {wrong} blocks in a row; expected 0 to {width}.")
    return np.asarray(np.arange(width)[None, :] < counts[:, None])


def _mask(
    at: Reading, counts: Ints, indices: Ints, shape: tuple[int, int, int], block: Pair,
    tokens: Pair | None,
) -> BlockMask:  # fmt: skip
    """The mask of rows, one behind the other."""
    at.notes.append(f"[H, M, N] = {list(shape)} (a batch is folded into heads)")
    with at.file.blamed():
        mask = BlockMask.from_csr(row_pointers(counts), indices, shape, block, tokens)
    at.notes.append(length_note(mask))
    return mask


def length_note(mask: BlockMask) -> str:
    """How long the sequences are, in words."""
    return f"sequence length: {mask.tokens_q} query and {mask.tokens_kv} key/value tokens"
