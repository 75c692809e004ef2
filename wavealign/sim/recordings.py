"""Measured runs and the schedules that they executed, rebuilt for replay.

Runs are rows of ``wavealign.run/1`` with source "measured" (`wavealign validate --out`), masks lie
beside them. A schedule is rebuilt from the policy's name, the seed and the wave; that of a row with
a ``schedule_file`` from the orders recorded there (`wavealign.order.recorded`). Where that file
holds none, the run is good to compare, not to replay, and is passed over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from wavealign.errors import InputError
from wavealign.masks.block_mask import BlockMask
from wavealign.masks.files import load_mask
from wavealign.order.policies import build_schedule
from wavealign.order.recorded import recorded_schedule
from wavealign.order.schedule import Schedule
from wavealign.outputs import note_read
from wavealign.runs.launch import Launch
from wavealign.runs.lines import read_lines
from wavealign.runs.result import Outcome, Result
from wavealign.tensor_files import open_arrays
from wavealign.units import parse_heads


@dataclass(frozen=True)
class Recording:
    """A measured run and the schedule that it executed.

    Attributes:
        launch: what ran.
        measured: what the card did, in a single launch.
        steady_ms: time of the same launch in the steady state; None where it wasn't measured.
        campaign: runs of one campaign may be compared with each other.
        mask: the heads that ran.
        schedule: what ran, in the order in which it ran.
    """

    launch: Launch
    measured: Outcome
    steady_ms: float | None
    campaign: str
    mask: BlockMask
    schedule: Schedule

    @property
    def mask_name(self) -> str:
        """The mask, with its head where it ran alone."""
        head = self.launch.head
        return self.launch.mask + ("" if head is None else f"[{head}]")

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
        InputError: a missing file, a line that isn't a measured run, a mask that isn't there or
            isn't the one that ran.
    """
    path = Path(runs)
    source = path / "runs.jsonl" if path.is_dir() else path
    folder = Path(masks) if masks is not None else source.parent
    note_read(source)
    results = list(read_lines(source, Result.from_json))
    steady = {r.launch: r.outcome.time_ms for r in results if r.launch.regime == "steady"}
    # The same masks and schedules come again and again, and `svd` takes a while.
    load, build = lru_cache(maxsize=None)(_mask), lru_cache(maxsize=None)(build_schedule)
    for result in results:
        launch, outcome = result.launch, result.outcome
        if kernel not in (None, launch.kernel) or launch.regime == "steady":
            continue  # a steady run belongs to the single launch of the same schedule
        if launch.source != "measured":
            raise InputError(f"{source}: a run has source '{launch.source}'; expected 'measured'.")
        _check(result, source)
        mask, heads = load(folder, launch.mask, launch.heads)
        if launch.mask_digest != mask.digest:
            raise InputError(
                f"mask '{launch.mask}', heads {launch.heads}, isn't the one that ran: digest "
                f"{mask.digest}, the run has {launch.mask_digest}."
            )
        schedule: Schedule | None
        if launch.schedule_file is None:
            schedule = build(mask, launch.policy, launch.wave, launch.seed)
        else:
            orders = source.parent / launch.schedule_file
            schedule = recorded_schedule(orders, mask, heads, launch.policy, launch.wave)
        if schedule is None:
            continue
        if outcome.ragged_kv_first:
            schedule = schedule.ragged_kv_first(mask)
        # Files are campaigns: each compares its runs with an `original` of its own.
        campaign = f"{launch.device} {source.stem}"
        steady_ms = steady.get(dataclasses.replace(launch, regime="steady"))
        yield Recording(launch, outcome, steady_ms, campaign, mask, schedule)


def _check(run: Result, source: Path) -> None:
    """Raise where a run isn't what a replay simulates: one sequence, no GQA, heads of 128."""
    launch = run.launch
    told = f"{source}: a run of {launch.policy} on {launch.mask}"
    if not run.outcome.time_ms:
        raise InputError(f"{told} has time_ms {run.outcome.time_ms}; expected a time.")
    for name, usual in (("batch", 1), ("kv_heads", launch.head_count), ("head_dim", 128)):
        if (value := getattr(launch, name)) not in (None, usual):
            raise InputError(f"{told} has {name} {value}; runs with {usual} can be replayed.")


def _mask(folder: Path, name: str, heads: str) -> tuple[BlockMask, list[int]]:
    """The heads of a mask that ran, and their places in its file."""
    stem, _, key = name.partition(":")
    path = folder / f"{stem}.npz" if folder.is_dir() else folder
    if path.stem != stem or not path.exists():
        raise InputError(f"{folder}: holds no mask named '{name}'.")
    with open_arrays(path, key or None) as file:
        block = None if "block_size" in file else _block(stem)
    mask = load_mask(path, block, key or None).mask
    chosen = parse_heads(heads, mask.H)
    return mask if chosen == list(range(mask.H)) else mask.select_heads(chosen), chosen


def _block(name: str) -> tuple[int, int]:
    """Tokens per block of a bare mask: named at the end of its name, 128x128 otherwise."""
    q, x, kv = name.rpartition("_")[2].partition("x")
    return (int(q), int(kv)) if x and q.isdigit() and kv.isdigit() else (128, 128)
