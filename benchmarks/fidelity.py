"""Simulated against measured, run by run: how far the simulator can be trusted.

    python benchmarks/fidelity.py [RUNS ...] [--device h200] [--fit]

RUNS is a JSON lines file of measured runs (data/README.md), or a folder that holds
``runs.jsonl``; the masks with their recorded orders lie beside it, either as NAME.npz files or in
one npz with names below ``NAME/``. By default everything in `data`. docs/fidelity.md explains the
table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wavealign.masks.block_mask import BlockMask
from wavealign.masks.files import load_mask
from wavealign.npz import NpzFile
from wavealign.order.policies import build_schedule
from wavealign.order.schedule import Schedule, slot_of_row
from wavealign.results import RunResult
from wavealign.sim.simulate import Setup, run_schedule

DATA = Path(__file__).parent.parent / "data"
SHIPPED = [
    DATA / "h200" / "runs.jsonl",
    DATA / "xattention_363600.runs.jsonl",
    DATA / "spargeattn_363600.runs.jsonl",
]
WAVE = 132  # rows in flight of every recorded run

# Names in the recordings -> this project's.
ROWS = {"identity": "original", "lpt": "nnz", "s2": "nnz-wave", "s1s2": "svd+nnz"}


@dataclass(frozen=True)
class Replay:
    """A measured run and the schedule that it executed."""

    run: dict[str, Any]
    label: str
    mask: BlockMask
    schedule: Schedule


def replays(path: Path, kernel: str = "fa4") -> Iterator[Replay]:
    """Every recorded run of `kernel` whose order was recorded too."""
    source = path / "runs.jsonl" if path.is_dir() else path
    folder = source.parent
    with source.open(encoding="utf-8") as lines:
        runs = [json.loads(line) for line in lines]
    for run in runs:
        if run["kernel"] == kernel and run.get("order_recorded", True):
            file, key = _mask_file(folder, run["mask"])
            with NpzFile(file) as whole, NpzFile(file, key) as own:
                block = None if "block_size" in own else _block(run["mask"])
                mask = load_mask(file, block, key).mask
                yield _replay(run, mask, own, whole)


def _replay(run: dict[str, Any], mask: BlockMask, own: NpzFile, whole: NpzFile) -> Replay:
    head = ""
    if "head_index" in run:
        mask = mask.select_heads([run["head_index"]])
        head = f"[{run['head_index']}]"
    order = run.get("order") or run["rows"]
    row_order = _row_order(own, order, mask)
    lists = _visit_lists(own, whole, run, order, mask, row_order)
    policy = f"{ROWS.get(order, order)}/{run['visit']}"
    schedule = Schedule(row_order, mask.indptr, lists, mask.shape, policy)
    return Replay(run, f"{run['mask']}{head} {policy}", mask, schedule)


def _mask_file(folder: Path, name: str) -> tuple[Path, str | None]:
    own = folder / f"{name}.npz"
    if own.exists():
        return own, None
    for path in sorted(folder.glob("*.npz")):
        with NpzFile(path) as file:
            if f"{name}/shape" in file:
                return path, name
    raise SystemExit(f"{folder}: no mask named {name}")


def _block(name: str) -> tuple[int, int]:
    """Tokens per block: named at the end of a mask's name, 128x128 otherwise."""
    q, x, kv = name.rpartition("_")[2].partition("x")
    return (int(q), int(kv)) if x and q.isdigit() and kv.isdigit() else (128, 128)


def _row_order(own: NpzFile, name: str, mask: BlockMask) -> np.ndarray:
    if f"order/{name}" in own:
        return own.array(f"order/{name}").astype(np.int32)
    if name not in ("original", "nnz"):
        raise SystemExit(f"row order '{name}' wasn't recorded")
    return build_schedule(mask, name, WAVE).row_order


