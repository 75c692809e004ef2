"""The event loop: streaming dispatch of rows to workers with one shared LRU L2.

Arrays and integers only. `tests/oracles.py` holds its slow, readable twin (a heap and an
OrderedDict); the two must agree exactly.
"""

import numpy as np
from numba import njit

from wavealign.sim._event_kernels import NONE, append, drop_oldest, filled_wheel, move_to_front


@njit(nogil=True, cache=True)
def stream_lru(
    row_order, indptr, indices, columns, workers, capacity, hit_ticks, miss_ticks, start_ticks
):
    """Play one launch and count what misses.

    Heads in order, slots in order, no barrier: a free worker takes the next row, spends
    `start_ticks` on it, then reads its K/V blocks one by one; a block lasts `hit_ticks` or
    `miss_ticks`. Events of the same tick happen in the order in which they were scheduled.

    Args:
        row_order: int32 (H, M), slot -> query block.
        indptr, indices: the lists in visiting order, rows h*M + query block.
        columns: N, K/V blocks per head.
        workers: rows in flight, W.
        capacity: blocks that L2 holds, LRU.
        hit_ticks, miss_ticks: duration of a step, at least 1.
        start_ticks: at least 0.

    Returns:
        misses int64 (H,); misses of the last K/V block int64 (H,); end_ticks int64 (W,), when
        each worker found no further row.
    """
    heads, rows = row_order.shape
    # Unsigned indices: numba adds no wrap-around test to them.
    later, tail, slot_mask = filled_wheel(workers, max(miss_ticks, hit_ticks, start_ticks))
    anchor = np.uint64(workers)

    cursor = np.zeros(workers, np.uint64)
    stop = np.zeros(workers, np.uint64)
    base = np.zeros(workers, np.uint32)
    head_of = np.zeros(workers, np.uint32)

    # A block that isn't resident has no link.
    sentinel = np.uint32(heads * columns)
    link = np.full((heads * columns + 1, 2), NONE, np.uint32)
    link[sentinel] = sentinel
    room = capacity

    misses = np.zeros(heads, np.int64)
    last_block_misses = np.zeros(heads, np.int64)
    end_ticks = np.zeros(workers, np.int64)
    last_block = np.uint32(columns - 1)
    hit_delay, miss_delay = np.uint64(hit_ticks), np.uint64(miss_ticks)
    start_delay, one = np.uint64(start_ticks), np.uint64(1)
    tick = np.uint64(0)
    next_row, total_rows, running = 0, heads * rows, workers

    while running > 0:
        slot = tick & slot_mask
        waiting = later[anchor + slot]
        if waiting == NONE:
            tick += one
            continue
        later[anchor + slot] = NONE
        tail[slot] = anchor + slot
        while waiting != NONE:
            w = waiting
            waiting = later[w]
            at = cursor[w]
            if at < stop[w]:
                block = np.uint32(indices[at])
                cursor[w] = at + one
                key = base[w] + block
                resident = link[key, 0] != NONE
                if resident:
                    delay = hit_delay
                else:
                    misses[head_of[w]] += 1
                    if block == last_block:
                        last_block_misses[head_of[w]] += 1
                    if room > 0:
                        room -= 1
                    else:
                        link[drop_oldest(link, sentinel), 0] = NONE
                    delay = miss_delay
                move_to_front(link, key, sentinel, resident)
            elif next_row < total_rows:
                head = next_row // rows
                row = head * rows + row_order[head, next_row - head * rows]
                cursor[w] = indptr[row]
                stop[w] = indptr[row + 1]
                base[w] = head * columns
                head_of[w] = head
                next_row += 1
                delay = start_delay
            else:
                end_ticks[w] = np.int64(tick)
                running -= 1
                continue
            append(later, tail, (tick + delay) & slot_mask, w)
    return misses, last_block_misses, end_ticks
