"""The result of a run (launch, outcome, environment), and its flat JSON form."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from wavealign.errors import InputError
from wavealign.runs.launch import Launch
from wavealign.structures import Amount, Count, Share, json_text, read_json, structured

RUN_SCHEMA = "wavealign.run/1"


Binding = Literal["tensor", "power", "l2", "hbm"]
CacheControl = Literal["all", "none"]


@dataclass(frozen=True)
class Outcome:
    """What a run came to. What isn't known is None, never a guess.

    Attributes:
        time_ms: kernel time.
        l2_hit_frac: share of the requested K/V bytes that didn't come from HBM.
        lts_sector_hit_frac: what a profiler prints as L2 hit rate; None in the fast model.
        l2_requested_bytes: K/V bytes that rows asked for.
        fabric_bytes: K/V bytes that crossed between L2 partitions; None in the fast model.
        hbm_read_bytes: K/V bytes read from device memory.
        compulsory_bytes: distinct K/V bytes, each read once: the least any order can read.
        belady_bytes: the least that any replacement could read in this order (OPT).
        imbalance_frac: share of the workers' time lost waiting for the last one to end.
        clock_ghz: SM clock; None where the device's power budget isn't known.
        energy_j: joules; None where the clock is.
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

    time_ms: Amount | None
    l2_hit_frac: Share | None
    lts_sector_hit_frac: Share | None
    l2_requested_bytes: Count
    fabric_bytes: Count | None
    hbm_read_bytes: Count | None
    compulsory_bytes: Count
    belady_bytes: Count | None
    imbalance_frac: Share | None
    clock_ghz: Amount | None
    energy_j: Amount | None
    limit_ms: Amount | None
    gap: Amount | None
    intensity_flop_per_byte: Amount | None
    roofline: Literal["compute", "memory"] | None
    bound: Binding | None
    repeats: Count | None = None
    time_spread_frac: Amount | None = None
    counters_ms: Amount | None = None
    tensor_active_frac: Share | None = None
    hbm_write_bytes: Count | None = None
    power_w: Amount | None = None
    temperature_c: Annotated[float, msgspec.Meta(ge=-273.15, le=1e4)] | None = None
    throttle: str | None = None
    gather_ms: Amount | None = None
    scatter_ms: Amount | None = None
    dense_ms: Amount | None = None
    error_frac: Amount | None = None
    ragged_kv_first: bool | None = None


@dataclass(frozen=True)
class Environment:
    """What ran it, which may differ between repeats of a launch.

    Attributes:
        version: of the tool; None in measured rows of before it was written.
        cache_control: ``"all"``: L2 was flushed before the counted launch, ``"none"``: it wasn't.
        gpu, driver, backend_version: of a measured run.
    """

    version: str | None
    cache_control: CacheControl | None = None
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
FIELD_TYPES: dict[str, Any]
"""The type of each field: ``float | None``."""
FIELD_TYPES, RANGES = (
    {n: t for cls in _PARTS.values() for n, t in get_type_hints(cls, include_extras=e).items()}
    for e in (False, True)
)

RunRow = msgspec.defstruct(
    "RunRow",
    [
        *((name, RANGES[name]) for name in _NEEDED),
        *((name, RANGES[name] | None, None) for name in FIELDS[len(_NEEDED) :]),
    ],
    tag_field="schema", tag=RUN_SCHEMA, kw_only=True,
)  # fmt: skip
"""A line of ``wavealign.run/1``; who adds keys of one's own to rows may do so."""


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
        return json_text({"schema": RUN_SCHEMA, **self.flat()})

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The row of one line written by `to_json`.

        Raises:
            InputError: see `from_record`; not JSON.
        """
        return cls.from_record(read_json(line))

    @classmethod
    def from_record(cls, record: Any) -> Result:
        """The row of the JSON object of such a line.

        Raises:
            InputError: another schema, a key that is missing, unknown or holds something else.
        """
        need_schema(record, RUN_SCHEMA, "a result row")
        return cls.of_row(structured(record, RunRow, "a result row"))

    @classmethod
    def of_row(cls, row: msgspec.Struct) -> Result:
        """The result that a checked line says."""
        return cls.of(**{name: getattr(row, name) for name in FIELDS})


RunResult = Result
"""The documented name."""


def need_schema(record: Any, schema: str, what: str) -> None:
    """Check what a record says that it is.

    Args:
        record: read from JSON.
        schema: that it must be of.
        what: it is, for people.

    Raises:
        InputError: no object, or of another schema.
    """
    if not isinstance(record, dict) or record.get("schema") != schema:
        raise InputError(f"{what} is not of schema '{schema}'.")
