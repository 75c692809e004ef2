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


def lru_misses(trace, capacity):
    """Misses of an LRU that starts empty."""
    cache = OrderedDict()
    misses = 0
    for key in trace:
        misses += key not in cache
        cache[key] = True
        cache.move_to_end(key)
        if len(cache) > capacity:
            cache.popitem(last=False)
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


def list_schedule(lengths, free, block_ticks, start_ticks):
    """Each row's tick and worker: who is free first takes the next row. `free` is updated."""
    dealt = []
    for length in lengths:
        worker = min(range(len(free)), key=lambda w: (free[w], w))
        dealt.append((free[worker], worker))
        free[worker] += start_ticks + block_ticks[worker] * length
    return dealt


def in_kv_order(lists, permutation):
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
        flight = {}  # worker -> (row, first tick, last tick)
        lengths = [len(lists[row]) for row in order]
        dealt = list_schedule(lengths, free, [block_ticks] * workers, start_ticks)
        for row, (now, worker) in zip(order, dealt, strict=True):
            x = y = 0.0
            for _, (other, begin, end) in sorted(flight.items()):
                if end > now:
                    done = max(0, now - begin) // block_ticks
                    at = place[rotated[other][min(done, len(rotated[other]) - 1)]]
                    angle = 2.0 * math.pi * at / columns
                    x += math.cos(angle)
                    y += math.sin(angle)
            blocks = rotated[row]
            if blocks and x * x + y * y > 1e-18:
                target = (math.atan2(y, x) / (2.0 * math.pi) * columns) % columns
                skip = sum(place[block] < target - 0.500001 for block in blocks)
                skip = skip % len(blocks)
                rotated[row] = blocks[skip:] + blocks[:skip]
            begin = now + start_ticks
            flight[worker] = (row, begin, begin + block_ticks * len(blocks))
            if not blocks:
                del flight[worker]
        result.append(rotated)
    return result


def stack_distances(trace, keys, columns):
    """Accesses at each LRU stack distance, first ones in the last entry; and of last blocks."""
    every, last = [0] * (keys + 1), [0] * (keys + 1)
    stack = []
    for key in trace:
        distance = stack.index(key) if key in stack else keys
        if key in stack:
            stack.remove(key)
        stack.insert(0, key)
        every[distance] += 1
        last[distance] += key % columns == columns - 1
    return every, last


def belady(trace, capacity):
    """Misses where, of the residents and the new key, the one used again last (or never) goes."""

    def next_use(key, now):
        return trace.index(key, now + 1) if key in trace[now + 1 :] else math.inf

    resident = set()
    misses = 0
    for now, key in enumerate(trace):
        misses += key not in resident
        resident.add(key)
        if len(resident) > capacity:
            resident.remove(max(resident, key=lambda other: (next_use(other, now), other)))
    return misses


def least_cost(trace, capacity, cost):
    """The cheapest way to serve a trace, by trying every choice of what to keep."""
    states = {frozenset(): 0}
    for key in trace:
        after = {}
        for resident, paid in states.items():
            total = paid + (0 if key in resident else cost(key))
            pool = resident | {key}
            kept = [pool] if len(pool) <= capacity else [pool - {gone} for gone in pool]
            for choice in kept:
                after[choice] = min(total, after.get(choice, total))
        states = after
    return min(states.values())


