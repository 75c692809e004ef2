"""The event loops' wheel: a FIFO list of workers for each tick of the near future.

Arrays and integers only.
"""

import numpy as np
from numba import njit

_NONE = np.uint32(0xFFFFFFFF)


@njit(nogil=True, cache=True, inline="always")
def filled_wheel(workers, longest):
    """All workers in the list of tick 0, in order.

    Args:
        workers: rows in flight, W.
        longest: of all delays, in ticks; the wheel must be longer.

    Returns:
        Linked lists ``later`` uint32 (W + slots,) and their ends ``tail`` uint32 (slots,), over
        workers and then one anchor a slot, so that appending never asks whether a list is empty;
        the mask that makes a tick a slot, uint64.
    """
    slots = 1
    while slots <= longest:
        slots *= 2
    later = np.full(workers + slots, _NONE, np.uint32)
    tail = np.arange(workers, workers + slots).astype(np.uint32)
    for w in range(workers - 1):
        later[w] = w + 1
    later[workers] = 0
    tail[0] = workers - 1
    return later, tail, np.uint64(slots - 1)
