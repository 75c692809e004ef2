"""The store of a sweep: a folder that survives kills, and refuses what isn't its own.

    DIR/sweep.json            what is swept (wavealign.sweep/1)
    DIR/trials/WORKER.jsonl   how trials ended (wavealign.trial/1), a file a worker
    DIR/draws.jsonl           what random and tpe searches drew
    DIR/results.jsonl         result rows of all trials that are done, sorted
    DIR/results.parquet       the same, with planning time, where pyarrow is installed

The process that runs the sweep is the only writer: workers may be on machines that don't see the
folder. A record is on disk before it counts as done.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from wavealign._version import __version__
from wavealign.drafts import lock
from wavealign.errors import InputError, WaveAlignError
from wavealign.foreign import shown
from wavealign.outputs import check_folder, check_writable, whole_file
from wavealign.runs.folder import (
    MANIFEST,
    SWEEP_SCHEMA,
    by_identity,
    read_manifest,
    read_records,
    trial_files,
)
from wavealign.runs.lines import append_line, cut_torn_line, read_lines
from wavealign.runs.trial import TrialRecord
from wavealign.structures import Count, json_text, read_json, structured
from wavealign.sweep.export import sort_key, sorted_done, write_parquet

_SAME = {  # what a store must agree on with the sweep that wants to continue it, and its name
    "space": "space", "masks": "masks", "devices": "device profiles", "search": "search",
    "objective": "objective", "belady": "--belady",
}  # fmt: skip
_WHOLE = (MANIFEST, "results.jsonl", "results.parquet")  # files that are replaced
_LOCK = "lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreError(WaveAlignError):
    """The disk refused a write; what was written before is kept."""


class Store:
    """A sweep's folder, opened to write; a context manager that locks it.

    Args:
        folder: made if it isn't there.
        manifest: what is swept: ``space``, ``masks``, ``devices``, ``search``, ``objective``,
            ``belady``; more is kept, and may change.
        note: told of what was repaired.

    Raises:
        InputError: the folder holds another sweep, another version's, or isn't a store; or
            another process writes there.
    """

    def __init__(
        self, folder: str | Path, manifest: dict[str, Any], note: Callable[[str], None]
    ) -> None:
        self.folder = Path(folder)
        described = {"schema": SWEEP_SCHEMA, "version": __version__, **manifest}
        self._manifest = read_json(json_text(described))
        self._note = note
        self._stack = contextlib.ExitStack()
        self.records: dict[str, TrialRecord] = {}
        self.draws = Draws(self.folder / "draws.jsonl")

    def check(self) -> None:
        """Raise where `__enter__` would, without a change to the disk.

        Raises:
            InputError: the folder can't be continued, or written.
        """
        folder = check_folder(self.folder)
        for path in filter(Path.exists, map(folder.joinpath, _WHOLE)):
            check_writable(path)
        if (folder / MANIFEST).exists():
            _check_same(folder, read_manifest(folder), self._manifest)
        elif any(not _is_left(path) for path in folder.rglob("*")):
            raise InputError(
                f"{folder}: isn't empty and holds no sweep ({MANIFEST} is missing); give a new "
                "folder."
            )

    def __enter__(self) -> Store:
        self.check()
        with contextlib.ExitStack() as stack, _disk(self.folder):
            (self.folder / "trials").mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(self.folder / _LOCK))
            self.check()  # nobody has come in between
            for path in filter(Path.exists, [*trial_files(self.folder), self.draws.path]):
                if cut := cut_torn_line(path):
                    self._note(f"{path}: dropped a last line that was cut off ({cut} bytes).")
            with whole_file(self.folder / MANIFEST) as stream:
                stream.write(f"{json_text(self._manifest, indent=1)}\n".encode())
            self.records = by_identity(read_records(self.folder))
            self.draws.read()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def forget_failed(self) -> None:
        """Let failed trials run again; their records stay until they are done."""
        self.records = {k: r for k, r in self.records.items() if r.status != "failed"}

    def append(self, record: TrialRecord) -> None:
        """Keep a record: on disk when this returns.

        Raises:
            StoreError: the disk is full, or refuses for another reason.
        """
        _append(self.folder / "trials" / f"{record.worker}.jsonl", record.to_json())
        self.records[record.spec.named] = record

    def export(self) -> bool:
        """Write the results of all trials that are done; whether Parquet was among them.

        What is on disk counts: an interrupt may have come between a record and its place here.

        Raises:
            StoreError: the disk is full, or refuses for another reason.
        """
        self.records = by_identity(read_records(self.folder))
        records = sorted_done(self.records.values())
        with _disk(self.folder):
            with whole_file(self.folder / "results.jsonl") as stream:
                stream.writelines(f"{r.result.to_json()}\n".encode() for r in records if r.result)
            return write_parquet(self.folder / "results.parquet", records)


class Draws:
    """What a search drew, in the order in which it did (see `wavealign.sweep.search`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.draws: dict[int, dict[str, Any]] = {}

    def add(self, number: int, values: dict[str, Any]) -> None:
        """Keep a draw: on disk when this returns."""
        _append(self.path, json_text({"number": number, "values": values}))
        self.draws[number] = values

    def read(self) -> None:
        """What an earlier run drew."""
        if self.path.exists():
            self.draws |= read_lines(self.path, _draw, torn=lambda _: None)


class _Draw(msgspec.Struct, forbid_unknown_fields=True):
    """A line of ``draws.jsonl``."""

    number: Count
    values: dict[str, Any]


def _draw(line: str) -> tuple[int, dict[str, Any]]:
    row = structured(read_json(line), _Draw, "a draw")
    return row.number, row.values


def read_trials(
    folder: str | Path, note: Callable[[str], None] = lambda _: None
) -> list[TrialRecord]:
    """The trials of a sweep, each once, done or failed, in a fixed order.

    A last line that was cut off by a kill is left out. A trial that failed and was done later is
    done.

    Args:
        folder: of the sweep; it may be running.
        note: told of lines that were left out.

    Raises:
        InputError: there is no sweep, another version's, or a file that was edited.
    """
    read_manifest(Path(folder))
    return sorted(by_identity(read_records(Path(folder), note)).values(), key=sort_key)


def _check_same(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    if found.get("version") != __version__:
        raise InputError(
            f"{folder}: was written by wavealign {found.get('version')}, this is {__version__}; "
            "their results don't belong in one table. Sweep into another folder."
        )
    for key, name in _SAME.items():
        if found.get(key) != wanted[key]:
            raise InputError(
                f"{folder}: holds a sweep of other {name}: "
                f"{_difference(found.get(key), wanted[key])}. Continue with the options that began "
                "it, or sweep into another folder."
            )


def _difference(found: Any, wanted: Any, at: str = "") -> str:
    """The first place where two JSON values differ, in words."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*found, *(k for k in wanted if k not in found)]:
            if found.get(key) != wanted.get(key):
                return _difference(found.get(key), wanted.get(key), f"{at}{key} ")
    return f"{at}there {_short(found)}, here {_short(wanted)}"


def _is_left(path: Path) -> bool:
    """Whether a store may hold this without a manifest: it was killed before it had written it."""
    return path.is_dir() or path.name == _LOCK or path.suffix == ".partial"


def _short(value: Any) -> str:
    return shown(json_text(value, ensure_ascii=False), 120)


def _append(path: Path, line: str) -> None:
    """One line, whole and on disk, or nothing."""
    with _disk(path), path.open("ab", buffering=0) as stream:
        append_line(stream, line, sync=True)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Inside this block an `OSError` is a `StoreError` that names the path."""
    try:
        yield
    except StoreError:
        raise
    except OSError as problem:
        number = getattr(problem.__cause__, "errno", problem.errno)  # of a `WriteError`
        room = "make room and " if number in _NO_ROOM else ""
        raise StoreError(
            f"{path}: can't be written ({problem.strerror or problem}). Finished trials are kept; "
            f"{room}give the same command again."
        ) from problem


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time."""
    with path.open("a") as stream:
        try:
            lock(stream)
        except BlockingIOError as problem:
            raise InputError(
                f"{path.parent}: another process runs a sweep there; wait for it, or give another "
                "folder."
            ) from problem
        yield
