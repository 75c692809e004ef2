"""The result row that simulated and measured runs share, and its JSONL form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from wavealign.errors import InputError
from wavealign.npz import check_writable

RUN_SCHEMA = "wavealign.run/1"


@dataclass(frozen=True)
class RunResult:
    """One run of one schedule (``wavealign.run/1``). What isn't known is None, never a guess.

    Attributes:
        source: ``"simulated"`` or ``"measured"``.
        policy: the recipe of the schedule.
        mask: the mask's name.
        mask_digest: hash of the mask that ran (of the selected heads).
        heads: which heads of the file ran, e.g. ``"0,3-7"``.
        head: the head, or None where all of `heads` ran in one launch.
        device: profile or device name.
        kernel: kernel name.
        seed: of every random choice.
        wave: rows in flight at once, W.
        model: the simulator's model, ``"full"`` or ``"fast"``; None in a measured run.
        regime: ``"single"`` launch or ``"steady"`` state.
        l2_capacity_bytes: the L2 that was modelled; None in a measured run.
        kv_block_bytes: K and V of one full block.
        time_ms: kernel time.
        l2_hit_frac: share of the requested K/V bytes that didn't come from HBM.
        lts_sector_hit_frac: what a profiler prints as L2 hit rate.
        l2_requested_bytes: K/V bytes that rows asked for.
        fabric_bytes: K/V bytes that crossed between L2 partitions.
        hbm_read_bytes: K/V bytes read from device memory.
        compulsory_bytes: distinct K/V bytes, each read once: the least any order can read.
        belady_bytes: the least that any replacement could read in this order (OPT).
        imbalance_frac: share of the workers' time lost waiting for the last one to end.
        clock_ghz: SM clock.
        energy_j: joules.
        limit_ms: the compute limit: these rows, every K/V block in L2.
        gap: (1/density) / (dense time / time); 1 means that sparsity paid in full.
        intensity_flop_per_byte: FLOP per byte read from HBM.
        roofline: ``"compute"`` or ``"memory"`` side of the device's ridge.
        bound: the binding resource: ``tensor``, ``power`` (through the clock), ``l2`` or ``hbm``.
        version: of the tool.
    """

    source: str
    policy: str
    mask: str
    mask_digest: str
    heads: str
    head: int | None
    device: str
    kernel: str
    seed: int
    wave: int
    model: str | None
    regime: str
    l2_capacity_bytes: int | None
    kv_block_bytes: int
    time_ms: float | None
    l2_hit_frac: float | None
    lts_sector_hit_frac: float | None
    l2_requested_bytes: int
    fabric_bytes: int | None
    hbm_read_bytes: int | None
    compulsory_bytes: int
    belady_bytes: int | None
    imbalance_frac: float | None
    clock_ghz: float | None
    energy_j: float | None
    limit_ms: float | None
    gap: float | None
    intensity_flop_per_byte: float | None
    roofline: str | None
    bound: str | None
    version: str

    def to_json(self) -> str:
        """One line of JSON, the same for the same values."""
        return json.dumps({"schema": RUN_SCHEMA, **dataclasses.asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> RunResult:
        """The row of one line written by `to_json`.

        Raises:
            InputError: not JSON, another schema, or missing fields.
        """
        try:
            row: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError as problem:
            raise InputError(f"a result row is not JSON ({problem}).") from problem
        if not isinstance(row, dict) or row.pop("schema", None) != RUN_SCHEMA:
            raise InputError(f"a result row is not of schema '{RUN_SCHEMA}'.")
        names = {field.name for field in dataclasses.fields(cls)}
        if missing := names - row.keys():
            raise InputError(f"a result row lacks {', '.join(sorted(missing))}.")
        return cls(**{name: row[name] for name in names})


class ResultWriter:
    """Writes rows as they come to ``PATH.partial`` and renames it to PATH on leaving.

    Leaving by an exception keeps the rows that were written; a file without rows isn't left.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = check_writable(path)
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._stream: TextIO | None = None

    def __enter__(self) -> ResultWriter:
        return self

    def write(self, results: Iterable[RunResult]) -> None:
        """Append rows and hand them to the operating system."""
        if self._stream is None:
            self._stream = self._partial.open("w", encoding="utf-8")
        for result in results:
            self._stream.write(result.to_json() + "\n")
        self._stream.flush()

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
            self._partial.replace(self._path)
