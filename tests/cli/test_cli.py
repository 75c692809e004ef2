from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import DATA, PROGRAM, random_mask

import wavealign.report.plots
from wavealign.cli import main
from wavealign.errors import MissingCapabilityError
from wavealign.masks import save_mask
from wavealign.order import Schedule, build_schedule
from wavealign.order.policies import DEFAULT_POLICIES

SMALL = ["--l2", "1MiB", "--wave", "8", "--quiet"]


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def rows(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def masks(tmp_path):
    path = tmp_path / "masks.npz"
    save_mask(path, random_mask(shape=(4, 40, 50)))
    return path


def files(tmp_path):
    return sorted(p.name for p in tmp_path.iterdir())


def test_the_table_compares_with_original(masks):
    result = run("sim", "--mask", masks, *SMALL)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "L2      1,048,576 bytes (given) = 16 K/V blocks of 65,536 bytes" in result.stdout
    assert "full model, single regime" in result.stdout
    assert "not calibrated" in result.stdout  # h100, the default
    table = [line for line in lines if line.split("  ")[0] in DEFAULT_POLICIES]
    assert [line.split("  ")[0].strip() for line in table] == list(DEFAULT_POLICIES)
    assert "+0.0 %" in table[0]
    assert "1.000x" in table[0]


def test_original_is_shown_but_no_row_where_nobody_asked(masks, tmp_path):
    out = tmp_path / "runs.jsonl"
    result = run("sim", "--mask", masks, *SMALL, "--policy", "nnz", "--out", out)
    assert "original" in result.stdout
    assert [json.loads(line)["policy"] for line in out.read_text().splitlines()] == ["nnz"]
    assert [
        r["policy"] for r in rows(run("sim", "--mask", masks, *SMALL, "--policy", "nnz", "--json"))
    ] == ["nnz"]


def test_json_and_out_hold_the_same_rows(masks, tmp_path):
    out = tmp_path / "runs.jsonl"
    result = run("sim", "--mask", masks, *SMALL, "--json", "--out", out, "--seed", 5)
    assert result.stdout == out.read_text()
    assert {r["schema"] for r in rows(result)} == {"wavealign.run/1"}
    assert {r["seed"] for r in rows(result)} == {5}
    assert files(tmp_path) == ["masks.npz", "runs.jsonl"]


def test_heads_and_per_head(masks):
    found = rows(
        run(
            "sim",
            "--mask",
            masks,
            *SMALL,
            "--heads",
            "0,2-3",
            "--per-head",
            "--policy",
            "nnz",
            "--json",
        )
    )
    assert [(r["head"], r["heads"]) for r in found] == [
        (None, "0,2-3"), (0, "0"), (2, "2"), (3, "3"),
    ]  # fmt: skip
    text = run("sim", "--mask", masks, *SMALL, "--per-head", "--policy", "nnz").stdout
    assert "Each head launched on its own" in text


def test_any_number_of_threads_gives_the_same_bytes(masks):
    outputs = {
        run("sim", "--mask", masks, *SMALL, "--json", "--per-head", "--jobs", jobs).stdout
        for jobs in (1, 2, 5)
    }
    assert len(outputs) == 1


def test_any_number_of_cores_gives_the_same_bytes():
    """Also where BLAS has more threads, on masks large enough for it to use them."""
    command = [*PROGRAM, "sim", "--mask", DATA / "xattention_75600.npz"]
    command += ["--heads", "1,4", "--policy", "svd+nnz", "--policy", "spectral+nnz", "--json"]
    outputs = set()
    for threads in ("1", "4"):
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(names, threads)}
        done = subprocess.run(command, capture_output=True, check=True, env=environment)
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_schedules_are_scored_beside_policies(masks, tmp_path):
    path = tmp_path / "mine.npz"
    written = run("order", "--mask", masks, "--policy", "lockstep", "--wave", 8, "--out", path)
    assert written.exit_code == 0
    assert "lockstep for 4 heads of 40 x 50 blocks, 8 rows in flight" in written.stdout
    found = rows(
        run("sim", "--mask", masks, *SMALL, "--policy", "lockstep", "--schedule", path, "--json")
    )
    assert [r["policy"] for r in found] == ["lockstep", "mine.npz (lockstep)"]
    assert found[0]["hbm_read_bytes"] == found[1]["hbm_read_bytes"]
    some = rows(
        run(
            "sim",
            "--mask",
            masks,
            *SMALL,
            "--heads",
            "1",
            "--schedule",
            path,
            "--policy",
            "nnz",
            "--json",
        )
    )
    assert some[1]["l2_requested_bytes"] == some[0]["l2_requested_bytes"]