def _visit_lists(
    own: NpzFile,
    whole: NpzFile,
    run: dict[str, Any],
    order: str,
    mask: BlockMask,
    row_order: np.ndarray,
) -> np.ndarray:
    """The lists that the kernel walked, rebuilt from what was recorded."""
    visit = run["visit"]
    shuffled = "scramble" in visit or "shuffled" in visit
    lists = mask.indices.copy()
    for h in range(mask.H):
        sweep = np.arange(mask.N)
        if shuffled:
            sweep = own.array("scramble")[h] if "scramble" in own else whole.array("shuffle")
        place = slot_of_row(sweep)
        starts = None
        if "phase" in visit:
            kind = "start_position" if shuffled else "start_column"
            starts = own.array(f"{kind}/{order}")[run.get("head_index", h)]
        slots = slot_of_row(row_order[h])
        for i in range(mask.M):
            begin, end = mask.indptr[h * mask.M + i : h * mask.M + i + 2]
            row = lists[begin:end]
            row = row[np.argsort(place[row])]
            if "saw" in visit and slots[i] // WAVE % 2:
                row = row[::-1]
            if starts is not None:
                row = np.roll(row, -int(np.searchsorted(place[row], starts[i])))
            lists[begin:end] = row
    return lists


def compare(found: list[Replay], setup: Setup) -> list[RunResult]:
    """The simulator's row for each replay."""
    with ThreadPoolExecutor() as pool:
        return list(
            pool.map(lambda r: run_schedule(r.mask, r.schedule, setup, name=r.label), found)
        )


def hit_errors(found: list[Replay], results: list[RunResult]) -> np.ndarray:
    """Simulated minus measured hit ratio of each replay."""
    pairs = zip(found, results, strict=True)
    return np.array([result.l2_hit_frac - replay.run["l2_hit_frac"] for replay, result in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, default=SHIPPED)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--fit", action="store_true", help="also fit the two time constants")
    arguments = parser.parse_args()
    setup = Setup.make(arguments.device)
    for path in arguments.runs:
        report(path, setup, arguments.fit)


def report(path: Path, setup: Setup, fit: bool) -> None:
    """Print the table of one file of runs, and the errors over each tile size."""
    found = list(replays(path))
    print(f"{path}: {len(found)} runs, rebuilt", file=sys.stderr)
    results = compare(found, setup)
    print(f"\n{'run':64} {'hit':>6} {'sim':>6} {'diff':>6} {'ms':>7} {'sim':>7} {'diff':>6}")
    for replay, result in zip(found, results, strict=True):
        hit, ms = replay.run["l2_hit_frac"], replay.run["counters_ms"]
        print(
            f"{replay.label:64} {hit:6.3f} {result.l2_hit_frac:6.3f} "
            f"{100 * (result.l2_hit_frac - hit):+6.1f} {ms:7.2f} {result.time_ms:7.2f} "
            f"{100 * (result.time_ms / ms - 1):+5.1f}%"
        )
    tiles = [(r.mask.block_q, r.mask.block_kv) for r in found]
    for tile in sorted(set(tiles)):
        kept = [i for i, t in enumerate(tiles) if t == tile]
        _summary(tile, [found[i] for i in kept], [results[i] for i in kept], setup, fit)


def _summary(
    tile: tuple[int, int], found: list[Replay], results: list[RunResult], setup: Setup, fit: bool
) -> None:
    hits = 100 * hit_errors(found, results)
    measured_ms = np.array([r.run["counters_ms"] for r in found])
    times = 100 * (np.array([r.time_ms for r in results]) / measured_ms - 1)
    print(
        f"\n{tile[0]}x{tile[1]}, {len(found)} runs, LRU of {setup.l2_capacity_bytes} bytes: "
        f"hit ratio off by {np.abs(hits).mean():.2f} points on average (worst "
        f"{np.abs(hits).max():.1f}, bias {hits.mean():+.2f}); time off by "
        f"{np.abs(times).mean():.2f} % on average (worst {np.abs(times).max():.1f} %)"
    )
    if not fit:
        return
    # time = block_ns * makespan + shared_ns * misses / W is linear in the two constants.
    shared_ms = np.array(
        [
            r.hbm_read_bytes / r.kv_block_bytes / r.wave * setup.kernel.miss_shared_ns / 1e6
            for r in results
        ]
    )
    blocks_ms = np.array([r.time_ms for r in results]) - shared_ms
    terms = np.stack([blocks_ms, shared_ms]).T / measured_ms[:, None]
    factor = np.linalg.lstsq(terms, np.ones(len(found)), rcond=None)[0]
    print(
        f"  least squares (relative): block_ns {factor[0] * setup.kernel.step_ns(*tile, 128):.1f}, "
        f"miss_shared_ns {factor[1] * setup.kernel.miss_shared_ns:.1f}"
    )


if __name__ == "__main__":
    main()
