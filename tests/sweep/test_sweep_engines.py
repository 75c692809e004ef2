"""Engines under fire: killed sweeps, killed workers, trials that kill their worker."""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import sweep_jobs
from helpers import DATA, ROOT, random_mask

from wavealign.masks import save_mask
from wavealign.sweep import read_trials
from wavealign.sweep import run as run_module
from wavealign.sweep.conditions import resolve_conditions
from wavealign.sweep.engines import make_engine
from wavealign.sweep.engines.job import Job
from wavealign.sweep.export import sorted_done
from wavealign.sweep.masks import find_masks
from wavealign.sweep.run import run_search
from wavealign.sweep.search import GridSearch
from wavealign.sweep.space import make_space
from wavealign.sweep.store import Store
from wavealign.sweep.trial import run_trial

MANIFEST = dict.fromkeys(("space", "masks", "devices", "search", "objective", "belady"))
MASKS = ["xattention_75600.npz", "clip/xattention_75600.npz"]
TWO_HUNDRED = """
policy = ["original", "random", "svd", "nnz", "nnz-wave", "svd+nnz", "lockstep", "nnz/{visits}"]
visits = ["shuffled", "sawtooth", "phased"]
device = ["h100", "a40"]
seed = [0, 1, 2, 3, 4]
heads = "0"
"""  # 10 policies x 2 devices x 5 seeds x 2 masks


def command(*arguments):
    return [str(Path(sys.executable).parent / "wavealign"), "sweep", *map(str, arguments)]


def stored(out):
    """Identities of the trials on disk so far, from whole lines."""
    files = [path.read_text() for path in (out / "trials").glob("*.jsonl")]
    lines = [line for text in files for line in text.splitlines(keepends=True)]
    return [json.loads(line)["id"] for line in lines if line.endswith("\n")]


def wait_for(condition, what, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} in {seconds} s"
        time.sleep(0.05)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with Path(f"/proc/{pid}/stat").open() as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def workers(out):
    return {int(path.stem.rpartition("-")[2]) for path in (out / "trials").glob("*.jsonl")}


def reference(space, patterns):
    """Result rows of an uninterrupted serial run, without any engine or store."""
    baselines, inputs = resolve_conditions(space, find_masks(patterns))
    specs = iter(GridSearch(space, baselines, lambda _: None).ask, None)
    records = [run_trial(s, inputs.masks[s.mask_digest], inputs.devices[s.device]) for s in specs]
    return "".join(r.result.to_json() + "\n" for r in sorted_done(records))


def test_a_sweep_of_200_trials_killed_half_way(tmp_path):
    """SIGKILL of the sweep, and on the way to the end of a worker: every trial once."""
    (tmp_path / "space.toml").write_text(TWO_HUNDRED)
    paths = [str(DATA / name) for name in MASKS]
    out = tmp_path / "s"
    options = ["--space", tmp_path / "space.toml", "--jobs", "2", "--out", out]
    whole = command(*(part for path in paths for part in ("--mask", path)), *options)
    first = subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(stored(out)) >= 100, "hundred trials")
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = stored(out)
    assert 100 <= len(kept) < 200
    assert not (out / "results.jsonl").exists()
    wait_for(lambda: not any(map(alive, workers(out))), "end of the workers")

    before = workers(out)
    second = subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(stored(out)) >= len(kept) + 20, "more trials")
    os.kill(min(workers(out) - before), signal.SIGKILL)
    _, errors = second.communicate(timeout=300)
    assert second.returncode == 0, errors
    found = stored(out)
    assert Counter(found).most_common(1)[0][1] == 1
    assert len(found) == 200
    space = make_space(tomllib.loads(TWO_HUNDRED), {})
    assert (out / "results.jsonl").read_text() == reference(space, paths)


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tmp_path):
    out = tmp_path / "s"
    (tmp_path / "space.toml").write_text(TWO_HUNDRED)
    whole = command("--mask", DATA / MASKS[0], "--space", tmp_path / "space.toml", "--out", out)
    # Ctrl-C on a terminal reaches the whole process group.
    running = subprocess.Popen(
        whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: len(stored(out)) >= 10, "ten trials")
    os.killpg(running.pid, signal.SIGINT)
    output, errors = running.communicate(timeout=300)
    assert running.returncode == 1
    assert "finished trials are kept" in errors
    assert f"wavealign sweep --mask {DATA / MASKS[0]}" in errors
    assert "Traceback" not in errors
    assert output == ""
    assert len((out / "results.jsonl").read_text().splitlines()) == len(stored(out)) >= 10
    assert not any(map(alive, workers(out)))


