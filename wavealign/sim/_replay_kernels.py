"""A launch as a trace of block keys, and what caches of any size make of such a trace.

With a constant time per block the order of accesses doesn't depend on the cache, so one trace
answers for every capacity. Arrays and integers only; a trace has fewer than 2**32 - 1 accesses.
`tests/oracles.py` holds the slow, readable twin of each.
"""

import numpy as np
from numba import njit

from wavealign._bits import popcount
from wavealign.sim._event_kernels import NONE, append, filled_wheel


@njit(nogil=True, cache=True)
def launch_trace(row_order, indptr, indices, columns, workers, block_ticks, start_ticks):
    """Block keys in the order in which a launch reads them.

    The dispatch of `stream_lru` (heads in order, no barrier, events of a tick in the order in
    which they were scheduled) where a block lasts the same, hit or miss.

    Args:
        row_order, indptr, indices, columns, workers, start_ticks: see `stream_lru`.
        block_ticks: duration of a step, at least 1.

    Returns:
        uint32 (nnz,), keys head*N + block.
    """
    heads, rows = row_order.shape
    later, tail, slot_mask = filled_wheel(workers, max(block_ticks, start_ticks))
    anchor = np.uint64(workers)

    cursor = np.zeros(workers, np.uint64)
    stop = np.zeros(workers, np.uint64)
    base = np.zeros(workers, np.uint32)
    trace = np.empty(len(indices), np.uint32)
    filled, one = np.uint64(0), np.uint64(1)
    block_delay, start_delay = np.uint64(block_ticks), np.uint64(start_ticks)
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
                trace[filled] = base[w] + np.uint32(indices[at])
                filled += one
                cursor[w] = at + one
                delay = block_delay
            elif next_row < total_rows:
                head = next_row // rows
                row = head * rows + row_order[head, next_row - head * rows]
                cursor[w] = indptr[row]
                stop[w] = indptr[row + 1]
                base[w] = head * columns
                next_row += 1
                delay = start_delay
            else:
                running -= 1
                continue
            append(later, tail, (tick + delay) & slot_mask, w)
    return trace


@njit(nogil=True, cache=True)
def split_heads(trace, heads, columns, keep, blocks):
    """A launch's trace parted by head, each part in its order, into `blocks`.

    Args:
        trace: uint32 (accesses,), keys head*N + block.
        heads: H.
        columns: N.
        keep: only blocks below it stay; N keeps all.
        blocks: unsigned (accesses,), wide enough for N: the first `first[H]` entries are set.

    Returns:
        first, int64 (H + 1,): head h has blocks[first[h] : first[h + 1]].
    """
    width, limit = np.uint32(columns), np.uint32(keep)
    first = np.zeros(heads + 1, np.int64)
    for i in range(len(trace)):
        head = trace[i] // width
        first[head + np.uint32(1)] += trace[i] - head * width < limit
    for h in range(heads):
        first[h + 1] += first[h]
    end = first[:-1].copy()
    for i in range(len(trace)):
        head = trace[i] // width
        block = trace[i] - head * width
        if block < limit:
            blocks[np.uint64(end[head])] = block
            end[head] += 1
    return first


