"""A trial of a sweep: a launch, and the record of how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from wavealign.errors import InputError
from wavealign.runs.launch import SPEC_FIELDS, Launch
from wavealign.runs.result import RANGES, RUN_SCHEMA, Result, RunRow, need_schema
from wavealign.structures import Amount, json_text, read_json, structured

TRIAL_SCHEMA = "wavealign.trial/1"

_Spec = msgspec.defstruct(
    "Spec", [(name, RANGES[name]) for name in SPEC_FIELDS], forbid_unknown_fields=True
)
TrialRow = msgspec.defstruct(
    "TrialRow",
    [
        ("id", str), ("status", Literal["done", "failed"]), ("spec", _Spec),
        ("result", RunRow | None), ("error", str | None), ("planning_ms", Amount | None),
        ("seconds", Amount), ("worker", str),
    ],
    tag_field="schema", tag=TRIAL_SCHEMA, forbid_unknown_fields=True,
)  # fmt: skip
"""A line of ``wavealign.trial/1``."""


@dataclass(frozen=True)
class TrialRecord:
    """How a trial ended (one line of a store, ``wavealign.trial/1``).

    Attributes:
        spec: what was tried.
        status: ``"done"`` or ``"failed"``.
        result: the row of a trial that is done, else None.
        error: why it failed, else None.
        planning_ms: making the schedule on the CPU; None where it failed before.
        seconds: the whole trial.
        worker: who ran it.
    """

    spec: Launch
    status: str
    result: Result | None
    error: str | None
    planning_ms: float | None
    seconds: float
    worker: str

    def to_json(self) -> str:
        """One line of JSON."""
        result = self.result
        return json_text({
            "schema": TRIAL_SCHEMA, "id": self.spec.identity, "status": self.status,
            "spec": self.spec.spec,
            "result": None if result is None else {"schema": RUN_SCHEMA, **result.flat()},
            "error": self.error, "planning_ms": self.planning_ms, "seconds": self.seconds,
            "worker": self.worker,
        })  # fmt: skip

    @classmethod
    def from_json(cls, line: str) -> TrialRecord:
        """The record of one line written by `to_json`.

        Raises:
            InputError: see `from_record`; not JSON.
        """
        return cls.from_record(read_json(line))

    @classmethod
    def from_record(cls, record: Any) -> TrialRecord:
        """The record of the JSON object of such a line.

        Raises:
            InputError: another schema, a key that is missing, unknown or holds something else, a
                result that the status denies, or an identity that isn't the spec's.
        """
        need_schema(record, TRIAL_SCHEMA, "a trial")
        row: Any = structured(record, TrialRow, "a trial")
        spec = Launch(**msgspec.structs.asdict(row.spec))
        if (row.status == "done") != (row.result is not None):
            held = "no result" if row.result is None else "a result"
            raise InputError(f"a trial is {row.status} and has {held}; the file was edited.")
        if row.id != spec.identity:
            raise InputError(
                f"trial {row.id} has the spec of {spec.identity}; the file was edited, or "
                "written by another version."
            )
        result = None if row.result is None else Result.of_row(row.result)
        return cls(spec, row.status, result, row.error, row.planning_ms, row.seconds, row.worker)
