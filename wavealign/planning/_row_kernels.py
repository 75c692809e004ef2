"""Triton kernels: from the lengths of rows to where they stand in the launch."""

# triton.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wavealign._devices import on_device
from wavealign.order.row_orders import DEALT_SPAN_FRAC
from wavealign.planning.placing import Placed

_ROWS = 64  # of a program that ranks
_OTHERS = 256  # that they are compared with at once
_SHARE = 1 - DEALT_SPAN_FRAC


@triton.jit
def _key(count, row, kind, wave, N):
    """Rows stand by key, ascending; kinds are those of `placing.KINDS`."""
    group = tl.where(kind == 0, row, tl.where(kind == 1, row // wave, 0))
    return group.to(tl.int64) * (N + 1) + (N - count)


@triton.jit(do_not_specialize=["turn"])
def rank_rows(
    counts, kinds, rows, lengths, state, turn, M, N, wave,
    ROWS: tl.constexpr, OTHERS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Some rows of a head: the place of each, which is how many stand before it.

    counts: int32 ``[H, M]``, by query block; kinds int64 ``[H]``; out by place, int32 ``[H, M]``:
    rows, the query blocks, and lengths, their counts.
    """
    wanted = turn
    if GATED:
        wanted = tl.load(state + 1)
    if wanted == turn:
        base = tl.program_id(1).to(tl.int64) * M
        kind = tl.load(kinds + tl.program_id(1)).to(tl.int32)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        count = tl.load(counts + base + row, mask=row < M, other=0)
        key = _key(count, row, kind, wave, N)
        before = tl.zeros([ROWS], tl.int32)
        for first in range(0, M, OTHERS):
            other = first + tl.arange(0, OTHERS)
            its = tl.load(counts + base + other, mask=other < M, other=0)
            its = _key(its, other, kind, wave, N)[None, :]
            earlier = (its == key[:, None]) & (other[None, :] < row[:, None])
            stands = ((its < key[:, None]) | earlier) & (other[None, :] < M)
            before += tl.sum(stands.to(tl.int32), 1)
        tl.store(rows + base + before, row, mask=row < M)
        tl.store(lengths + base + before, count, mask=row < M)


@triton.jit(do_not_specialize=["turn"])
def place_rows(
    rows, ranked, kinds, sawtooth, table, listed, slots, lengths, backwards, state, turn, M, wave,
    LANES: tl.constexpr, SHARE: tl.constexpr, GATHERED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A head: its rows dealt, where they are to be, and everything that follows from the slots.

    rows, ranked: int32 ``[H, M]`` from `rank_rows`; sawtooth uint8 ``[H]``; out: table (slot →
    query block), listed (lengths as the lists lie), lengths (by slot) int32, slots int64, backwards
    uint8 (by query block), all ``[H, M]``. LANES is a power of 2 from M up.
    """
    wanted = turn
    if GATED:
        wanted = tl.load(state + 1)
    if wanted == turn:
        head = tl.program_id(0)
        base = head.to(tl.int64) * M
        place = tl.arange(0, LANES)
        inside = place < M
        row = tl.load(rows + base + place, mask=inside, other=0)
        length = tl.load(ranked + base + place, mask=inside, other=0)
        first = tl.zeros([LANES], tl.int32)
        last = tl.full([LANES], 1, tl.int32)
        dealt = tl.load(kinds + head) == 3
        begin = 0
        stop = tl.where(dealt, M, 0)
        while begin < stop:
            longest = tl.sum(tl.where(place == begin, length, 0), 0)
            above = length.to(tl.float64) > longest.to(tl.float64) * SHARE
            count = tl.sum((above & inside & (place >= begin)).to(tl.int32), 0)
            end = tl.minimum(begin + tl.maximum((count + wave - 1) // wave, 1) * wave, M)
            group = (place >= begin) & (place < end)
            first = tl.where(group, begin, first)
            last = tl.where(group, end, last)
            begin = end
        offset = place - first
        waves = (last - first + wave - 1) // wave
        part = offset % waves
        even = (last - first) // waves
        target = first + part * even + tl.minimum(part, (last - first) % waves) + offset // waves
        slot = tl.where(dealt, target, place)
        tl.store(table + base + slot, row, mask=inside)
        tl.store(lengths + base + slot, length, mask=inside)
        tl.store(listed + base + (slot if GATHERED else row), length, mask=inside)
        tl.store(slots + base + row, slot.to(tl.int64), mask=inside)
        sweeps = tl.load(sawtooth + head) != 0
        tl.store(backwards + base + row, (slot // wave % 2 == 1) & sweeps, mask=inside)


def launch_rows(counts, kinds, sawtooth, wave, columns, gathers, table, listed, gate):
    """`row_orders` and `place` on a GPU, for orders by lengths alone.

    Args:
        counts: int32 ``[H, M]``, by query block.
        kinds: int64 ``[H]``, see `placing.KINDS`.
        sawtooth: bool ``[H]``.
        wave: rows in flight, W.
        columns: N.
        gathers: whether lists lie in launch order.
        table: int32 ``[H, M]``, slot → query block, written.
        listed: int32 ``[H, M]``, the lengths as the lists lie, written.
        gate: of a call that follows; None writes.
    """
    H, M = counts.shape
    rows, ranked, lengths = (torch.empty_like(counts) for _ in range(3))
    slots = torch.empty_like(counts, dtype=torch.int64)
    backwards = torch.empty_like(counts, dtype=torch.bool)
    state, turn = (counts, 0) if gate is None else (gate.state, gate.turn)
    lanes = triton.next_power_of_2(M)
    with on_device(counts):
        rank_rows[(triton.cdiv(M, _ROWS), H)](
            counts, kinds, rows, ranked, state, turn, M, columns, wave,
            ROWS=_ROWS, OTHERS=_OTHERS, GATED=gate is not None, num_warps=4,
        )  # fmt: skip
        place_rows[(H,)](
            rows, ranked, kinds, sawtooth.view(torch.uint8), table, listed, slots, lengths,
            backwards.view(torch.uint8), state, turn, M, wave, LANES=lanes, SHARE=_SHARE,
            GATHERED=gathers, GATED=gate is not None, num_warps=min(16, max(1, lanes // 256)),
        )  # fmt: skip
    return Placed(slots, lengths, backwards)
