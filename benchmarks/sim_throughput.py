"""How fast the simulator is, and how much memory it takes. Prints ratios, asserts nothing.

    pip install '.[bench]'
    python benchmarks/sim_throughput.py [--skip-40-heads]

1. Block accesses per second and core, streaming simulation: the fast model (dispatch and LRU)
   beside libcachesim's LRU on the flattened trace of the same launch, in the same run (both
   must count the same misses), and the full model.
2. `wavealign sim` on 40 heads of 2841x2841 at density .35: wall time and peak memory.
3. `wavealign --help`, and the first and second run of a small simulation (numba's cache).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import PROGRAM, ROOT, best_seconds, parser

from wavealign.masks import BlockMask, load_mask, save_mask
from wavealign.order import Schedule, build_schedule
from wavealign.sim import Setup
from wavealign.sim._kernels import stream_lru
from wavealign.sim._replay_kernels import launch_trace
from wavealign.sim.traffic import launch_traffic

WORKERS, CAPACITY = 132, 544  # an H200's rows in flight and effective L2 in 64 KiB blocks
HIT_TICKS, START_TICKS = 128, 58


def stream(schedule: Schedule) -> int:
    """Misses of one launch."""
    misses, _, _ = stream_lru(
        schedule.row_order, schedule.indptr, schedule.indices, schedule.shape[2],
        WORKERS, CAPACITY, HIT_TICKS, HIT_TICKS, START_TICKS,
    )  # fmt: skip
    return int(misses.sum())


def libcachesim_replays(
    trace: np.ndarray, following: np.ndarray | int, folder: Path, caches: dict[str, tuple[str, int]]
) -> dict[str, tuple[float, int]]:
    """Seconds and misses of libcachesim's caches on a trace; empty if it isn't installed.

    Args:
        trace: block ids in the order of the accesses.
        following: of each, the (1-based) time of the next to its block, -1 where there is none, -2
            where nobody asks.
        folder: for the trace, whose writing isn't counted.
        caches: label → class, and bits of its hash table; 0 leaves it as it comes (2**24 slots).
    """
    try:
        import libcachesim
    except ModuleNotFoundError:
        return {}
    # Its binary "oracleGeneral" records: time, object, size, next access.
    record = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
    requests = np.zeros(len(trace), record)
    requests["object"], requests["size"], requests["next"] = trace + 1, 1, following
    path = folder / "trace.oracleGeneral"
    requests.tofile(path)
    reader = libcachesim.TraceReader(
        str(path),
        libcachesim.TraceType.ORACLE_GENERAL_TRACE,
        libcachesim.ReaderInitParam(ignore_obj_size=True),
    )
    found, ratios = {}, [0.0]
    for label, (name, bits) in caches.items():
        options = {"hashpower": bits} if bits else {}

        def run(name: str = name, options: dict[str, int] = options) -> None:
            reader.reset()
            cache = getattr(libcachesim, name)(cache_size=CAPACITY, **options)
            ratios[0] = cache.process_trace(reader)[0]

        seconds = best_seconds(run)
        found[label] = seconds, round(ratios[0] * len(trace))
    return found


def libcachesim_lru(trace: np.ndarray, folder: Path) -> dict[str, tuple[float, int]]:
    """As it comes, and with a hash table cut to the number of blocks."""
    caches = {"as it comes": ("LRU", 0), "small table": ("LRU", 13)}
    return libcachesim_replays(trace, -2, folder, caches)


def throughput(folder: Path) -> None:
    rng = np.random.default_rng(0)
    cases = {
        "natural video, XAttention, 4 heads": load_mask(ROOT / "data/xattention_363600.npz").mask,
        "random, density .35, 2 heads": BlockMask.from_dense(rng.random((2, 2841, 2841)) < 0.35),
    }
    print("million block accesses per second and core")
    print(f"{'mask':36} {'policy':10} {'fast':>6} {'full':>6}   libcachesim LRU, trace of fast")
    setup = Setup.make("h200")
    for name, mask in cases.items():
        for policy in ("original", "random", "nnz", "lockstep"):
            schedule = build_schedule(mask, policy, WORKERS)
            misses = stream(schedule)
            seconds = best_seconds(lambda s=schedule: stream(s))
            lists = schedule.row_order, schedule.indptr, schedule.indices
            trace = launch_trace(*lists, mask.N, WORKERS, HIT_TICKS, START_TICKS)
            theirs = [
                f"{label} {mask.nnz / s / 1e6:.1f} ({s / seconds:.1f}x slower"
                + (")" if m == misses else f"; {m} MISSES, NOT {misses})")
                for label, (s, m) in libcachesim_lru(trace, folder).items()
            ]
            launch_traffic(mask, schedule, setup)
            full_seconds = best_seconds(lambda s=schedule, m=mask: launch_traffic(m, s, setup))
            print(
                f"{name:36} {policy:10} {mask.nnz / seconds / 1e6:6.1f} "
                f"{mask.nnz / full_seconds / 1e6:6.1f}   {', '.join(theirs) or 'not installed'}"
            )


def measured(command: list[str]) -> tuple[float, float]:
    """Wall seconds and peak MB of a command."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def forty_heads(folder: Path) -> None:
    path = folder / "forty.npz"
    rng = np.random.default_rng(0)
    parts = [BlockMask.from_dense(rng.random((2841, 2841)) < 0.35) for _ in range(40)]
    indptr = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(p.indptr) for p in parts]))])
    indices = np.concatenate([p.indices for p in parts])
    mask = BlockMask.from_csr(indptr, indices, (40, 2841, 2841))
    save_mask(path, mask)
    print(f"\n40 heads of 2841x2841, {mask.nnz / 1e6:.0f} M blocks, {os.cpu_count()} cores")
    del parts, indices, mask
    command = [*PROGRAM, "sim", "--mask", str(path), "--json"]
    for options in ([], ["--no-belady"], ["--no-belady", "--model", "fast"]):
        print(f"  {' '.join(options) or 'full model, with Belady bound'}")
        for policy in ("original", "nnz", "lockstep", "svd+nnz", "greedy+nnz"):
            run = [*command, "--device", "h200", "--policy", policy, "--quiet", *options]
            seconds, peak_mb = measured(run)
            print(f"    {policy:12} {seconds:6.1f} s  {peak_mb:6.0f} MB peak")


def startup(folder: Path) -> None:
    seconds = min(measured([*PROGRAM, "--help"])[0] for _ in range(3))
    print(f"\nwavealign --help: {seconds:.2f} s")
    os.environ["NUMBA_CACHE_DIR"] = str(folder / "numba")
    small = [*PROGRAM, "sim", "--mask", str(ROOT / "data/xattention_75600.npz")]
    for label in ("first run, compiling", "second run, from numba's cache"):
        print(f"sim on 8 heads of 591x591, nine policies, {label}: {measured(small)[0]:.1f} s")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--skip-40-heads", action="store_true")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        throughput(folder)
        if not arguments.skip_40_heads:
            forty_heads(folder)
        startup(folder)


if __name__ == "__main__":
    main()
