"""Measured runs and the schedules that they executed, rebuilt for replay.

A recording is a JSON lines file of runs and masks beside it. Two kinds of lines are read:

- rows of `wavealign.run/1` with source "measured" (`wavealign validate --out`): the schedule is
  rebuilt from the policy's name, the seed and the wave; rows of schedule files are passed over;
- lines with the orders recorded in the mask file (data/README.md): ``order/O`` (slot → query
  block), ``scramble`` or ``shuffle`` (position in the sweep → K/V block), ``start_column/O`` and
  ``start_position/O`` (where each row begins).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from wavealign.errors import InputError
from wavealign.masks.block_mask import BlockMask, Int32Array
from wavealign.masks.files import load_mask
from wavealign.npz import NpzFile
from wavealign.order.policies import build_schedule
from wavealign.order.schedule import Schedule, slot_of_row
from wavealign.runs.result import RUN_SCHEMA
from wavealign.units import parse_heads

_WAVE = 132  # rows in flight of every recorded order: one CTA per SM of an H100 or H200
_NAMES = {"identity": "original", "lpt": "nnz", "s2": "nnz-wave", "s1s2": "svd+nnz"}
_Loader = Callable[..., BlockMask]
_Builder = Callable[..., Schedule]

_VISITS = {"scramble": "shuffled", "saw": "sawtooth", "phase": "phased"}


@dataclass(frozen=True)
class Measured:
    """What the card did in one run; None where it wasn't read.

    Attributes:
        time_ms: kernel time of a single launch.
        l2_hit_frac: hits of either partition / requests.
        lts_sector_hit_frac: the profiler's hit rate.
        hbm_read_bytes: bytes read from HBM.
        steady_ms: time per launch of a loop under the power cap.
        tensor_active_frac: share of the cycles in which the tensor pipes were busy.
    """

    time_ms: float
    l2_hit_frac: float | None
    lts_sector_hit_frac: float | None
    hbm_read_bytes: float | None
    steady_ms: float | None
    tensor_active_frac: float | None


@dataclass(frozen=True)
class Recording:
    """A measured run and the schedule that it executed.

    Attributes:
        mask_name: the mask, with its head where it ran alone.
        campaign: runs of one campaign may be compared with each other.
        kernel: kernel name.
        mask: what ran.
        schedule: what ran, in the order in which it ran.
        measured: what the card did.
    """

    mask_name: str
    campaign: str
    kernel: str
    mask: BlockMask
    schedule: Schedule
    measured: Measured

    @property
    def label(self) -> str:
        """Mask and policy."""
        return f"{self.mask_name} {self.schedule.policy}"


def load_recordings(
    runs: str | Path, masks: str | Path | None = None, kernel: str | None = "fa4"
) -> Iterator[Recording]:
    """Every run of `kernel` whose schedule can be rebuilt.

    Args:
        runs: JSON lines, or a folder with ``runs.jsonl``.
        masks: the mask file, or the folder of mask files; by default the folder of `runs`.
        kernel: only this kernel's runs; None for all.

    Raises:
        InputError: a missing file, a line that isn't a measured run, a mask that isn't there.
    """
    path = Path(runs)
    source = path / "runs.jsonl" if path.is_dir() else path
    folder = Path(masks) if masks is not None else source.parent
    lines = list(_lines(source))
    steady = {_launch_key(r): r["time_ms"] for _, r in lines if r.get("regime") == "steady"}
    # The same masks and schedules come again and again, and `svd` takes a while.
    load, build = lru_cache(maxsize=None)(_mask), lru_cache(maxsize=None)(build_schedule)
    for number, run in lines:
        if kernel is not None and run.get("kernel") != kernel:
            continue
        if not run.get("order_recorded", True) or run.get("schedule_file"):
            continue
        if run.get("regime") == "steady":
            continue  # it belongs to the single launch of the same schedule
        try:
            yield _recording(run, source, folder, steady.get(_launch_key(run)), load, build)
        except KeyError as problem:
            raise InputError(
                f"{source}: line {number} has no {problem}; expected a measured run "
                f"('{RUN_SCHEMA}', or with recorded orders: data/README.md)."
            ) from problem


def _launch_key(run: dict[str, Any]) -> tuple[Any, ...]:
    """What tells launches apart, in rows of `wavealign.run/1`."""
    return tuple(run.get(name) for name in ("mask_digest", "policy", "kernel", "device", "wave"))


def _lines(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"{source}: can't be read ({problem}).") from problem
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            run = json.loads(line)
        except json.JSONDecodeError as problem:
            raise InputError(f"{source}: line {number} is not JSON ({problem}).") from problem
        if not isinstance(run, dict):
            raise InputError(f"{source}: line {number} is not a JSON object.")
        yield number, run


def _recording(
    run: dict[str, Any],
    source: Path,
    folder: Path,
    steady_ms: float | None,
    load: _Loader,
    build: _Builder,
) -> Recording:
    path, key = _mask_file(folder, run["mask"])
    head = run.get("head_index", run.get("head"))
    with NpzFile(path) as whole, NpzFile(path, key) as own:
        block = None if "block_size" in own else _block(run["mask"])
        heads = run["heads"] if "schema" in run else head
        mask = load(path, block, key, heads)
        if "schema" in run:
            # Files are campaigns: each compares its runs with an `original` of its own.
            campaign = f"{run['device']} {source.stem}"
            return _from_result(run, mask, campaign, steady_ms, build)
        rows = run.get("order") or run["rows"]
        row_order = _row_order(own, rows, mask)
        lists = _visit_lists(own, whole, run, rows, mask, row_order)
    policy = f"{_NAMES.get(rows, rows)}/{_visits(run['visit'])}"
    return Recording(
        run["mask"] + ("" if head is None else f"[{head}]"),
        str(run.get("campaign", "")),
        run["kernel"],
        mask,
        Schedule(row_order, mask.indptr, lists, mask.shape, policy),
        Measured(
            run["counters_ms"],
            run.get("l2_hit_frac"),
            run.get("lts_sector_hit_frac"),
            run["dram_read_gb"] * 1e9 if "dram_read_gb" in run else None,
            run.get("loop_ms"),
            run.get("tensor_active_frac"),
        ),
    )


def _from_result(
    run: dict[str, Any], mask: BlockMask, campaign: str, steady_ms: float | None, build: _Builder
) -> Recording:
    if run["schema"] != RUN_SCHEMA or run["source"] != "measured":
        raise InputError(
            f"a run has schema '{run['schema']}' and source '{run['source']}'; expected "
            f"'{RUN_SCHEMA}' and 'measured'."
        )
    if run["mask_digest"] != mask.digest:
        raise InputError(
            f"mask '{run['mask']}', heads {run['heads']}, isn't the one that ran: digest "
            f"{mask.digest}, the run has {run['mask_digest']}."
        )
    schedule = build(mask, run["policy"], run["wave"], run["seed"])
    if run.get("ragged_kv_first"):
        schedule = schedule.ragged_kv_first(mask)
    head = run["head"]
    return Recording(
        run["mask"] + ("" if head is None else f"[{head}]"),
        campaign,
        run["kernel"],
        mask,
        schedule,
        Measured(
            run["time_ms"],
            run["l2_hit_frac"],
            run["lts_sector_hit_frac"],
            run["hbm_read_bytes"],
            steady_ms,
            run.get("tensor_active_frac"),
        ),
    )


def _mask(
    path: Path, block: tuple[int, int] | None, key: str | None, heads: str | int | None
) -> BlockMask:
    """The mask of a file, reduced to the heads that ran."""
    mask = load_mask(path, block, key).mask
    if heads is None:
        return mask
    chosen = [heads] if isinstance(heads, int) else parse_heads(heads, mask.H)
    return mask if chosen == list(range(mask.H)) else mask.select_heads(chosen)


def _mask_file(folder: Path, name: str) -> tuple[Path, str | None]:
    if folder.is_dir():
        own = folder / f"{name}.npz"
        if own.exists():
            return own, None
    candidates = sorted(folder.glob("*.npz")) if folder.is_dir() else [folder]
    for path in candidates:
        with NpzFile(path) as file:
            if f"{name}/shape" in file or f"{name}/mask" in file:
                return path, name
            if path.stem == name:
                return path, None
    raise InputError(f"{folder}: holds no mask named '{name}'.")


def _block(name: str) -> tuple[int, int]:
    """Tokens per block: named at the end of a mask's name, 128x128 otherwise."""
    q, x, kv = name.rpartition("_")[2].partition("x")
    return (int(q), int(kv)) if x and q.isdigit() and kv.isdigit() else (128, 128)


