"""Result rows for `wavealign compare` and `wavealign report`, from files and sweep folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavealign.errors import InputError
from wavealign.outputs import note_read
from wavealign.runs.folder import MANIFEST, by_identity, read_manifest, torn_note, trial_files
from wavealign.runs.launch import BASELINE, head_numbers
from wavealign.runs.lines import read_lines
from wavealign.runs.result import FIELDS, RUN_SCHEMA, Result
from wavealign.runs.trial import TRIAL_SCHEMA, TrialRecord
from wavealign.structures import read_json

_EXPECTED = f"expected JSON lines of '{RUN_SCHEMA}' or '{TRIAL_SCHEMA}', or a sweep's folder"


@dataclass(frozen=True)
class Row:
    """One run, with what only its trial knows.

    Attributes:
        result: the row.
        origin: file or folder it was read from. The rows of one origin are a campaign: they share
            a card, a day and a baseline.
        planning_ms: making the schedule; None where no trial recorded it.
    """

    result: Result
    origin: str
    planning_ms: float | None = None


@dataclass
class Loaded:
    """What files and folders hold.

    Attributes:
        rows: every run, in the order read.
        failed: trials that failed and weren't done later.
        manifests: the ``sweep.json`` of each folder that has one, by folder.
        notes: what was passed over, and why.
        counts: rows by origin.
    """

    rows: list[Row] = field(default_factory=list)
    failed: list[TrialRecord] = field(default_factory=list)
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def load_rows(paths: Sequence[str | Path]) -> Loaded:
    """Read result rows, trials and sweep folders.

    Args:
        paths: JSONL files of runs or trials; folders of a sweep (``trials/*.jsonl``,
            ``results.jsonl``, ``sweep.json``), or of any such files.

    Raises:
        InputError: a path that isn't there, a line that is neither a run nor a trial, nothing
            to read.
    """
    loaded = Loaded()
    seen: set[Path] = set()
    for path in map(Path, paths):
        if path.resolve() in seen:
            raise InputError(f"{path}: is named twice; name each file or folder once.")
        seen.add(path.resolve())
        rows, failed = len(loaded.rows), len(loaded.failed)
        if path.is_dir():
            _load_folder(path, loaded)
        else:
            _take(loaded, path, _read(path, loaded.notes))
        loaded.counts[str(path)] = len(loaded.rows) - rows
        if (rows, failed) == (len(loaded.rows), len(loaded.failed)):
            raise InputError(f"{path}: holds no rows; {_EXPECTED}.")
    return loaded


def in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows by mask, order and seed, however they were read: `original` comes first."""

    def place(row: Row) -> tuple[Any, ...]:
        launch = row.result.launch
        heads = head_numbers(launch.heads)
        what = (launch.mask, heads, launch.mask_digest, launch.policy != BASELINE, launch.policy)
        return (*what, launch.seed, row.origin, row.planning_ms or 0.0, row.result.to_json())

    return sorted(rows, key=place)


def _load_folder(folder: Path, loaded: Loaded) -> None:
    trials = trial_files(folder)
    if (folder / MANIFEST).exists():
        note_read(folder / MANIFEST)
        loaded.manifests[str(folder)] = read_manifest(folder)
    elif not trials:
        _load_loose(folder, loaded)
        return
    notes = loaded.notes
    found = [r for path in trials for r in _read(path, notes, torn_note(path, notes.append))]
    results = folder / "results.jsonl"
    if results.exists():
        # The sweep's own export: what its trials hold already isn't a second measurement.
        known = {r.result.to_json() for r in found if isinstance(r, TrialRecord) and r.result}
        found += [record for record in _read(results, notes) if record.to_json() not in known]
    _take(loaded, folder, found)


def _load_loose(folder: Path, loaded: Loaded) -> None:
    """Files of a folder that is no sweep's; each is a campaign with a baseline of its own."""
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise InputError(f"{folder}: holds neither trials/ nor *.jsonl; {_EXPECTED}.")
    for path in paths:
        try:
            _take(loaded, path, _read(path, loaded.notes))
        except InputError as problem:
            loaded.notes.append(f"passed over: {problem}")


def _take(loaded: Loaded, origin: Path, records: Iterable[Result | TrialRecord]) -> None:
    """Add rows; of a trial recorded several times, the record that the sweep itself keeps."""
    trials = []
    for record in records:
        if isinstance(record, Result):
            loaded.rows.append(Row(record, str(origin)))
        else:
            trials.append(record)
    for trial in by_identity(trials).values():
        if trial.result is not None:
            loaded.rows.append(Row(trial.result, str(origin), trial.planning_ms))
        else:
            loaded.failed.append(trial)


def _read(
    path: Path, notes: list[str], torn: Callable[[str], None] | None = None
) -> list[Result | TrialRecord]:
    """Runs and trials of a file; for `torn` see `read_lines`."""
    unknown: set[str] = set()

    def parse(line: str) -> Result | TrialRecord:
        row = read_json(line)
        if not isinstance(row, dict):
            raise InputError(f"is not a JSON object; {_EXPECTED}.")
        schema = row.get("schema")
        if schema == TRIAL_SCHEMA:
            return TrialRecord.from_record(row)
        if schema != RUN_SCHEMA:
            what = "no schema" if schema is None else f"schema {schema!r}"
            raise InputError(f"a row has {what}; {_EXPECTED}.")
        unknown.update(row.keys() - {"schema", *FIELDS})
        return Result.from_record(row)

    note_read(path)
    found = list(read_lines(path, parse, torn))
    if unknown:
        names = ", ".join(sorted(unknown))
        notes.append(f"{path}: keys that this version doesn't know are passed over: {names}.")
    return found
