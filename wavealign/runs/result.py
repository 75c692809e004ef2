"""The result of a run (launch, outcome, environment), and its flat JSON form."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from wavealign.errors import InputError
from wavealign.runs.launch import Launch

RUN_SCHEMA = "wavealign.run/1"


@dataclass(frozen=True)
class Outcome:
    """What a run came to. What isn't known is None, never a guess.

    Attributes:
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

    What only a measured run has:
        repeats: launches behind `time_ms` (their median; in the steady state their mean).
        time_spread_frac: interquartile range of their times / `time_ms`.
        counters_ms: kernel time of the launch that the profiler replayed.
        tensor_active_frac: share of the cycles in which the tensor pipes were busy.
        hbm_write_bytes: bytes written to device memory.
        power_w, temperature_c: of the card, median and highest.
        throttle: NVML's reasons for a lower clock, joined by ``,``; empty if there were none.
        gather_ms, scatter_ms: moving Q into launch order, O and LSE back; 0 where nothing moves.
        dense_ms: the same backend over every K/V block.
        error_frac: relative error of the output against float32 attention, by norm.
        ragged_kv_first: rows visited a ragged last K/V block first, as the kernel insists.
    """

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
    repeats: int | None = None
    time_spread_frac: float | None = None
    counters_ms: float | None = None
    tensor_active_frac: float | None = None
    hbm_write_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: str | None = None
    gather_ms: float | None = None
    scatter_ms: float | None = None
    dense_ms: float | None = None
    error_frac: float | None = None
    ragged_kv_first: bool | None = None


@dataclass(frozen=True)
class Environment:
    """What ran it, which may differ between repeats of a launch.

    Attributes:
        version: of the tool.
        cache_control: ``"all"``: L2 was flushed before the counted launch, ``"none"``: it wasn't.
        gpu, driver, backend_version: of a measured run.
    """

    version: str
    cache_control: str | None = None
    gpu: str | None = None
    driver: str | None = None
    backend_version: str | None = None


# The flat record's fields in the order of the file; what came later stands at its end.
FIELDS = (
    "source", "policy", "mask", "mask_digest", "heads", "head", "device", "kernel", "seed", "wave",
    "model", "regime", "l2_capacity_bytes", "kv_block_bytes", "time_ms", "l2_hit_frac",
    "lts_sector_hit_frac", "l2_requested_bytes", "fabric_bytes", "hbm_read_bytes",
    "compulsory_bytes", "belady_bytes", "imbalance_frac", "clock_ghz", "energy_j", "limit_ms",
    "gap", "intensity_flop_per_byte", "roofline", "bound", "version", "tokens_kv", "density",
    "batch", "kv_heads", "head_dim", "dtype", "repeats", "time_spread_frac", "counters_ms",
    "tensor_active_frac", "hbm_write_bytes", "cache_control", "power_w", "temperature_c",
    "throttle", "gather_ms", "scatter_ms", "dense_ms", "error_frac", "ragged_kv_first",
    "schedule_file", "gpu", "driver", "backend_version", "l2_bytes", "device_digest",
)  # fmt: skip
"""Fields of a row of ``wavealign.run/1``, and attributes of a `Result`."""

_NEEDED = FIELDS[: FIELDS.index("version") + 1]
_PARTS: dict[str, type[Any]] = {"launch": Launch, "outcome": Outcome, "environment": Environment}
_PART_OF = {field.name: part for part, cls in _PARTS.items() for field in dataclasses.fields(cls)}
FIELD_TYPES = {f.name: str(f.type) for cls in _PARTS.values() for f in dataclasses.fields(cls)}
"""The type of each field, as it is written: ``"float | None"``."""


@dataclass(frozen=True)
class Result:
    """One run of one schedule (``wavealign.run/1``).

    Every field of the flat record is an attribute, too: ``result.time_ms`` is
    ``result.outcome.time_ms``.

    Attributes:
        launch: what ran.
        outcome: what it came to.
        environment: what ran it.

    Example:
        >>> import numpy as np
        >>> import wavealign as wa
        >>> result = wa.simulate(wa.BlockMask.from_dense(np.tri(64)), "nnz", device="h200")
        >>> result.policy, result.launch.wave, result.outcome.compulsory_bytes
        ('nnz', 132, 4194304)
        >>> wa.RunResult.from_json(result.to_json()) == result
        True
    """

    launch: Launch
    outcome: Outcome
    environment: Environment

    def __getattr__(self, name: str) -> Any:
        if name not in _PART_OF:
            raise AttributeError(f"a result has no '{name}'; it has {', '.join(FIELDS)}.")
        return getattr(object.__getattribute__(self, _PART_OF[name]), name)

    @classmethod
    def of(cls, **fields: Any) -> Result:
        """A result from the fields of a flat record."""
        parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
        for name, value in fields.items():
            parts[_PART_OF[name]][name] = value
        return cls(*(part(**parts[name]) for name, part in _PARTS.items()))

    def replaced(self, **fields: Any) -> Result:
        """This result with other values in some fields of the flat record."""
        return Result.of(**{**self.flat(), **fields})

    def flat(self) -> dict[str, Any]:
        """The fields of the flat record, in the order of the file."""
        return {name: getattr(self, name) for name in FIELDS}

    def to_json(self) -> str:
        """One line of JSON, the same for the same values."""
        return json.dumps({"schema": RUN_SCHEMA, **self.flat()}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The row of one line written by `to_json`.

        Raises:
            InputError: not JSON, another schema, missing fields, or a figure that is no number.
        """
        row = read_record(line, RUN_SCHEMA, "a result row")
        if missing := set(_NEEDED) - row.keys():
            raise InputError(f"a result row lacks {', '.join(sorted(missing))}.")
        return cls.of(**{name: row[name] for name in FIELDS if name in row})


RunResult = Result
"""The documented name."""


def read_record(line: str, schema: str, what: str) -> dict[str, Any]:
    """The JSON object of a line.

    Args:
        line: the text.
        schema: that it must be of.
        what: it is, for people.

    Raises:
        InputError: not JSON, of another schema, or with a figure that is no number.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as problem:
        raise InputError(f"{what} is not JSON ({problem}).") from problem
    if not isinstance(row, dict) or row.get("schema") != schema:
        raise InputError(f"{what} is not of schema '{schema}'.")
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(
                f"{what} has {name} {value}, which is no figure; expected a number, or null where "
                "it isn't known."
            )
    return row
