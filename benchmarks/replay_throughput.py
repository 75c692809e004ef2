"""How fast traces are replayed: stack distances, Belady. Prints ratios, asserts nothing.

    pip install '.[bench]'
    python benchmarks/replay_throughput.py

Million accesses per second and core on the traces of shipped masks, beside libcachesim's LRU and
Belady on the same trace in the same run. Our Belady's may bypass, libcachesim's keeps every block
that it fetches, so ours misses less.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import DATA, best_seconds
from numba import njit
from sim_throughput import (
    CAPACITY,
    HIT_TICKS,
    START_TICKS,
    WORKERS,
    libcachesim_lru,
    libcachesim_replays,
)

from wavealign.masks import load_mask
from wavealign.order import build_schedule
from wavealign.sim._replay_kernels import launch_trace, opt_misses, stack_distances


@njit
def next_accesses(trace):
    """Of each access, the (1-based) time of the next to its block, or -1."""
    following = np.empty(len(trace), np.int64)
    seen = np.full(trace.max() + 1, -1)
    for i in range(len(trace) - 1, -1, -1):
        following[i] = seen[trace[i]]
        seen[trace[i]] = i + 1
    return following


def timed(work: Callable[[], object]) -> tuple[object, float]:
    """What `work` returns, and its best seconds; the first call compiles."""
    return work(), best_seconds(work)


def main() -> None:
    mask = load_mask(DATA / "xattention_363600.npz").mask
    keys = mask.H * mask.N
    print(f"million accesses per second and core, {mask.nnz / 1e6:.1f} M accesses")
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("original", "lockstep"):
            schedule = build_schedule(mask, policy, WORKERS)
            lists = schedule.row_order, schedule.indptr, schedule.indices
            launch = (*lists, mask.N, WORKERS, HIT_TICKS, START_TICKS)
            trace, launch_s = timed(lambda launch=launch: launch_trace(*launch))
            _, curve_s = timed(lambda trace=trace: stack_distances(trace, keys, mask.N))
            opt, opt_s = timed(lambda trace=trace: opt_misses(trace, keys, CAPACITY))
            theirs = {
                "LRU": libcachesim_lru(trace, Path(folder)),
                "Belady": libcachesim_replays(
                    trace, next_accesses(trace), Path(folder), {"Belady": ("Belady", 13)}
                ),
            }
            for name, seconds, misses, peer in (
                ("launch_trace", launch_s, None, ""),
                ("stack_distances", curve_s, None, "LRU"),
                ("opt_misses", opt_s, opt, "Belady"),
            ):
                beside = [
                    f"libcachesim {label} {mask.nnz / s / 1e6:.1f} ({s / seconds:.1f}x slower"
                    + (f", {m} misses)" if misses is not None else ")")
                    for label, (s, m) in theirs.get(peer, {}).items()
                ]
                count = f"{misses} misses" if misses is not None else ""
                rate = mask.nnz / seconds / 1e6
                print(f"{policy:9} {name:16} {rate:6.1f}  {count:15} {', '.join(beside)}")


if __name__ == "__main__":
    main()