def test_order_json(masks, tmp_path):
    path = tmp_path / "s.npz"
    (row,) = rows(
        run("order", "--mask", masks, "--policy", "nnz", "--heads", "1,2", "--out", path, "--json")
    )
    assert (row["shape"], row["wave"], row["policy"]) == ([2, 40, 50], 132, "nnz")
    assert Schedule.load(path).shape == (2, 40, 50)


def test_plot(masks, tmp_path):
    for name, magic in (("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.pdf", b"%PDF")):
        result = run("sim", "--mask", masks, *SMALL, "--policy", "nnz", "--plot", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert (tmp_path / name).read_bytes().startswith(magic)
    again = tmp_path / "again.png"
    run("sim", "--mask", masks, *SMALL, "--policy", "nnz", "--plot", again)
    assert again.read_bytes() == (tmp_path / "p.png").read_bytes()


def test_plot_without_matplotlib(masks, tmp_path, monkeypatch):
    def absent(module, extra, purpose):
        raise MissingCapabilityError(f"{purpose} needs {module}: pip install 'wavealign[{extra}]'")

    monkeypatch.setattr(wavealign.report.plots, "require", absent)
    result = run("sim", "--mask", masks, "--plot", tmp_path / "p.png")
    assert result.exit_code == 3
    assert "pip install 'wavealign[report]'" in result.stderr
    assert result.stdout == ""


def test_mask_info(masks):
    text = run("mask", "info", masks, "--per-head", "--device", "h200").stdout
    assert "layout: 'mask_packed'" in text
    assert "128x128 tokens (query x K/V; from 'block_size')" in text
    assert "5120 query and 6400 key/value tokens (from 'seq_len')" in text
    assert (
        sum(line.split()[0] in {"all", "0", "1", "2", "3"} for line in text.splitlines() if line)
        == 5
    )
    (row,) = rows(run("mask", "info", masks, "--json"))
    assert row["shape"] == [4, 40, 50]
    assert row["working_set_bytes"] == row["working_set_blocks"] * 65536


def test_lists():
    assert "nnz-bucket+svd" in run("policies").stdout
    assert {r["name"] for r in rows(run("policies", "--json"))} >= {"lockstep", "phased", "+nnz"}
    assert "calibrated" in run("devices").stdout
    found = {r["name"]: r for r in rows(run("devices", "--json"))}
    assert found["h200"]["sources"]["l2_bytes"]


BAD_OPTIONS = {
    "l2 without unit": (["--l2", "50"], "size '50' has no unit"),
    "l2 negative": (["--l2", "-1MB"], "at least one byte"),
    "l2 unknown unit": (["--l2", "5XB"], "unknown unit 'XB'"),
    "l2 nonsense": (["--l2", "much"], "can't be read"),
    "l2 under one block": (["--l2", "60kB"], "smaller than one K/V block of 65536 bytes"),
    "policy": (["--policy", "lockstpe"], "unknown policy 'lockstpe'. Did you mean 'lockstep'?"),
    "visit": (["--policy", "nnz/phase"], "Did you mean 'phased'?"),
    "device": (["--device", "h20"], "unknown device 'h20'. Did you mean 'h200'?"),
    "kernel": (["--kernel", "fa3"], "unknown kernel on h100: 'fa3'. Did you mean 'fa4'?"),
    "dtype": (["--dtype", "bf61"], "unknown dtype 'bf61'. Did you mean 'bf16'?"),
    "head": (["--heads", "4"], "head 4 doesn't exist; there are 4 (valid: 0-3, nearest: 3)"),
    "head range": (["--heads", "3-1"], "runs backwards"),
    "head twice": (["--heads", "1,0-2"], "names a head twice"),
    "head text": (["--heads", "one"], "can't be read at 'one'"),
    "block text": (["--block", "128by64"], "block size '128by64'"),
    "block zero": (["--block", "0x64"], "block size '0x64'"),
    "block against file": (["--block", "64x64"], "128x128, but 64x64 was asked for"),
    "model": (["--model", "fulll"], "unknown model 'fulll'. Did you mean 'full'?"),
    "regime": (["--regime", "steedy"], "unknown regime 'steedy'. Did you mean 'steady'?"),
    "wave": (["--wave", "0"], "0 is not in the range"),
    "seed": (["--seed", "-1"], "-1 is not in the range"),
    "out folder missing": (["--out", "no/such/runs.jsonl"], "doesn't exist"),
    "out is a folder": (["--out", "."], "is a folder"),
    "plot format": (["--plot", "p.bmp"], "expected .png, .svg, .pdf"),
    "plot folder missing": (["--plot", "no/such/p.png"], "doesn't exist"),
    "schedule missing": (["--schedule", "s.npz"], "s.npz: no such file"),
    "key": (["--key", "x"], "nothing named 'x'"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(masks, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    options, text = BAD_OPTIONS[case]
    out = [] if "--out" in options else ["--out", "out.jsonl"]
    result = run("sim", "--mask", masks, *out, *options)
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert result.stderr.count("Error") == 1
    assert result.stdout == ""
    assert files(tmp_path) == ["masks.npz"]


@pytest.mark.parametrize(
    "command", [["sim"], ["order", "--policy", "nnz", "--out", "s.npz"], ["mask", "info"]]
)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "no such file"),
        (b"0101\n", "is not an npz"),
        ("float", "holds 0.5"),
        ("rank", "rank 1"),
        ("bare", "--block"),
    ],
)
def test_bad_masks_stop_every_command(tmp_path, monkeypatch, command, content, text):
    monkeypatch.chdir(tmp_path)
    bare = np.ones((2, 3), dtype=bool)
    arrays = {"float": bare * 0.5, "rank": bare[0], "bare": bare}
    if isinstance(content, bytes):
        (tmp_path / "m.npz").write_bytes(content)
    elif content is not None:
        np.savez(tmp_path / "m.npz", mask=arrays[content])
    before = files(tmp_path)
    block = [] if content == "bare" else ["--block", "128x128"]
    where = ["m.npz"] if command[0] == "mask" else ["--mask", "m.npz"]
    result = run(*command, *where, *block)
    assert result.exit_code == 2, result.output
    assert "m.npz" in result.stderr
    assert text in result.stderr
    assert files(tmp_path) == before


def test_bad_schedules(masks, tmp_path):
    path = tmp_path / "s.npz"
    build_schedule(random_mask(shape=(4, 40, 49)), "nnz", 8).save(path)
    result = run("sim", "--mask", masks, "--schedule", path)
    assert result.exit_code == 2
    assert "s.npz: the schedule is for a mask" in result.stderr


def test_unwritable_order_output_is_found_before_the_work(masks, tmp_path):
    result = run("order", "--mask", masks, "--policy", "nnz", "--out", tmp_path / "no" / "s.npz")
    assert result.exit_code == 2
    assert "doesn't exist" in result.stderr


def test_interrupted_runs_keep_what_had_finished(tmp_path):
    """Ctrl-C while simulating: exit 1, finished rows in the file, nothing partial beside it."""
    out = tmp_path / "runs.jsonl"
    command = [*PROGRAM, "sim", "--mask", DATA / "xattention_363600.npz"]
    command += ["--jobs", "1", "--out", out, *(["--policy", "nnz"] * 400)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    partial = tmp_path / "runs.jsonl.partial"
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    kept = out.read_text().splitlines()
    assert 1 <= len(kept) < 400
    assert f"interrupted after {len(kept)} of 400 runs" in stderr
    assert {json.loads(line)["policy"] for line in kept} == {"nnz"}
    assert files(tmp_path) == ["runs.jsonl"]
