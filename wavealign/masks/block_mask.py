"""The block mask: which K/V blocks each query block of each head attends to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign.errors import InputError
from wavealign.masks import checks

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def row_pointers(counts: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Where each row begins and the last one ends, from the lengths of the rows."""
    indptr = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    return indptr


@dataclass(frozen=True, eq=False)
class HeadMask:
    """One head of a `BlockMask`: CSR over its M rows, sharing the mask's memory.

    Attributes:
        indptr: int64 ``(M + 1,)``, starting at 0.
        indices: int32 ``(nnz,)``, K/V blocks, ascending inside a row.
        M: query blocks.
        N: K/V blocks.
    """

    indptr: Int64Array
    indices: Int32Array
    M: int
    N: int

    @cached_property
    def row_nnz(self) -> Int64Array:
        """K/V blocks per row, int64 ``(M,)``."""
        return np.diff(self.indptr)

    def to_dense(self) -> BoolArray:
        """The head as bool ``(M, N)``."""
        dense = np.zeros(self.M * self.N, dtype=np.bool_)
        rows = np.repeat(np.arange(self.M, dtype=np.int64) * self.N, self.row_nnz)
        dense[rows + self.indices] = True
        return dense.reshape(self.M, self.N)

    def take_rows(self, rows: npt.NDArray[np.integer[Any]]) -> HeadMask:
        """The head with only these rows, in this order."""
        nnz = self.row_nnz[rows]
        indptr = row_pointers(nnz)
        source = np.arange(indptr[-1]) + np.repeat(self.indptr[rows] - indptr[:-1], nnz)
        return HeadMask(indptr, self.indices[source], len(rows), self.N)


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A block mask ``[H, M, N]`` in CSR form over its ``H * M`` rows.

    Memory grows with the number of kept blocks, never with tokens. The arrays are made
    read-only.

    Attributes:
        indptr: int64 ``(H * M + 1,)``; row ``h * M + i`` is query block `i` of head `h`.
        indices: int32 ``(nnz,)``; K/V blocks, ascending and unique inside a row.
        H: heads.
        M: query blocks per head.
        N: K/V blocks per head.
        block_q: tokens per query block.
        block_kv: tokens per K/V block.
        tokens_q: query tokens; the last query block may be ragged.
        tokens_kv: key/value tokens; the last K/V block may be ragged.
        meta: whatever the file says about itself.

    Raises:
        InputError: sizes or arrays that contradict each other.

    Example:
        >>> import numpy as np
        >>> import wavealign as wa
        >>> causal = np.tri(6, dtype=bool)  # one head, 6 query blocks, 6 K/V blocks
        >>> mask = wa.BlockMask.from_dense(causal, block=(128, 128), tokens=(750, 750))
        >>> mask.shape, mask.nnz, mask.head(0).row_nnz.tolist()
        ((1, 6, 6), 21, [1, 2, 3, 4, 5, 6])
        >>> mask.last_kv_tokens
        110
    """

    indptr: Int64Array
    indices: Int32Array
    H: int
    M: int
    N: int
    block_q: int
    block_kv: int
    tokens_q: int
    tokens_kv: int
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("H", "M", "N", "block_q", "block_kv", "tokens_q", "tokens_kv"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least 1.")
        for axis, blocks, block, tokens in (
            ("query", self.M, self.block_q, self.tokens_q),
            ("key/value", self.N, self.block_kv, self.tokens_kv),
        ):
            if math.ceil(tokens / block) != blocks:
                raise InputError(
                    f"block size and sequence length contradict the mask: {tokens} {axis} "
                    f"tokens in blocks of {block} make {math.ceil(tokens / block)} blocks, the "
                    f"mask has {blocks}."
                )
        checks.check_csr(self.indptr, self.indices, self.H * self.M, self.N)
        object.__setattr__(self, "indptr", _frozen(self.indptr, np.int64))
        object.__setattr__(self, "indices", _frozen(self.indices, np.int32))

    @classmethod
    def from_csr(
        cls, indptr: npt.ArrayLike, indices: npt.ArrayLike, shape: Sequence[int],
        block: tuple[int, int] = (128, 128), tokens: tuple[int, int] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> BlockMask:  # fmt: skip
        """A mask from row pointers and K/V block lists.

        Args:
            indptr: ``(H * M + 1,)`` whole numbers.
            indices: ``(nnz,)`` whole numbers; a row's blocks may come in any order.
            shape: ``(H, M, N)``.
            block: tokens per query block and per K/V block.
            tokens: query and key/value tokens; by default every block is full.
            meta: kept as it is.

        Raises:
            InputError: decreasing `indptr`, indices out of range, a block listed twice.
        """
        H, M, N = (int(n) for n in shape)
        pointers = np.asarray(indptr, dtype=np.int64)
        blocks = np.asarray(indices)
        if (wrong := checks.outside(blocks, N)) is not None:
            raise InputError(
                f"indices hold K/V block {wrong}; expected 0 to {N - 1} for a mask of {N} K/V "
                "blocks."
            )
        checks.check_pointers(pointers, blocks.size, H * M)
        lists = checks.sort_rows(pointers, blocks.astype(np.int32, copy=False))
        return _mask(pointers, lists, (H, M, N), block, tokens, meta)

    @classmethod
    def from_dense(
        cls,
        mask: npt.ArrayLike,
        block: tuple[int, int] = (128, 128),
        tokens: tuple[int, int] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> BlockMask:
        """A mask from a bool array ``(M, N)``, ``(H, M, N)`` or ``(B, H, M, N)``.

        A batch axis is folded into the heads. Integers and floats are read as masks only where
        every value is 0 or 1: scores would keep every block.

        Args:
            mask: array-like of bool, or of 0 and 1.
            block, tokens, meta: see `from_csr`.

        Raises:
            InputError: another shape, dtype or value, or sizes that contradict each other.
        """
        dense = np.asarray(mask)
        if dense.ndim not in (2, 3, 4) or 0 in dense.shape:
            raise InputError(
                f"a mask array of shape {dense.shape}; expected (M, N), (H, M, N) or "
                "(B, H, M, N) with no axis of size 0."
            )
        checks.zeros_and_ones(dense, "a mask array")
        M, N = dense.shape[-2:]
        heads = dense.reshape(-1, M, N)
        counts = np.count_nonzero(heads, axis=-1)
        return _from_heads(lambda h: heads[h] != 0, counts, N, block, tokens, meta)

    @classmethod
    def from_packed(
        cls, packed: npt.NDArray[np.uint8], N: int, block: tuple[int, int] = (128, 128),
        tokens: tuple[int, int] | None = None, meta: Mapping[str, Any] | None = None,
    ) -> BlockMask:  # fmt: skip
        """A mask from ``numpy.packbits(mask, axis=-1)``, uint8 ``(H, M, ceil(N / 8))``.

        Args:
            packed: eight blocks a byte, the first in the highest bit.
            N: K/V blocks.
            block, tokens, meta: see `from_csr`.

        Raises:
            InputError: another shape, or bits set beyond `N`.
        """
        expected = -(-N // 8)
        if packed.ndim != 3 or packed.shape[-1] != expected or 0 in packed.shape:
            raise InputError(
                f"packed bits of shape {packed.shape}; expected (H, M, {expected}) for {N} K/V "
                "blocks."
            )
        if (packed[..., -1] & ((1 << (8 * expected - N)) - 1)).any():
            raise InputError(
                f"packed bits are set beyond the {N} K/V blocks; expected numpy.packbits along "
                "the last axis, big-endian bit order."
            )
        counts = np.bitwise_count(packed).sum(axis=-1, dtype=np.int64)
        return _from_heads(
            lambda h: np.unpackbits(packed[h], axis=-1, count=N).view(np.bool_),
            counts, N, block, tokens, meta,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(H, M, N)``."""
        return self.H, self.M, self.N

    @property
    def nnz(self) -> int:
        """Kept blocks over all heads."""
        return len(self.indices)

    @property
    def density(self) -> float:
        """Kept blocks / all blocks (ρ)."""
        return self.nnz / (self.H * self.M * self.N)

    @property
    def last_kv_tokens(self) -> int:
        """Tokens in the last K/V block of a head, ragged or not."""
        return self.tokens_kv - (self.N - 1) * self.block_kv

    def head(self, h: int) -> HeadMask:
        """Head `h` as a view."""
        pointers = self.indptr[h * self.M : (h + 1) * self.M + 1]
        return HeadMask(
            pointers - pointers[0], self.indices[pointers[0] : pointers[-1]], self.M, self.N
        )

    def heads(self) -> Iterator[HeadMask]:
        """Every head in turn."""
        return (self.head(h) for h in range(self.H))

    def select_heads(self, heads: Sequence[int]) -> BlockMask:
        """The mask with only these heads, in this order."""
        parts = [self.head(h) for h in heads]
        indptr = row_pointers(np.concatenate([p.row_nnz for p in parts]))
        indices = np.concatenate([p.indices for p in parts])
        return replace(self, indptr=indptr, indices=indices, H=len(parts))

    @cached_property
    def touched_kv_blocks(self) -> tuple[Int64Array, BoolArray]:
        """Distinct K/V blocks per head, int64 ``(H,)``, and whether the last one is among them."""
        touched = np.zeros((self.H, self.N), dtype=np.bool_)
        for row, head in zip(touched, self.heads(), strict=True):
            row[head.indices] = True
        return np.count_nonzero(touched, axis=1), touched[:, -1]

    @cached_property
    def last_kv_block_nnz(self) -> int:
        """Kept blocks that are the last K/V block of their head."""
        return int(np.count_nonzero(self.indices == self.N - 1))

    @cached_property
    def digest(self) -> str:
        """A hash of the mask's content (sizes and lists, not `meta`), 32 hex digits."""
        state = hashlib.blake2b(digest_size=16)
        sizes = [*self.shape, self.block_q, self.block_kv, self.tokens_q, self.tokens_kv]
        state.update(np.asarray(sizes, dtype="<i8").tobytes())
        state.update(self.indptr.astype("<i8", copy=False).data)
        state.update(self.indices.astype("<i4", copy=False).data)
        return state.hexdigest()


