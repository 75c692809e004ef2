"""Numba kernels of the orders: bit overlap, greedy packing, visiting lists, schedules, phases.

Arrays only. `tests/oracles.py` holds the slow, readable twin of each.
"""

import math

import numpy as np
from numba import njit

from wavealign._bits import popcount

REACH_PLACES = 0.5 + 1e-6
"""A mean between two places is common; rounding may not decide it, or a GPU would differ."""


@njit(nogil=True, cache=True)
def _similarity(bits, nnz, a, b):
    """Jaccard overlap of two rows in units of 2**-20, so that window sums are exact."""
    shared = np.uint64(0)
    for word in range(bits.shape[1]):
        shared += popcount(bits[a, word] & bits[b, word])
    either = nnz[a] + nnz[b] - np.int64(shared)
    return (np.int64(shared) << 20) // either if either > 0 else np.int64(0)


@njit(nogil=True, cache=True, inline="always")
def _take_best(left, count, value):
    """The row of the largest value among the first `count` left, closing the gap that it leaves.

    Ties go to the lowest query block.
    """
    best = 0
    for k in range(1, count):
        a, b = left[k], left[best]
        gain = value[a] - value[b]
        if gain > 0 or (gain == 0 and a < b):
            best = k
    chosen = left[best]
    left[best] = left[count - 1]
    return chosen


@njit(nogil=True, cache=True)
def greedy_order(bits, nnz, window):
    """Each slot takes the row with the largest summed overlap with the last `window` rows.

    bits uint64 (M, words), nnz int64 (M,) -> row order int32 (M,). Starts from the longest
    row; ties go to the lowest query block.
    """
    rows = len(nnz)
    order = np.empty(rows, np.int32)
    left = np.arange(rows)
    score = np.zeros(rows, np.int64)
    for slot in range(rows):
        chosen = _take_best(left, rows - slot, nnz if slot == 0 else score)
        order[slot] = chosen
        leaving = order[slot - window] if slot >= window else -1
        for row in left[: rows - slot - 1]:
            score[row] += _similarity(bits, nnz, row, chosen)
            if leaving >= 0:
                score[row] -= _similarity(bits, nnz, row, leaving)
    return order


@njit(nogil=True, cache=True)
def pack_order(bits, nnz, wave):
    """Fill waves of `wave` slots one by one with rows that overlap most.

    bits uint64 (M, words), nnz int64 (M,) -> row order int32 (M,). A wave begins with the longest
    row left; each further slot takes the row with the largest summed overlap with the wave so
    far. Ties go to the lowest query block.
    """
    rows = len(nnz)
    order = np.empty(rows, np.int32)
    left = np.arange(rows)
    score = np.zeros(rows, np.int64)
    for slot in range(rows):
        begins = slot % wave == 0
        chosen = _take_best(left, rows - slot, nnz if begins else score)
        order[slot] = chosen
        if (slot + 1) % wave == 0:
            continue  # what this wave holds no longer counts
        for row in left[: rows - slot - 1]:
            score[row] = (0 if begins else score[row]) + _similarity(bits, nnz, row, chosen)
    return order


@njit(nogil=True, cache=True)
def lists_in_kv_order(indptr, indices, kv_order, lists):
    """Write each row's blocks to `lists` int32 (nnz,) in the order of `kv_order` int32 (N,)."""
    kept = np.zeros(len(kv_order), np.bool_)
    for row in range(len(indptr) - 1):
        for p in range(indptr[row], indptr[row + 1]):
            kept[indices[p]] = True
        out = indptr[row]
        for place in range(len(kv_order)):
            block = kv_order[place]
            if kept[block]:
                lists[out] = block
                out += 1
                kept[block] = False


@njit(nogil=True, cache=True)
def reverse_rows(indptr, lists, rows):
    """Reverse, in place, the lists of these rows."""
    for row in rows:
        low, high = indptr[row], indptr[row + 1] - 1
        while low < high:
            lists[low], lists[high] = lists[high], lists[low]
            low += 1
            high -= 1


@njit(nogil=True, cache=True)
def list_schedule(length, free, block_ticks, start_ticks):
    """Deal rows to workers, without a barrier: the next row goes to who is free first.

    Args:
        length: int64 (rows,), blocks of each row in launch order.
        free: int64 (W,), tick at which each worker is free; updated, so that the next head's rows
            can follow.
        block_ticks: int64 (W,), what a block takes each worker.
        start_ticks: what a row takes to start.

    Returns:
        starts int64 (rows,), the tick at which each row is taken, which never falls; worker int32
        (rows,), who takes it, of several that are free the first.
    """
    starts = np.empty(len(length), np.int64)
    worker = np.empty(len(length), np.int32)
    for slot in range(len(length)):
        now = free[0]
        for w in range(1, len(free)):
            now = min(now, free[w])
        first = 0
        while free[first] > now:
            first += 1
        starts[slot] = now
        worker[slot] = first
        free[first] = now + start_ticks + block_ticks[first] * length[slot]
    return starts, worker


@njit(nogil=True, cache=True)
def phase_rows(order, indptr, lists, position, free, block_ticks, start_ticks):
    """Rotate, in place, each row's list to start where the rows in flight are in their pass.

    position int32 (N,): block -> place in the K/V order. Who is in flight when a row starts is
    known from the head's `list_schedule`, in which every worker takes `block_ticks` for a block;
    `free` as there. The row takes the circular mean of the places of the head's rows in flight and
    begins with its first block at or after it.
    """
    workers, columns = len(free), len(position)
    length = indptr[1:][order] - indptr[:-1][order]
    steps = np.full(workers, block_ticks, np.int64)
    starts, worker = list_schedule(length, free, steps, start_ticks)
    begin = np.zeros(workers, np.int64)
    end = np.zeros(workers, np.int64)
    running = np.full(workers, -1, np.int64)
    rotated = np.empty(columns, np.int32)
    angle = 2.0 * math.pi * np.arange(columns) / columns
    cosine, sine = np.cos(angle), np.sin(angle)
    for slot in range(len(order)):
        now = starts[slot]
        x, y = 0.0, 0.0
        for w in range(workers):
            row = running[w]
            if row < 0 or end[w] <= now:
                continue
            done = max(np.int64(0), now - begin[w]) // block_ticks
            place = position[lists[min(indptr[row] + done, indptr[row + 1] - 1)]]
            x += cosine[place]
            y += sine[place]
        row = order[slot]
        first, count = indptr[row], length[slot]
        if count > 0 and x * x + y * y > 1e-18:
            target = (math.atan2(y, x) / (2.0 * math.pi) * columns) % columns
            skip = 0
            # Blocks count as reached up to half a place behind, where the mean is rounded.
            while skip < count and position[lists[first + skip]] < target - REACH_PLACES:
                skip += 1
            if 0 < skip < count:
                for k in range(count):
                    rotated[k] = lists[first + (k + skip) % count]
                lists[first : first + count] = rotated[:count]
        taker = worker[slot]
        begin[taker] = now + start_ticks
        end[taker] = begin[taker] + count * block_ticks
        running[taker] = row if count > 0 else -1
