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
from numba import njit
from sim_throughput import (
    CAPACITY,
    HIT_TICKS,
    ROOT,
    START_TICKS,
    WORKERS,
    best_seconds,
    libcachesim_lru,
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


def libcachesim_belady(trace: np.ndarray, folder: Path) -> dict[str, tuple[float, int]]:
    """Seconds and misses of libcachesim's Belady on a trace of block ids; empty if not installed.

    With a hash table cut to the number of blocks. Writing the trace isn't counted.
    """
    try:
        import libcachesim
    except ModuleNotFoundError:
        return {}
    record = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
    requests = np.zeros(len(trace), record)
    requests["object"], requests["size"], requests["next"] = trace + 1, 1, next_accesses(trace)
    path = folder / "next.oracleGeneral"
    requests.tofile(path)
    reader = libcachesim.TraceReader(
        str(path),
        libcachesim.TraceType.ORACLE_GENERAL_TRACE,
        libcachesim.ReaderInitParam(ignore_obj_size=True),
    )
    ratios: list[float] = []

    def run() -> None:
        reader.reset()
        cache = libcachesim.Belady(cache_size=CAPACITY, hashpower=13)
        ratios.append(cache.process_trace(reader)[0])

    seconds = best_seconds(run)
    return {"Belady": (seconds, round(ratios[-1] * len(trace)))}


def timed(work: Callable[[], object]) -> tuple[object, float]:
    """What `work` returns, and its best seconds; the first call compiles."""
    return work(), best_seconds(work)


def main() -> None:
    mask = load_mask(ROOT / "data/xattention_363600.npz").mask
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
            wide = trace.astype(np.int64)
            theirs = {
                "LRU": libcachesim_lru(wide, Path(folder)),
                "Belady": libcachesim_belady(wide, Path(folder)),
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
