"""What the event loops share: a wheel of workers by tick, and LRU rings. Arrays and integers only.

The wheel is linked lists ``later`` uint32 (W + slots,) and their ends ``tail`` uint32 (slots,),
over workers and then one anchor a slot, so that appending never asks whether a list is empty. An
LRU is a ring of links (0: towards most recent, 1: towards least recent) through a sentinel.
"""

import numpy as np
from numba import njit

NONE = np.uint32(0xFFFFFFFF)


@njit(nogil=True, cache=True, inline="always")
def filled_wheel(workers, longest):
    """All workers in the list of tick 0, in order.

    Args:
        workers: rows in flight, W.
        longest: of all delays, in ticks; the wheel must be longer.

    Returns:
        ``later``, ``tail``, and the mask that makes a tick a slot, uint64.
    """
    slots = 1
    while slots <= longest:
        slots *= 2
    later = np.full(workers + slots, NONE, np.uint32)
    tail = np.arange(workers, workers + slots).astype(np.uint32)
    for w in range(workers - 1):
        later[w] = w + 1
    later[workers] = 0
    tail[0] = workers - 1
    return later, tail, np.uint64(slots - 1)


@njit(nogil=True, cache=True, inline="always")
def append(later, tail, slot, w):
    """Worker `w` comes last in the list of this slot."""
    later[w] = NONE
    later[tail[slot]] = w
    tail[slot] = w


@njit(nogil=True, cache=True, inline="always")
def move_to_front(link, node, front, linked):
    """Make a node the most recent one of its ring; `linked`: it is in the ring already."""
    if linked:
        newer, older = link[node, 0], link[node, 1]
        link[newer, 1] = older
        link[older, 0] = newer
    recent = link[front, 1]
    link[node, 1] = recent
    link[node, 0] = front
    link[recent, 0] = node
    link[front, 1] = node


@njit(nogil=True, cache=True, inline="always")
def drop_oldest(link, front):
    """Take the least recent node out of its ring."""
    victim = link[front, 0]
    newer = link[victim, 0]
    link[newer, 1] = front
    link[front, 0] = newer
    return victim
