"""The full model's event loop: L2 partitions that copy each other's lines, SMs that drift.

Arrays and numbers only. `tests/oracles.py` holds its slow, readable twin; the two must agree
exactly. With one partition, equal speeds and no bandwidth limit it is `stream_lru`.
"""

import numpy as np
from numba import njit

from wavealign.sim._event_kernels import NONE, append, drop_oldest, filled_wheel, move_to_front

FRACTION_BITS = 16
"""Times are ticks in fixed point: an SM's speed differs by less than a tick a block."""

OWN_HITS, CROSSINGS, CROSSING_HITS = 0, 1, 2  # entries of `lookups`
L2_TICKS, HBM_TICKS = 0, 1  # entries of `stretched`


@njit(nogil=True, cache=True, inline="always")
def _evict(link, held, front):
    """Drop the least recently used block of a partition; the halves that it held."""
    victim = drop_oldest(link, front)
    halves = (held[victim] & 1) + (held[victim] >> 1)
    held[victim] = 0
    return np.int64(halves)


@njit(nogil=True, cache=True)
def stream_partitioned(
    row_order, indptr, indices, columns, step_times, start_time, half_miss_time, partitions,
    capacity, window_ticks, l2_halves_per_window, hbm_halves_per_window,
):  # fmt: skip
    """Play one launch on an L2 of one or two partitions.

    A K/V block is two halves, by the partition that its lines are at home in. A worker asks its
    own partition (its index modulo `partitions`) for both. The half at home there comes from
    L2 or from HBM. The other one comes from a local copy; where there is none the request
    crosses to its home, which has it or reads HBM, and a copy stays. Each partition is an LRU over
    blocks, whole nodes of one or two halves, of `capacity` halves. With one partition both
    halves are at home.

    Dispatch as in `stream_lru`. Bandwidth stretches time without changing the order of events:
    a window of `window_ticks` in which L2 moved more halves than `l2_halves_per_window` (own
    lookups + crossings + fills), or HBM more than `hbm_halves_per_window`, lasts longer in
    proportion.

    Args:
        row_order, indptr, indices, columns: see `stream_lru`.
        step_times: uint64 (W,), fixed-point ticks of one block for each worker, at least 1 tick.
        start_time: uint64, fixed-point ticks to start a row.
        half_miss_time: uint64, fixed-point ticks that a half from HBM adds to its step where the
            worker's block before it missed too: prefetch hides a miss that comes alone.
        partitions: 1 or 2.
        capacity: halves per partition, at least 2.
        window_ticks: length of a bandwidth window.
        l2_halves_per_window, hbm_halves_per_window: float, inf for no limit.

    Returns:
        halves read from HBM int64 (H,), the same for the last K/V block int64 (H,), lookups
        int64 (3,): hits in the own partition, crossings, hits of crossings; end_ticks int64
        (W,), end_times float64 (W,): when each worker ended, without and with stretching; and
        stretched float64 (2,): ticks that L2 and HBM bandwidth added.
    """
    heads, rows = row_order.shape
    workers = len(step_times)
    bits, one = np.uint64(FRACTION_BITS), np.uint64(1)
    longest = start_time
    for w in range(workers):
        longest = max(longest, step_times[w] + np.uint64(2) * half_miss_time)
    later, tail, slot_mask = filled_wheel(workers, np.int64(longest >> bits) + 1)
    anchor = np.uint64(workers)

    cursor = np.zeros(workers, np.uint64)
    stop = np.zeros(workers, np.uint64)
    base = np.zeros(workers, np.uint32)
    head_of = np.zeros(workers, np.uint32)
    due = np.zeros(workers, np.uint64)
    missed_before = np.zeros(workers, np.bool_)

    # Per partition a ring through its last node; `held` has bit 1 for the half at home, bit 2 for
    # the copy of the other one.
    span = np.uint32(heads * columns + 1)
    link = np.full((partitions * (heads * columns + 1), 2), NONE, np.uint32)
    held = np.zeros(partitions * (heads * columns + 1), np.uint8)
    size = np.zeros(partitions, np.int64)
    for p in range(partitions):
        front = np.uint32((p + 1) * (heads * columns + 1) - 1)
        link[front] = front
    both = np.uint8(3)

    reads = np.zeros(heads, np.int64)
    last_block_reads = np.zeros(heads, np.int64)
    lookups = np.zeros(3, np.int64)
    own_hits, crossings, crossing_hits = 0, 0, 0
    end_ticks = np.zeros(workers, np.int64)
    end_times = np.zeros(workers, np.float64)
    stretched = np.zeros(2, np.float64)
    last_block = np.uint32(columns - 1)
    tick = np.uint64(0)
    next_row, total_rows, running = 0, heads * rows, workers
    window_end = np.uint64(window_ticks)
    added, moved, filled = 0.0, 0, 0

    while running > 0:
        slot = tick & slot_mask
        waiting = later[anchor + slot]
        if waiting == NONE:
            tick += one
            if tick == window_end:
                l2_load = moved / l2_halves_per_window
                hbm_load = filled / hbm_halves_per_window
                load = max(l2_load, hbm_load)
                if load > 1.0:
                    longer = window_ticks * (load - 1.0)
                    added += longer
                    stretched[L2_TICKS if l2_load >= hbm_load else HBM_TICKS] += longer
                moved, filled = 0, 0
                window_end += np.uint64(window_ticks)
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
                delay = step_times[w]
                moved += 2
                key = base[w] + block
                p = w & np.uint32(1) if partitions == 2 else np.uint32(0)
                node = p * span + key
                front = p * span + span - np.uint32(1)
                state = held[node]
                missed = 0
                if state == both:
                    own_hits += 2
                else:
                    if partitions == 1:
                        missed = 2
                        size[p] += 2
                    else:
                        if state & 1:
                            own_hits += 1
                        else:
                            missed += 1
                            size[p] += 1
                        if state & 2:
                            own_hits += 1
                        else:
                            crossings += 1
                            size[p] += 1
                            home = np.uint32(1) - p
                            home_node = home * span + key
                            home_front = home * span + span - np.uint32(1)
                            there = held[home_node]
                            if there & 1:
                                crossing_hits += 1
                            else:
                                missed += 1
                                size[home] += 1
                            move_to_front(link, home_node, home_front, there != 0)
                            held[home_node] = there | np.uint8(1)
                            while size[home] > capacity:
                                size[home] -= _evict(link, held, home_front)
                            moved += 1
                    if missed > 0:
                        reads[head_of[w]] += missed
                        if block == last_block:
                            last_block_reads[head_of[w]] += missed
                        moved += missed
                        filled += missed
                        if missed_before[w]:
                            delay += half_miss_time * np.uint64(missed)
                    held[node] = both
                missed_before[w] = missed > 0
                move_to_front(link, node, front, state != 0)
                while size[p] > capacity:
                    size[p] -= _evict(link, held, front)
            elif next_row < total_rows:
                head = next_row // rows
                row = head * rows + row_order[head, next_row - head * rows]
                cursor[w] = indptr[row]
                stop[w] = indptr[row + 1]
                base[w] = head * columns
                head_of[w] = head
                next_row += 1
                delay = start_time
            else:
                end_ticks[w] = np.int64(tick)
                end_times[w] = np.float64(tick) + added
                running -= 1
                continue
            due[w] += delay
            append(later, tail, (due[w] >> bits) & slot_mask, w)
    lookups[OWN_HITS], lookups[CROSSINGS] = own_hits, crossings
    lookups[CROSSING_HITS] = crossing_hits
    return reads, last_block_reads, lookups, end_ticks, end_times, stretched
