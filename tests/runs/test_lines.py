"""JSON lines: whole or not at all, and what is read of a file that a kill left."""

from __future__ import annotations

import io
import os

import pytest
from helpers import run_result, trial, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.errors import InputError
from wavealign.runs.files import load_rows
from wavealign.runs.folder import read_manifest, read_records
from wavealign.runs.lines import append_line, cut_torn_line, read_lines


def number(line):
    if not line.strip().isdigit():
        raise InputError("isn't a number.")
    return int(line)


@pytest.mark.parametrize("sync", [False, True])
def test_a_line_that_cannot_be_finished_leaves_the_file_as_it_was(tmp_path, monkeypatch, sync):
    class HalfWritten(io.FileIO):
        def write(self, data):
            if self.tell() > 2 and not sync:
                raise OSError(28, "No space left on device")
            return super().write(data[:2])

    def full(_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a"
    path.write_bytes(b"1\n")
    if sync:
        monkeypatch.setattr("os.fsync", full)
    with HalfWritten(path, "a") as stream, pytest.raises(OSError, match="No space"):
        append_line(stream, "22222", sync)
    assert path.read_bytes() == b"1\n"
    monkeypatch.undo()
    with io.FileIO(path, "a") as stream:
        append_line(stream, "3", sync)
    assert list(read_lines(path, number)) == [1, 3]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5), st.data())
def test_a_file_cut_anywhere_gives_its_whole_lines(tmp_path_factory, values, data):
    path = tmp_path_factory.mktemp("cut") / "a"
    whole = b"".join(b"%d\n" % value for value in values)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    ends = [i + 1 for i, byte in enumerate(whole[:cut]) if byte == ord("\n")]
    kept, torn = values[: len(ends)], cut - (ends[-1] if ends else 0)
    notes = []
    assert list(read_lines(path, number, notes.append)) == kept
    assert [len(line) for line in notes] == [torn] * bool(torn)
    assert cut_torn_line(path) == torn
    assert cut_torn_line(path) == 0
    assert list(read_lines(path, number)) == kept


def test_a_line_that_says_nothing_and_one_that_is_wrong(tmp_path):
    path = tmp_path / "a"
    path.write_text("1\n\n2\nx\n3")
    found = read_lines(path, number)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(InputError, match=r"a: line 4: isn't a number"):
        next(found)
    path.write_bytes(b"1\n2\xc3")
    notes = []
    assert list(read_lines(path, number, notes.append)) == [1]
    with pytest.raises(InputError, match=r"a: can't be read .*utf-8"):
        list(read_lines(path, number))


def test_sweep_and_report_read_the_same_trials(tmp_path):
    """Also where only the end of the last line is missing: the sweep will run that trial again."""
    done = [trial(run_result(policy=p)) for p in ("original", "nnz")]
    path = write_lines(tmp_path / "s/trials/w.jsonl", done)
    os.truncate(path, path.stat().st_size - 1)
    assert [r.spec.policy for r in read_records(tmp_path / "s")] == ["original"]
    loaded = load_rows([tmp_path / "s"])
    assert [row.result.launch.policy for row in loaded.rows] == ["original"]
    assert "left out a last line that was cut off" in loaded.notes[0]


@pytest.mark.parametrize(("text", "message"), [
    (None, "holds no sweep"), ("{", "can't be read"), ("[]", "has schema None"),
    ('{"schema": "wavealign.sweep/0"}', "this version reads 'wavealign.sweep/1'"),
])  # fmt: skip
def test_folders_that_are_no_sweep(tmp_path, text, message):
    if text is not None:
        (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_manifest(tmp_path)