def partitioned(
    row_order,
    lists,
    columns,
    step_times,
    start_time,
    half_miss_time,
    partitions,
    capacity,
    window,
    l2_limit,
    hbm_limit,
):
    """The full model's event loop with a heap, an OrderedDict per partition and sets of halves.

    Times are fixed-point integers (2**16 a tick). Returns what `stream_partitioned` returns, as
    lists.
    """
    workers = len(step_times)
    queue = [(h, row) for h, order in enumerate(row_order) for row in order]
    reads, last_reads = [0] * len(row_order), [0] * len(row_order)
    own_hits = crossings = crossing_hits = 0
    ends, end_times, stretched = [0] * workers, [0.0] * workers, [0.0, 0.0]
    todo = {w: [] for w in range(workers)}
    missed_before = [False] * workers
    due = [0] * workers
    caches = [OrderedDict() for _ in range(partitions)]  # (head, block) -> set of halves
    sequence, next_row = 0, 0
    events = []
    for w in range(workers):
        heapq.heappush(events, (0, sequence, w))
        sequence += 1
    window_end, added, moved, filled = window, 0.0, 0, 0

    def keep(p, key, half):
        caches[p].setdefault(key, set()).add(half)
        caches[p].move_to_end(key)

    def shrink(p):
        while sum(map(len, caches[p].values())) > capacity:
            caches[p].popitem(last=False)

    while events:
        tick, _, w = heapq.heappop(events)
        while tick >= window_end:
            loads = (moved / l2_limit, filled / hbm_limit)
            if max(loads) > 1.0:
                extra = window * (max(loads) - 1.0)
                added += extra
                stretched[0 if loads[0] >= loads[1] else 1] += extra
            moved = filled = 0
            window_end += window
        if todo[w]:
            key = todo[w].pop(0)
            p = w % partitions
            missed = 0
            moved += 2
            for half in range(2):
                home = half if partitions == 2 else 0
                if half in caches[p].get(key, ()):
                    own_hits += 1
                    continue
                if home == p:
                    missed += 1
                    continue
                crossings += 1
                moved += 1
                if half in caches[home].get(key, ()):
                    crossing_hits += 1
                else:
                    missed += 1
                keep(home, key, half)
                shrink(home)
            keep(p, key, 0)
            keep(p, key, 1)
            shrink(p)
            moved += missed
            filled += missed
            reads[key[0]] += missed
            last_reads[key[0]] += missed * (key[1] == columns - 1)
            delay = step_times[w] + (half_miss_time * missed if missed_before[w] else 0)
            missed_before[w] = missed > 0
        elif next_row < len(queue):
            h, row = queue[next_row]
            next_row += 1
            todo[w] = [(h, block) for block in lists[h][row]]
            delay = start_time
        else:
            ends[w], end_times[w] = tick, tick + added
            continue
        due[w] += delay
        heapq.heappush(events, (due[w] >> 16, sequence, w))
        sequence += 1
    lookups = [own_hits, crossings, crossing_hits]
    return reads, last_reads, lookups, ends, end_times, stretched


def nnz_dealt(lengths, wave, span=0.08):
    """Longest first; groups of whole waves that span a share of their NNZ, dealt like cards."""
    remaining = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    order = []
    while remaining:
        longest = lengths[remaining[0]]
        alike = [row for row in remaining if lengths[row] > (1 - span) * longest]
        count = wave * max(1, -(-len(alike) // wave))
        group, remaining = remaining[:count], remaining[count:]
        hands = -(-len(group) // wave)
        for hand in range(hands):
            order += group[hand::hands]
    return order


def wave_pack(sets, wave):
    """Each wave: the longest row left, then the largest summed overlap with the wave so far."""

    def overlap(a, b):
        either = len(sets[a] | sets[b])
        return (len(sets[a] & sets[b]) << 20) // either if either else 0

    left = list(range(len(sets)))
    order = []
    while left:
        own = [min(left, key=lambda row: (-len(sets[row]), row))]
        left.remove(own[0])
        while left and len(own) < wave:
            best = min(left, key=lambda row: (-sum(overlap(row, other) for other in own), row))
            own.append(best)
            left.remove(best)
        order += own
    return order


def graph_bisect(sets, wave, rounds):
    """Recursive bisection from NNZ descending; the waves of the result in natural order."""
    order = sorted(range(len(sets)), key=lambda row: (-len(sets[row]), row))
    return _bisected(order, sets, wave, rounds)


def _bisected(rows, sets, wave, rounds):
    waves = -(-len(rows) // wave)
    if waves <= 1:
        return sorted(rows)
    cut = waves // 2 * wave
    halves = [list(rows[:cut]), list(rows[cut:])]

    def bits(kept, half):
        return kept * math.log2(len(half) / (kept + 1)) if kept else 0.0

    for _ in range(rounds):
        counts = [
            {block: sum(block in sets[row] for row in half) for block in set().union(*sets)}
            for half in halves
        ]
        gains = []
        for side in (0, 1):
            own, other = counts[side], counts[1 - side]
            gain = {}
            for row in halves[side]:
                total = 0.0
                for block in sorted(sets[row]):
                    a, b = own[block], other[block]
                    total += bits(a, halves[side]) + bits(b, halves[1 - side])
                    total -= bits(a - 1, halves[side]) + bits(b + 1, halves[1 - side])
                gain[row] = round(total * 2**20)
            gains.append(gain)
        ranked = [
            sorted(range(len(half)), key=lambda i, g=gain, half=half: -g[half[i]])
            for half, gain in zip(halves, gains, strict=True)
        ]
        moved = False
        pairs = list(zip(*ranked, strict=False))
        before = [list(half) for half in halves]
        for i, j in pairs:
            if gains[0][before[0][i]] + gains[1][before[1][j]] <= 0:
                break
            halves[0][i], halves[1][j] = before[1][j], before[0][i]
            moved = True
        if not moved:
            break
    return [row for half in halves for row in _bisected(half, sets, wave, rounds)]
