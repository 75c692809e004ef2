"""A sweep's folder as it lies on disk: what was swept, and how its trials ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from wavealign.errors import InputError, said_of
from wavealign.runs.lines import read_lines
from wavealign.runs.trial import TrialRecord
from wavealign.structures import read_json, structured

SWEEP_SCHEMA = "wavealign.sweep/1"
MANIFEST = "sweep.json"


class _Manifest(msgspec.Struct, tag_field="schema", tag=SWEEP_SCHEMA):
    """What readers of a sweep's folder need of its manifest; the sweep itself compares it whole."""

    paths: dict[str, str] = {}


def read_manifest(folder: Path) -> dict[str, Any]:
    """What is swept: ``sweep.json``.

    Raises:
        InputError: there is none, or of another schema.
    """
    path = folder / MANIFEST
    try:
        manifest = read_json(path.read_bytes())
    except FileNotFoundError as problem:
        raise InputError(
            f"{folder}: holds no sweep ({MANIFEST} is missing); expected a folder that "
            "`wavealign sweep --out` wrote."
        ) from problem
    except (OSError, ValueError) as problem:
        raise InputError(f"{path}: can't be read ({problem}).") from problem
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SWEEP_SCHEMA:
        raise InputError(
            f"{path}: has schema {schema!r}; this version reads '{SWEEP_SCHEMA}'. Sweep again into "
            "another folder."
        )
    with said_of(path):
        structured(manifest, _Manifest, "a sweep's manifest")
    return dict(manifest)


def trial_files(folder: Path) -> list[Path]:
    """The records of each worker."""
    return sorted((folder / "trials").glob("*.jsonl"))


def read_records(
    folder: Path, note: Callable[[str], None] = lambda _: None
) -> Iterator[TrialRecord]:
    """Every whole record of every worker; `note` is told of lines that were left out.

    Raises:
        InputError: a file that was edited, or is another version's.
    """
    for path in trial_files(folder):
        yield from read_lines(path, TrialRecord.from_json, torn_note(path, note))


def torn_note(path: Path, note: Callable[[str], None]) -> Callable[[str], None]:
    """Tells of a last line that was left out (see `read_lines`)."""
    return lambda line: note(
        f"{path}: left out a last line that was cut off ({len(line)} characters)."
    )


def by_identity(records: Iterable[TrialRecord]) -> dict[str, TrialRecord]:
    """One record a trial (`Launch.named`): the first that is done, else the last that failed."""
    found: dict[str, TrialRecord] = {}
    for record in records:
        known = found.get(record.spec.named)
        if known is None or known.status == "failed":
            found[record.spec.named] = record
    return found
