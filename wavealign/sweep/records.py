"""A trial of a sweep: the spec that says everything, and the record of how it ended."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from wavealign.errors import InputError
from wavealign.results import RunResult

TRIAL_SCHEMA = "wavealign.trial/1"
ID_DIGITS = 16


@dataclass(frozen=True)
class TrialSpec:
    """All that a trial's result depends on; equal specs have equal identities.

    Attributes:
        source: ``"simulated"`` or ``"measured"``.
        mask: the mask's name, for people; the digest is what counts.
        mask_digest: of the heads that run.
        heads: which heads of the file run, in one launch, e.g. ``"0,3-7"``.
        policy: a policy string, parameters written out.
        device: name of the device profile; in a measured trial the card's.
        kernel: name of the kernel or backend.
        wave: rows in flight at once, W.
        l2_bytes: the L2 modelled, all of it usable; None for the device's own.
        head_dim: elements per head.
        dtype: of K and V.
        model: ``"full"`` or ``"fast"``; None in a measured trial.
        regime: ``"single"`` launch or ``"steady"`` state.
        seed: of every random choice.
    """

    source: str
    mask: str
    mask_digest: str
    heads: str
    policy: str
    device: str
    kernel: str
    wave: int
    l2_bytes: int | None
    head_dim: int
    dtype: str
    model: str | None
    regime: str
    seed: int

    @property
    def identity(self) -> str:
        """Hex digits of the SHA-256 of the spec's canonical JSON, without the mask's name."""
        what = {key: value for key, value in dataclasses.asdict(self).items() if key != "mask"}
        text = json.dumps(what, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:ID_DIGITS]


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

    spec: TrialSpec
    status: str
    result: RunResult | None
    error: str | None
    planning_ms: float | None
    seconds: float
    worker: str

    def to_json(self) -> str:
        """One line of JSON."""
        row = {
            "schema": TRIAL_SCHEMA,
            "id": self.spec.identity,
            "status": self.status,
            "spec": dataclasses.asdict(self.spec),
            "result": json.loads(self.result.to_json()) if self.result is not None else None,
            "error": self.error,
            "planning_ms": self.planning_ms,
            "seconds": self.seconds,
            "worker": self.worker,
        }
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> TrialRecord:
        """The record of one line written by `to_json`.

        Raises:
            InputError: not JSON, another schema, or an identity that isn't the spec's.
        """
        try:
            row: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError as problem:
            raise InputError(f"a trial is not JSON ({problem}).") from problem
        if not isinstance(row, dict) or row.get("schema") != TRIAL_SCHEMA:
            raise InputError(f"a trial is not of schema '{TRIAL_SCHEMA}'.")
        try:
            spec = TrialSpec(**row["spec"])
            result = row["result"]
            record = cls(
                spec,
                row["status"],
                RunResult.from_json(json.dumps(result)) if result is not None else None,
                row["error"],
                row["planning_ms"],
                row["seconds"],
                row["worker"],
            )
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
