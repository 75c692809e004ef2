"""A trial of a sweep: a launch, and the record of how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass

from wavealign.errors import InputError
from wavealign.runs.launch import Launch
from wavealign.runs.result import Result, read_record

TRIAL_SCHEMA = "wavealign.trial/1"


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
        row = {
            "schema": TRIAL_SCHEMA, "id": self.spec.identity, "status": self.status,
            "spec": self.spec.spec,
            "result": json.loads(self.result.to_json()) if self.result is not None else None,
            "error": self.error, "planning_ms": self.planning_ms, "seconds": self.seconds,
            "worker": self.worker,
        }  # fmt: skip
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> TrialRecord:
        """The record of one line written by `to_json`.

        Raises:
            InputError: not JSON, another schema, or an identity that isn't the spec's.
        """
        row = read_record(line, TRIAL_SCHEMA, "a trial")
        try:
            spec, result = Launch(**row["spec"]), row["result"]
            result = Result.from_json(json.dumps(result)) if result is not None else None
            same = ("status", "error", "planning_ms", "seconds", "worker")
            record = cls(spec=spec, result=result, **{name: row[name] for name in same})
        except (KeyError, TypeError) as problem:
            raise InputError(
                f"a trial lacks a field or has one too many ({problem}); expected those of "
                f"'{TRIAL_SCHEMA}'."
            ) from problem
        if row.get("id") != spec.identity:
            raise InputError(
                f"trial {row.get('id')} has the spec of {spec.identity}; the file was edited, or "
                "written by another version."
            )
        return record