@njit(nogil=True, cache=True)
def stack_distances(trace, keys, columns):
    """LRU stack distances of a trace: one pass for every capacity (Mattson et al. 1970).

    The distance of an access is the number of other keys touched since the last access to its
    key: it hits if and only if the capacity is larger. Every access takes the next slot of a
    bitmap and clears the slot of the last access to its key, so the distance is the number of
    bits set since. Bits are counted from the newest slot back, as most distances are short.

    Args:
        trace: uint32 (accesses,), below `keys`.
        keys: how many there are, H*N.
        columns: N.

    Returns:
        histogram int64 (keys + 1,): accesses at each distance, first accesses in its last
        entry; the same of accesses to the last K/V block of a head (key % N == N - 1) alone.
    """
    every = np.zeros(keys + 1, np.int64)
    last = np.zeros(keys + 1, np.int64)
    is_last = np.zeros(keys, np.bool_)
    is_last[columns - 1 :: columns] = True

    # Groups of 1024 slots know how many of theirs are set. When slots run out, the set ones
    # (`keys` at most) move to the front: seldom, with four slots a key.
    groups = 4 + (4 * keys >> 10)
    slots = np.uint64(groups << 10)
    bits = np.zeros(groups << 4, np.uint64)
    count = np.zeros(groups + 1, np.uint64)
    key_of = np.empty(slots, np.uint32)
    slot_of = np.full(keys, NONE, np.uint32)
    free = np.uint64(0)
    one, six, ten = np.uint64(1), np.uint64(6), np.uint64(10)
    low_six, low_four = np.uint64(63), np.uint64(15)

    for i in range(len(trace)):
        key = trace[i]
        known = slot_of[key]
        distance = np.uint64(keys)
        if known != NONE:
            slot = np.uint64(known)
            word, group = slot >> six, slot >> ten
            rest = bits[word] >> (slot & low_six)
            distance = popcount(rest) - one
            for k in range(word + one, (word | low_four) + one):
                distance += popcount(bits[k])
            for k in range(group + one, (free >> ten) + one):
                distance += count[k]
            bits[word] ^= one << (slot & low_six)
            count[group] -= one
        every[distance] += 1
        if is_last[key]:
            last[distance] += 1
        if free == slots:
            free = np.uint64(0)
            for slot in range(slots):
                if bits[slot >> six] >> (slot & low_six) & one:
                    moved = key_of[slot]
                    key_of[free] = moved
                    slot_of[moved] = free
                    free += one
            bits[:] = 0
            count[:] = 0
            for slot in range(free):
                bits[slot >> six] |= one << (slot & low_six)
                count[slot >> ten] += one
        bits[free >> six] |= one << (free & low_six)
        count[free >> ten] += one
        key_of[free] = key
        slot_of[key] = free
        free += one
    return every, last


@njit(nogil=True, cache=True)
def opt_misses(trace, keys, capacity):
    """The least misses of any replacement that starts empty: Belady's, with bypass.

    A key that was fetched needn't be kept: of the residents and the new key the one whose next
    use is farthest goes.

    Args:
        trace: uint32 (accesses,), below `keys`.
        keys: how many there are.
        capacity: keys that it holds.

    Returns:
        misses, int64.
    """
    next_use = np.empty(len(trace), np.uint32)
    seen = np.full(keys, NONE, np.uint32)
    for back in range(len(trace)):
        i = np.uint64(len(trace) - 1 - back)
        next_use[i] = seen[trace[i]]
        seen[trace[i]] = i

    # A tree of maxima over the keys' next uses; 0, which is nobody's next use, where a key isn't
    # resident. The root names the victim: the key that is read at that time.
    leaves = 1
    while leaves < keys:
        leaves *= 2
    first_leaf, one = np.uint64(leaves), np.uint64(1)
    farthest = np.zeros(2 * leaves, np.uint32)
    room, misses = capacity, 0
    for i in range(len(trace)):
        key, when = trace[i], next_use[i]
        node = first_leaf + np.uint64(key)
        if farthest[node] == 0:
            misses += 1
            if when == NONE:
                continue
            if room > 0:
                room -= 1
            else:
                if farthest[one] <= when:
                    continue
                gone = first_leaf + np.uint64(trace[farthest[one]])
                farthest[gone] = 0
                while gone > one:
                    gone >>= one
                    farthest[gone] = max(farthest[gone + gone], farthest[gone + gone + one])
        elif when == NONE:
            # Its value was `i`, the least of all: only nodes without another resident hold it.
            room += 1
            farthest[node] = 0
            node >>= one
            while node >= one and farthest[node] == i:
                farthest[node] = max(farthest[node + node], farthest[node + node + one])
                node >>= one
            continue
        # A resident's next use only moves away, so nodes that are farther stay as they are.
        while node >= one and farthest[node] < when:
            farthest[node] = when
            node >>= one
    return misses
