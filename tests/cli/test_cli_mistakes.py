"""What people get wrong at any command: files named twice, full disks, odd terminals."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import resource
import subprocess
import threading
from contextlib import contextmanager

import click
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import PROGRAM, random_mask

import wavealign.drafts
import wavealign.sim.curve
from wavealign.cli import main
from wavealign.cli.failure import Command, Group
from wavealign.cli.paths import Input, Output
from wavealign.errors import InputError, WriteError, unknown_name
from wavealign.masks import save_mask
from wavealign.outputs import whole_file
from wavealign.runs.lines import ResultWriter
from wavealign.sim import simulate
from wavealign.sim.curve import hit_curve

SMALL = ["--l2", "1MiB", "--wave", "8", "--policy", "nnz"]


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def masks(tmp_path):
    path = tmp_path / "masks.npz"
    save_mask(path, random_mask(shape=(2, 40, 50)))
    return path


def commands(group=main):
    for command in group.commands.values():
        yield from commands(command) if isinstance(command, click.Group) else [command]


def test_every_command_refuses_what_the_others_refuse():
    found = list(commands())
    assert len(found) > 15
    assert all(isinstance(command, Command) for command in found)
    for command in found:
        for option in (p for p in command.params if isinstance(p, click.Option)):
            shown = option.make_metavar(click.Context(command))
            if shown in ("FILE", "DIR", "FOLDER", "S.npz"):
                assert isinstance(option.type, Input | Output), (command.name, option.name)
            written = option.name in ("out", "plot", "save_qk", "trace")
            assert written == isinstance(option.type, Output), (command.name, option.name)


@pytest.mark.parametrize(
    "arguments",
    [
        ["sim", "--mask", "{mask}", *SMALL, "--out", "{mask}"],
        ["sim", "--mask", "{mask}", *SMALL, "--out", "{folder}/../{name}/masks.npz"],
        ["order", "--mask", "{mask}", "--policy", "nnz", "--out", "{mask}"],
        ["curve", "--mask", "{mask}", "--policy", "nnz", "--out", "{mask}"],
        ["report", "{mask}", "--out", "{mask}"],
        ["sim", "--mask", "{mask}", *SMALL, "--out", "{folder}/p.png", "--plot", "{folder}/p.png"],
    ],
)
def test_a_command_never_overwrites_what_it_reads(masks, tmp_path, arguments):
    before = masks.read_bytes()
    names = {"mask": masks, "folder": tmp_path, "name": tmp_path.name}
    result = run(*(str(a).format(**names) for a in arguments))
    assert result.exit_code == 2
    assert "would overwrite" in result.output
    assert masks.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["masks.npz"]


def test_only_files_count_as_files(masks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time a file `nnz` is there
        result = run("order", "--mask", masks, "--policy", "nnz", "--out", "nnz")
        assert result.exit_code == 0, result.output


def test_a_mask_may_be_converted_in_place(masks):
    result = run("mask", "convert", masks, masks, "--to", "csr")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["sim", "--mask", "a.npz", "--mask", "b.npz"], "--mask"),
        (["order", "--policy", "nnz", "--policy", "svd", "--mask", "a.npz"], "--policy"),
        (["mask", "info", "a.npz", "--heads", "0", "--heads=1"], "--heads"),
    ],
)
def test_an_option_given_twice_is_refused(arguments, name):
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"{name} is given 2 times; it takes one value." in result.output


def test_flags_and_lists_may_be_given_twice(masks):
    result = run("sim", "--mask", masks, *SMALL, "--policy", "svd", "--json", "--json", "--quiet")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 2


def test_a_script_of_capture_keeps_its_own_options(tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    result = run("capture", "--layers", "0", "--out", tmp_path, script, "--n", "1", "--n", "2")
    assert "given 2 times" not in result.output


@contextmanager
def files_end_at(size_bytes):
    """Every write beyond fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_before_a_full_disk_are_kept_whole(tmp_path):
    row = simulate(random_mask(), policy="nnz", model="fast")
    line = row.to_json() + "\n"
    path = tmp_path / "runs.jsonl"
    with (
        files_end_at(len(line) * 5 // 2),
        pytest.raises(WriteError, match="the 2 rows before are kept"),
        ResultWriter(path) as writer,
    ):
        writer.write([row] * 4)
    assert path.read_text() == 2 * line
    assert [p.name for p in tmp_path.iterdir()] == ["runs.jsonl"]


def test_a_full_disk_before_the_first_row_leaves_nothing(tmp_path):
    row = simulate(random_mask(), policy="nnz", model="fast")
    with (
        files_end_at(10),
        pytest.raises(WriteError, match="nothing was kept"),
        ResultWriter(tmp_path / "runs.jsonl") as writer,
    ):
        writer.write([row])
    assert not list(tmp_path.iterdir())


def test_a_whole_file_on_a_full_disk_leaves_the_old_one(tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"old")
    with files_end_at(10), pytest.raises(WriteError, match="can't be written"):  # noqa: SIM117
        with whole_file(path) as stream:
            stream.write(bytes(100))
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


def test_a_picture_on_a_full_disk_is_an_error_without_a_file(masks, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    with files_end_at(1000):
        result = run("sim", "--mask", masks, *SMALL, "--plot", picture)
    assert result.exit_code == 1
    assert f"Error: {picture}: can't be written" in result.output
    assert not picture.exists()


def program(*arguments, **how):
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        stderr=subprocess.PIPE, check=False, **how,
    )  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110
def test_a_full_stdout_is_an_error():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        result = program("policies", stdout=full)
    assert result.returncode == 1
    assert result.stderr == b"Error: no space left; the output is cut off.\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_may_lack_characters(encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    result = program("policies", stdout=subprocess.PIPE, env=environment)
    assert result.returncode == 0, result.stderr
    assert rb"\u03c3" in result.stdout


def test_names_of_files_need_not_be_text(masks, tmp_path):
    pytest.importorskip("jinja2")
    odd = tmp_path / os.fsdecode(b"m\xff.npz")
    try:
        masks.rename(odd)
    except OSError:
        pytest.skip("this file system takes no such name")
    rows = tmp_path / "rows.jsonl"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    for arguments in (
        ["sim", "--mask", odd, *SMALL, "--quiet", "--out", rows],
        ["report", rows, "-o", tmp_path / "page.html"],
    ):
        result = program(*arguments, stdout=subprocess.PIPE, env=environment)
        assert result.returncode == 0, result.stderr
    (tmp_path / "page.html").read_text(encoding="utf-8")


def test_small_launches_have_figures_to_read(tmp_path):
    path = tmp_path / "small.npz"
    save_mask(path, random_mask(shape=(1, 8, 8)))
    (row,) = [
        json.loads(line)
        for line in run("sim", "--mask", path, "--policy", "original", "--json").stdout.splitlines()
    ]
    shown = run("sim", "--mask", path, "--policy", "original").stdout
    table = next(line for line in shown.splitlines() if line.startswith("original"))
    assert f"{row['hbm_read_bytes'] / 1e3:.2f} kB" in table
    read_ms = float(table.split(" kB")[-1].split(" ms")[0])
    assert read_ms == pytest.approx(row["time_ms"], rel=0.01)
    assert f"Requested {row['l2_requested_bytes'] / 1e6:.2f} MB" in shown
    joules = float(shown.split("takes ")[1].split(" J")[0])
    assert joules == pytest.approx(row["energy_j"], rel=0.01)


def test_sizes_of_a_curve_can_be_told_apart(tmp_path):
    path = tmp_path / "row.npz"
    save_mask(path, random_mask(shape=(1, 1, 64), block=(64, 64)))
    lines = run("curve", "--mask", path, "--policy", "nnz").stdout.splitlines()
    sizes = [line.split("iB")[0] for line in lines if "iB " in line]
    assert len(sizes) > 10
    assert len(set(sizes)) == len(sizes)


def test_the_guard_has_no_negative_zero(masks):
    shown = run("guard", "--mask", masks).stdout
    assert "of planning (" in shown
    assert "-0.0%" not in shown


def test_one_of_several_arrays_can_be_chosen(tmp_path):
    path = tmp_path / "two.npz"
    np.savez(path, first=np.ones((2, 3), bool), second=np.ones((4, 5), bool))
    found = run("mask", "info", path, "--block", "64")
    assert found.exit_code == 2
    assert "Choose one with --key, e.g. --key first." in found.output
    assert run("mask", "info", path, "--block", "64", "--key", "first").exit_code == 0


def test_a_pickle_is_refused_in_one_line(tmp_path, recwarn):
    torch = pytest.importorskip("torch")
    path = tmp_path / "raw.pt"
    path.write_bytes(pickle.dumps(torch.zeros(2, 2, dtype=torch.bool), protocol=4))
    found = run("mask", "info", path)
    assert found.exit_code == 2
    assert found.output.count("\n") == 1
    assert not [w for w in recwarn if "pickle" in str(w.message)]


def test_the_beginning_of_a_name_is_recognised():
    assert "Did you mean 'xattention'?" in str(
        unknown_name("method", "xatt", ["exact", "xattention"])
    )


def test_two_processes_never_write_into_one_file(tmp_path):
    row = simulate(random_mask(), policy="nnz", model="fast")
    path = tmp_path / "runs.jsonl"
    with ResultWriter(path) as first:
        first.write([row])
        with pytest.raises(InputError, match="another process writes it"), ResultWriter(path):
            pass
        first.write([row])
    assert path.read_text() == 2 * (row.to_json() + "\n")
    with ResultWriter(path) as again:
        again.write([row])
    assert path.read_text() == row.to_json() + "\n"
    assert [p.name for p in tmp_path.iterdir()] == ["runs.jsonl"]


def test_rows_that_a_killed_process_left_are_no_obstacle(tmp_path):
    (tmp_path / "runs.jsonl.partial").write_text("old\n")
    row = simulate(random_mask(), policy="nnz", model="fast")
    with ResultWriter(tmp_path / "runs.jsonl") as writer:
        writer.write([row])
    assert (tmp_path / "runs.jsonl").read_text() == row.to_json() + "\n"
    assert (tmp_path / "runs.jsonl.partial").read_text() == "old\n"


def test_a_file_system_without_locks_is_written(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(wavealign.drafts.fcntl, "flock", refuse)
    row = simulate(random_mask(), policy="nnz", model="fast")
    with ResultWriter(tmp_path / "runs.jsonl") as writer:
        writer.write([row])
    assert (tmp_path / "runs.jsonl").read_text() == row.to_json() + "\n"


def failing(problem):
    @click.command(cls=Command)
    def work():
        raise problem

    group = Group("group")
    group.add_command(work)
    return CliRunner().invoke(group, ["work"])


def test_an_interrupt_inside_a_kernel_is_one():
    inner, outer = SystemError("unpickle"), SystemError("CPUDispatcher")
    inner.__cause__, outer.__cause__ = KeyboardInterrupt(), inner
    result = failing(outer)
    assert result.exit_code == 1
    assert result.output.strip() == "Aborted!"
    assert isinstance(failing(SystemError("something else")).exception, SystemError)


def test_too_little_memory_is_an_error():
    result = failing(MemoryError("Allocation failed"))
    assert result.exit_code == 1
    assert "Error: not enough memory (Allocation failed)" in result.output


@pytest.mark.parametrize("columns", ["20", "60", "80", "200"])
def test_a_narrow_terminal_cuts_no_figure(masks, columns):
    """Below the table's width lines break, and every cell is there."""
    wide = run("sim", "--mask", masks, *SMALL, "--quiet").stdout.splitlines()
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": columns}
    result = program(
        "sim", "--mask", masks, *SMALL, "--quiet", stdout=subprocess.PIPE, env=environment
    )
    shown = re.sub("\x1b\\[[0-9;]*m", "", result.stdout.decode())
    assert "…" not in shown
    for row in (line for line in wide if line.startswith(("policy", "original", "nnz"))):
        assert " ".join(row.split()) in " ".join(shown.split())


def test_a_curve_is_replayed_off_the_main_thread(masks, monkeypatch):
    """There Ctrl-C, which arrives in the main thread, can't crash inside a numba kernel."""
    threads = []

    def watched(*arguments):
        threads.append(threading.current_thread())
        return hit_curve(*arguments)

    monkeypatch.setattr(wavealign.sim.curve, "hit_curve", watched)
    assert run("curve", "--mask", masks, "--policy", "nnz").exit_code == 0
    assert threads
    assert threading.main_thread() not in threads
