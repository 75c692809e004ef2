"""Numba kernel of `graph-bisect`. Arrays only; `tests/oracles.py` holds its slow twin."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, inline="always")
def _half_cost(kept, log_rows, logs):
    """Bits of one K/V block's list of rows in one half: d log2(n / (d + 1))."""
    return kept * (log_rows - logs[kept + 1])


@njit(nogil=True, cache=True)
def _gains(rows, indptr, indices, own, other, log_own, log_other, logs):
    """What each row saves by moving to the other half, int64 (len(rows),) in 2**-20 bits."""
    gains = np.zeros(len(rows), np.int64)
    for i in range(len(rows)):
        gain = 0.0
        for p in range(indptr[rows[i]], indptr[rows[i] + 1]):
            a, b = own[indices[p]], other[indices[p]]
            gain += (
                _half_cost(a, log_own, logs)
                + _half_cost(b, log_other, logs)
                - _half_cost(a - 1, log_own, logs)
                - _half_cost(b + 1, log_other, logs)
            )
        gains[i] = np.int64(np.round(gain * (1 << 20)))  # so that rounding decides no tie
    return gains


@njit(nogil=True, cache=True, inline="always")
def _count(row, indptr, indices, kept, change):
    """Add `change` to the count of every block that the row keeps."""
    for p in range(indptr[row], indptr[row + 1]):
        kept[indices[p]] += change


@njit(nogil=True, cache=True)
def bisect_rows(order, indptr, indices, columns, wave, rounds):
    """Sort `order` int32 (M,) in place by recursive bisection, down to parts of one wave.

    Each part is cut at whole waves. A round computes what every row gains by changing sides,
    sorts both sides by it and swaps the pairs whose gains sum to more than 0; it stops after
    `rounds` rounds or when no pair does.
    """
    rows = len(order)
    logs = np.zeros(rows + 2)
    for n in range(1, rows + 2):
        logs[n] = np.log2(n)
    low_of = [0]
    high_of = [rows]
    while len(low_of) > 0:
        low, high = low_of.pop(), high_of.pop()
        waves = (high - low + wave - 1) // wave
        if waves <= 1:
            continue
        middle = low + waves // 2 * wave
        left, right = order[low:middle], order[middle:high]
        kept_left = np.zeros(columns, np.int64)
        kept_right = np.zeros(columns, np.int64)
        for row in left:
            _count(row, indptr, indices, kept_left, 1)
        for row in right:
            _count(row, indptr, indices, kept_right, 1)
        log_left, log_right = logs[len(left)], logs[len(right)]
        for _ in range(rounds):
            out = _gains(left, indptr, indices, kept_left, kept_right, log_left, log_right, logs)
            back = _gains(right, indptr, indices, kept_right, kept_left, log_right, log_left, logs)
            by_out = np.argsort(-out, kind="mergesort")
            by_back = np.argsort(-back, kind="mergesort")
            swapped = 0
            while swapped < min(len(left), len(right)):
                i, j = by_out[swapped], by_back[swapped]
                if out[i] + back[j] <= 0:
                    break
                goes, comes = left[i], right[j]
                for row, change in ((goes, -1), (comes, 1)):
                    _count(row, indptr, indices, kept_left, change)
                    _count(row, indptr, indices, kept_right, -change)
                left[i], right[j] = comes, goes
                swapped += 1
            if swapped == 0:
                break
        low_of.append(low)
        high_of.append(middle)
        low_of.append(middle)
        high_of.append(high)