@pytest.mark.parametrize(
    ("limit_bytes", "word"),
    [(8_000, "Finished trials are kept"), (1_000, "the masks, which workers share")],
)
def test_a_disk_that_refuses_ends_the_sweep_and_keeps_it(tmp_path, limit_bytes, word):
    """A limit on the size of files stands in for a full disk."""
    save_mask(tmp_path / "m.npz", random_mask(shape=(1, 40, 50)))

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    out = tmp_path / "s"
    done = subprocess.run(
        command("--mask", tmp_path / "m.npz", "--jobs", "1", "--out", out),
        capture_output=True, text=True, preexec_fn=limit, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "can't be written" in done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    if out.exists():
        kept = stored(out)
        assert 0 < len(kept) == len(set(kept)) == len(read_trials(out)) < 10
        assert all(p.read_text().endswith("\n") for p in (out / "trials").iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the clusters' libraries, in threads of theirs
@pytest.mark.parametrize("executor", ["local", "ray", "dask"])
def test_workers_that_die(executor, tmp_path, monkeypatch):
    """One trial kills its worker each time, and in the clusters one is killed from outside, too.

    The deadly trial is marked failed after two deaths; all others are done, once, as in a serial
    run.
    """
    if executor != "local":
        pytest.importorskip({"ray": "ray", "dask": "distributed"}[executor])
    table = {
        "policy": ["nnz", "svd", "lockstep", "nnz/shuffled", "nnz/phased"],
        "heads": ["0", "1", "2", "3"],
    }
    space = make_space(table, {})
    paths = [str(DATA / MASKS[0])]
    baselines, inputs = resolve_conditions(space, find_masks(paths))
    deadly = dataclasses.replace(baselines[1], policy="svd")
    doomed = []

    def job(specs, belady):
        return Job(specs, sweep_jobs.kill_the_worker if specs == (deadly,) else None, belady)

    def take(record, ran):
        outside = executor != "local"  # the sweep of 200 trials does that there
        if outside and record.status == "done" and len(store.records) >= 8 and not doomed:
            doomed.append(int(record.worker.rpartition("-")[2]))
            os.kill(doomed[0], signal.SIGKILL)

    monkeypatch.setattr(run_module, "Job", job)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))  # Ray's workers find sweep_jobs
    with (
        Store(tmp_path / "s", MANIFEST, print) as store,
        make_engine(executor, inputs, 2, None) as engine,
    ):
        assert engine.slots == 2
        run_search(GridSearch(space, baselines, print), store, engine, take)
        store.export()
    trials = read_trials(tmp_path / "s")
    assert len(trials) == len(stored(tmp_path / "s")) == 24
    assert bool(doomed) == (executor != "local")
    (failed,) = [record for record in trials if record.status == "failed"]
    assert failed.spec == deadly
    assert "worker died 2 times" in failed.error
    lines = reference(space, paths).splitlines(keepends=True)
    others = [line for line in lines if not _is(line, deadly)]
    assert (tmp_path / "s" / "results.jsonl").read_text() == "".join(others)


def _is(line, spec):
    row = json.loads(line)
    return (row["policy"], row["heads"]) == (spec.policy, spec.heads)
