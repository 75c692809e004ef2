"""The result row that simulated and measured runs share, and its JSONL form."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from wavealign.errors import InputError, WriteError
from wavealign.npz import check_writable

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ModuleNotFoundError:  # not a POSIX system
    fcntl = None

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

    What only a measured run has (None in a simulated one, and where it wasn't read):
        tokens_kv, density, batch, kv_heads, head_dim, dtype: of the launch.
        repeats: launches behind `time_ms` (their median; in the steady state their mean).
        time_spread_frac: interquartile range of their times / `time_ms`.
        counters_ms: kernel time of the launch that the profiler replayed.
        tensor_active_frac: share of the cycles in which the tensor pipes were busy.
        hbm_write_bytes: bytes written to device memory.
        cache_control: ``"all"``: L2 was flushed before the counted launch, ``"none"``: it wasn't.
        power_w, temperature_c: of the card, median and highest.
        throttle: NVML's reasons for a lower clock, joined by ``,``; empty if there were none.
        gather_ms, scatter_ms: moving Q into launch order, O and LSE back; 0 where nothing moves.
        dense_ms: the same backend over every K/V block.
        error_frac: relative error of the output against float32 attention, by norm.
        ragged_kv_first: rows visited a ragged last K/V block first, as the kernel insists.
        schedule_file: the schedule came from this file, not from the policy's name.
        gpu, driver, backend_version: what ran it.
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
    tokens_kv: int | None = None
    density: float | None = None
    batch: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    repeats: int | None = None
    time_spread_frac: float | None = None
    counters_ms: float | None = None
    tensor_active_frac: float | None = None
    hbm_write_bytes: int | None = None
    cache_control: str | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: str | None = None
    gather_ms: float | None = None
    scatter_ms: float | None = None
    dense_ms: float | None = None
    error_frac: float | None = None
    ragged_kv_first: bool | None = None
    schedule_file: str | None = None
    gpu: str | None = None
    driver: str | None = None
    backend_version: str | None = None

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
        fields = dataclasses.fields(cls)
        needed = {field.name for field in fields if field.default is dataclasses.MISSING}
        if missing := needed - row.keys():
            raise InputError(f"a result row lacks {', '.join(sorted(missing))}.")
        return cls(**{field.name: row[field.name] for field in fields if field.name in row})


class ResultWriter:
    """Writes rows as they come to ``PATH.partial`` and renames it to PATH on leaving.

    Leaving by an exception keeps the rows that were written; a file without rows isn't left,
    nor is a row that a full disk cut off. One process at a time, where the system has flock.

    Raises:
        InputError: the path can't be written, or another process writes it; on entering, too.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = check_writable(path)
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._rows = 0

    def __enter__(self) -> ResultWriter:
        try:
            self._stream = _claimed(self._partial)
        except BlockingIOError as problem:
            raise InputError(
                f"{self._path}: another process writes it; wait for it, or choose another file."
            ) from problem
        except OSError as problem:
            raise WriteError.of(self._path, problem) from problem
        return self

    def write(self, results: Iterable[RunResult]) -> None:
        """Append rows and hand them to the operating system.

        Raises:
            WriteError: a row couldn't be written to its end, e.g. on a full disk.
        """
        try:
            for result in results:
                self._append((result.to_json() + "\n").encode())
        except OSError as problem:
            kept = f"the {self._rows} rows before are kept" if self._rows else "nothing was kept"
            raise WriteError.of(self._path, problem, kept) from problem

    def _append(self, line: bytes) -> None:
        whole_bytes = self._stream.tell()
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._stream.truncate(whole_bytes)
            raise
        self._rows += 1

    def __exit__(self, *_: object) -> None:
        if fcntl is None:  # such systems don't rename open files
            self._stream.close()
        if self._rows:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()
        self._stream.close()  # only now may another process claim the name


def _claimed(path: Path) -> FileIO:
    """An empty file that no other process writes.

    Raises:
        BlockingIOError: another one does.
    """
    while True:
        stream = FileIO(path, "a")
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.close()
                raise
            except OSError:  # a file system without locks
                pass
            # Between opening and locking, the file may have been finished and renamed.
            if not (path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat())):
                stream.close()
                continue
        stream.truncate(0)
        return stream