def _visits(recorded: str) -> str:
    parts = [_VISITS.get(part, part) for part in recorded.split("+")]
    return "+".join(parts)


def _row_order(own: NpzFile, name: str, mask: BlockMask) -> Int32Array:
    if f"order/{name}" in own:
        return own.array(f"order/{name}").astype(np.int32)
    if name not in ("original", "nnz"):
        raise own.error(f"row order '{name}' wasn't recorded.")
    return build_schedule(mask, name, _WAVE).row_order


def _visit_lists(
    own: NpzFile,
    whole: NpzFile,
    run: dict[str, Any],
    rows: str,
    mask: BlockMask,
    row_order: Int32Array,
) -> Int32Array:
    """The lists that the kernel walked, rebuilt from what was recorded."""
    visits = _visits(run["visit"]).split("+")
    shuffled = "shuffled" in visits
    lists = mask.indices.copy()
    for h in range(mask.H):
        sweep = np.arange(mask.N, dtype=np.int32)
        if shuffled:
            sweep = own.array("scramble")[h] if "scramble" in own else whole.array("shuffle")
        place = slot_of_row(sweep)
        starts = None
        if "phased" in visits:
            kind = "start_position" if shuffled else "start_column"
            starts = own.array(f"{kind}/{rows}")[run.get("head_index", h)]
        slots = slot_of_row(row_order[h])
        for i in range(mask.M):
            begin, end = mask.indptr[h * mask.M + i : h * mask.M + i + 2]
            row = lists[begin:end]
            row = row[np.argsort(place[row])]
            if "sawtooth" in visits and slots[i] // _WAVE % 2:
                row = row[::-1]
            if starts is not None:
                row = np.roll(row, -int(np.searchsorted(place[row], starts[i])))
            lists[begin:end] = row
    return lists