def need_block_mask(mask: object) -> None:
    """Check that a mask is a `BlockMask`, where callers may have an array at hand.

    Raises:
        InputError: it isn't.
    """
    if not isinstance(mask, BlockMask):
        raise InputError(
            f"the mask is a {type(mask).__name__}; expected a BlockMask, e.g. "
            "BlockMask.from_dense(array, block=(128, 128)) or load_mask(FILE).mask."
        )


def _from_heads(
    head: Callable[[int], BoolArray], counts: npt.NDArray[np.integer[Any]], N: int,
    block: tuple[int, int], tokens: tuple[int, int] | None, meta: Mapping[str, Any] | None,
) -> BlockMask:  # fmt: skip
    """A mask from bool heads ``(M, N)``, made one at a time, and their row counts ``(H, M)``."""
    H, M = counts.shape
    indptr = row_pointers(counts)
    indices = np.empty(indptr[-1], dtype=np.int32)

    def fill(h: int) -> None:
        kept = np.flatnonzero(head(h))
        kept -= np.repeat(np.arange(M) * N, counts[h])
        indices[indptr[h * M] : indptr[(h + 1) * M]] = kept

    # numpy releases the interpreter lock in all of this.
    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(H)))
    return _mask(indptr, indices, (H, M, N), block, tokens, meta)


def _mask(
    indptr: Int64Array, indices: Int32Array, shape: tuple[int, int, int], block: tuple[int, int],
    tokens: tuple[int, int] | None, meta: Mapping[str, Any] | None,
) -> BlockMask:  # fmt: skip
    """A mask of full blocks, where nothing else is said."""
    tokens = tokens or (shape[1] * checks.block_pair(block)[0], shape[2] * block[1])
    return BlockMask(indptr, indices, *shape, *block, *tokens, dict(meta or {}))


def _frozen(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    frozen = np.ascontiguousarray(array, dtype=dtype).view()
    frozen.flags.writeable = False
    return frozen
