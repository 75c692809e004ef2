"""Numba kernel of the guard: snapshots of what L2 would hold."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def snapshots(kept, order, starts, backwards, times, window, capacities, block_ticks, start_ticks):
    """Requests at these moments, and misses for each capacity: int64 (1 + len(capacities),).

    L2 holds the blocks read last, as many as its capacity. kept bool (M, N): rows over the places
    of the K/V order; order (M,): slot -> row; starts (M,) and backwards bool (M,) by slot. At each
    tick in `times`, the last `window` rows that have started say how long ago each block was read
    and which are read next; a block that several rows read next is fetched once.
    """
    columns = kept.shape[1]
    never = np.int64(2**62)
    result = np.zeros(1 + len(capacities), np.int64)
    for t in times:
        age = np.full(columns, never)
        wanted = np.zeros(columns, np.bool_)
        last = np.searchsorted(starts, t, side="right")
        for slot in range(max(0, last - window), last):
            row = order[slot]
            begin = starts[slot] + start_ticks
            done = max(0, t - begin) // block_ticks
            length = kept[row].sum()
            visit = length - 1 if backwards[slot] else 0
            step = -1 if backwards[slot] else 1
            if done < length:
                result[0] += 1
            for place in range(columns):
                if not kept[row, place]:
                    continue
                if visit < done:
                    age[place] = min(age[place], t - begin - visit * block_ticks)
                elif visit == done:
                    wanted[place] = True
                visit += step
        by_age = np.sort(age)
        for c in range(len(capacities)):
            limit = by_age[capacities[c]] if capacities[c] < columns else never
            for place in range(columns):
                if wanted[place] and age[place] >= limit:
                    result[1 + c] += 1
    return result
