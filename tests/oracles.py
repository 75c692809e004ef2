"""Slow, obvious twins of the fast code. Nothing here is shared with it."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict


def stream(row_order, lists, columns, workers, capacity, hit_ticks, miss_ticks, start_ticks):
    """One launch by a heap of events and an OrderedDict.

    row_order: per head, a list slot -> query block; lists: per head, per query block, the
    K/V blocks in visiting order.

    Returns misses per head, misses of the last block per head, end ticks per worker, and the
    trace of (head, block) in the order of access.
    """
    queue = [(h, row) for h, order in enumerate(row_order) for row in order]
    misses = [0] * len(row_order)
    last_misses = [0] * len(row_order)
    ends = [0] * workers
    todo = {w: [] for w in range(workers)}
    cache = OrderedDict()
    trace = []
    sequence = 0
    events = []
    for w in range(workers):
        heapq.heappush(events, (0, sequence, w))
        sequence += 1
    next_row = 0
    while events:
        now, _, w = heapq.heappop(events)
        if todo[w]:
            key = todo[w].pop(0)
            trace.append(key)
            if key in cache:
                cache.move_to_end(key)
                delay = hit_ticks
            else:
                misses[key[0]] += 1
                last_misses[key[0]] += key[1] == columns - 1
                cache[key] = True
                if len(cache) > capacity:
                    cache.popitem(last=False)
                delay = miss_ticks
        elif next_row < len(queue):
            h, row = queue[next_row]
            next_row += 1
            todo[w] = [(h, block) for block in lists[h][row]]
            delay = start_ticks
        else:
            ends[w] = now
            continue
        heapq.heappush(events, (now + delay, sequence, w))
        sequence += 1
    return misses, last_misses, ends, trace


def stack_distance_misses(trace, capacity):
    """LRU misses by Mattson's stack: an access hits iff fewer than `capacity` other keys lie
    between it and the last access to its key."""
    misses = 0
    for i, key in enumerate(trace):
        between = set()
        j = i - 1
        while j >= 0 and trace[j] != key:
            between.add(trace[j])
            j -= 1
        misses += j < 0 or len(between) >= capacity
    return misses


def greedy(sets, window):
    """Largest summed Jaccard overlap (in units of 2**-20) with the last `window` rows."""

    def overlap(a, b):
        either = len(sets[a] | sets[b])
        return (len(sets[a] & sets[b]) << 20) // either if either else 0

    left = list(range(len(sets)))
    order = []
    while left:
        if order:
            recent = order[-window:]
            score = {row: sum(overlap(row, other) for other in recent) for row in left}
        else:
            score = {row: len(sets[row]) for row in left}
        best = min(left, key=lambda row: (-score[row], row))
        order.append(best)
        left.remove(best)
    return order


def sweep(lists, permutation):
    """Each row's blocks in the order in which they appear in `permutation`."""
    return [[block for block in permutation if block in set(row)] for row in lists]


def phases(orders, lists_per_head, permutations, workers):
    """Rows rotated to start where the rows of their head in flight are, head after head."""
    block_ticks, start_ticks = 2, 1
    free = [0] * workers
    result = []
    for order, lists, permutation in zip(orders, lists_per_head, permutations, strict=True):
        columns = len(permutation)
        place = {block: i for i, block in enumerate(permutation)}
        rotated = [list(row) for row in lists]
        flight = {}  # worker -> (row, first tick)
        for row in order:
            worker = min(range(workers), key=lambda w: (free[w], w))
            now = free[worker]
            x = y = 0.0
            for w in range(workers):
                if w in flight and free[w] > now:
                    other, begin = flight[w]
                    done = max(0, now - begin) // block_ticks
                    at = place[rotated[other][min(done, len(rotated[other]) - 1)]]
                    angle = 2.0 * math.pi * at / columns
                    x += math.cos(angle)
                    y += math.sin(angle)
            blocks = rotated[row]
            if blocks and x * x + y * y > 1e-18:
                target = (math.atan2(y, x) / (2.0 * math.pi) * columns) % columns
                skip = sum(place[block] < target - 0.5 for block in blocks)
                skip = skip % len(blocks)
                rotated[row] = blocks[skip:] + blocks[:skip]
            flight[worker] = (row, now + start_ticks)
            free[worker] = now + start_ticks + block_ticks * len(blocks)
            if not blocks:
                del flight[worker]
        result.append(rotated)
    return result
