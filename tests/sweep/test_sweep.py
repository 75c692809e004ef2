"""Sweeps: spaces, conditions, searches, the store, finalists, and the command's bad input."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import random_mask

from wavealign.cli import main
from wavealign.errors import InputError, MissingCapabilityError
from wavealign.masks import load_mask, save_mask
from wavealign.order import build_schedule
from wavealign.runs.baseline import best_by_condition
from wavealign.runs.result import Result
from wavealign.runs.trial import TrialRecord
from wavealign.sim.devices import load_device, profile_toml
from wavealign.sim.setup import Setup
from wavealign.sim.simulate import run_schedule
from wavealign.sweep import gpu_phase as gpu_phase_module
from wavealign.sweep import read_trials
from wavealign.sweep.conditions import resolve_conditions
from wavealign.sweep.engines.job import Engine, Job, run_job
from wavealign.sweep.finalists import Card, finalists, launches, measured_spec
from wavealign.sweep.masks import find_masks
from wavealign.sweep.run import run_search
from wavealign.sweep.search import make_search
from wavealign.sweep.space import Range, load_table, make_space
from wavealign.sweep.store import Store, StoreError
from wavealign.sweep.trial import run_trial

MANIFEST = dict.fromkeys(("space", "masks", "devices", "search", "objective", "belady"))


@pytest.fixture
def masks(tmp_path):
    folder = tmp_path / "masks"
    folder.mkdir()
    for seed, name in enumerate("ab"):
        save_mask(folder / f"{name}.npz", random_mask(seed, shape=(3, 40, 50)))
    return folder


class InProcess(Engine):
    """An engine without processes: what a serial sweep does, and nothing else."""

    def __init__(self, inputs, slots=1, order=0):
        self.inputs, self.slots, self.order, self.jobs = inputs, slots, order, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, job):
        self.jobs.append(job)

    def next(self):
        job = self.jobs.pop(self.order)
        spec = job.specs[0]
        mask = self.inputs.masks[spec.mask_digest]
        return run_job(job, mask, self.inputs.devices.get(spec.device))


def conditions(masks, table=None, patterns=None):
    space = make_space(table or {}, {})
    return space, *resolve_conditions(space, find_masks(patterns or [str(masks)]))


def sweep(folder, masks, table, kind="grid", trials=None, seed=0, stop=None, slots=1, order=0):
    """Run a sweep in this process; `stop` interrupts it after so many trials."""
    space, baselines, inputs = conditions(masks, table)
    store = Store(folder, MANIFEST, lambda _: None)
    search = make_search(space, baselines, kind, trials, seed, "time", store.draws, lambda _: None)
    seen = []

    def take(record, ran):
        seen.append((record, ran))
        if stop is not None and len(seen) == stop:
            raise KeyboardInterrupt

    with store:
        try:
            run_search(search, store, InProcess(inputs, slots, order), take)
        except KeyboardInterrupt:
            assert stop is not None
        store.export()
    return seen


# Spaces


def test_a_template_varies_over_its_own_parameters_alone():
    table = {"policy": ["nnz", "{rows}/shuffled", "svd+nnz"], "rows": ["svd", "nnz"]}
    space = make_space(table, {})
    assert list(space.grid(8, 0)) == ["nnz", "svd/shuffled", "nnz/shuffled", "svd+nnz"]
    assert space.parameters_of("nnz") == []


def test_wave_and_seed_of_the_trial_stand_in_templates(monkeypatch):
    import wavealign.sweep.space as module

    parsed = []
    policy = type("P", (), {})

    def parse(text):
        parsed.append(text)
        found = policy()
        found.name = text
        return found

    monkeypatch.setattr(module, "parse_policy", parse)
    space = make_space(
        {"policy": ["svd+nnz(rank={rank},wave={wave})/s(seed={seed})"], "rank": [4]}, {}
    )
    assert list(space.grid(132, 3)) == ["svd+nnz(rank=4,wave=132)/s(seed=3)"]


def test_a_single_value_is_a_list_of_one():
    space = make_space({"policy": "nnz", "device": "a40", "wave": 8, "heads": 0, "l2": "1MiB"}, {})
    assert space.policies == ("nnz",)
    assert space.axes["l2"] == (2**20,)
    assert space.axes["heads"] == ("0",)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"devices": ["h100"]}, ["unknown key 'devices'", "Did you mean 'device'"]),
        ({"policy": ["nnz"], "rank": [1]}, ["unknown key 'rank'", "needs a policy that names it"]),
        ({"device": []}, ["'device' is empty"]),
        ({"policy": []}, ["'policy' is empty"]),
        ({"policy": ["svd{x}"], "x": []}, ["'x' is empty"]),
        ({"policy": ["svd{x}"]}, ["names {x}, which has no values", "x = [...]"]),
        ({"policy": ["svd{x"]}, ["can't be read"]),
        ({"policy": ["svd{}"]}, ["expected a parameter's name"]),
        ({"policy": [3]}, ["3 is not a string"]),
        ({"policy": ["nzz"]}, ["unknown policy 'nzz'", "nnz"]),
        ({"policy": ["{x}"], "x": ["nnz", "svdd"]}, ["makes 'svdd'", "svd"]),
        ({"wave": [0]}, ["wave has 0", "from 1"]),
        ({"wave": [True]}, ["wave has True"]),
        ({"seed": [-1]}, ["seed has -1"]),
        ({"device": [7]}, ["device has 7", "strings"]),
        ({"l2": ["50"]}, ["has no unit"]),
        ({"wave": {"low": 1, "high": 3}}, ["'wave' is a range; only parameters"]),
        ({"policy": ["{x}"], "x": {"low": 1}}, ["expected numbers low and high"]),
        ({"policy": ["{x}"], "x": {"low": 1, "hihg": 2}}, ["'hihg'", "Did you mean 'high'"]),
        ({"policy": ["{x}"], "x": {"low": 3, "high": 1}}, ["from 3 to 1"]),
        ({"policy": ["{x}"], "x": {"low": 0, "high": 1, "log": True}}, ["above 0"]),
        ({"policy": ["{x}"], "x": [[1]]}, ["expected numbers or strings"]),
    ],
)
def test_bad_spaces(table, words):
    with pytest.raises(InputError) as caught:
        make_space(table, {}, "space.toml")
    for word in words:
        assert word in str(caught.value)


def test_an_axis_is_named_in_one_place():
    with pytest.raises(InputError, match="by --device too"):
        make_space({"device": ["h100"]}, {"device": ["a40"]}, "space.toml")


def test_space_files_that_can_not_be_read(tmp_path):
    (tmp_path / "bad.toml").write_text("policy = [")
    with pytest.raises(InputError, match="is not TOML"):
        load_table(str(tmp_path / "bad.toml"))
    with pytest.raises(InputError, match="can't be read"):
        load_table(str(tmp_path / "none.toml"))


# Masks and conditions


def test_files_folders_and_globs(masks, tmp_path):
    notes = []
    (masks / "notes.txt").write_text("no mask")
    np.savez(masks / "other.npz", x=np.zeros(3), y=np.zeros(2))
    found = find_masks([str(masks)], note=notes.append)
    assert [mask.name for mask in found] == ["a", "b"]
    assert len(notes) == 1
    assert "left out, not a mask" in notes[0]
    assert [m.name for m in find_masks([f"{masks}/[ab].npz"])] == ["a", "b"]
    assert [m.name for m in find_masks([str(masks / "b.npz"), str(masks / "[a].npz")])] == [
        "b",
        "a",
    ]
    with pytest.raises(InputError, match=r"other\.npz"):
        find_masks([f"{masks}/*.npz"])
    with pytest.raises(InputError, match="matches no file"):
        find_masks([f"{masks}/c*.npz"])
    with pytest.raises(InputError, match="holds no mask file"):
        find_masks([str(tmp_path)])
    with pytest.raises(InputError, match="no such file"):
        find_masks([str(tmp_path / "none.npz")])


def test_names_tell_files_apart_and_equal_masks_run_once(masks, tmp_path):
    other = tmp_path / "more"
    other.mkdir()
    save_mask(other / "a.npz", random_mask(7, shape=(1, 20, 20)))
    save_mask(other / "copy.npz", load_mask(masks / "a.npz").mask)
    notes = []
    found = find_masks([str(masks), str(other)], note=notes.append)
    assert [mask.name for mask in found] == ["masks/a", "b", "more/a"]
    assert len(notes) == 1
    assert "the same mask as" in notes[0]


def test_heads_each_all_and_lists(masks):
    _, baselines, inputs = conditions(
        masks, {"heads": ["all", "each", "0,2"]}, [str(masks / "a.npz")]
    )
    assert [spec.heads for spec in baselines] == ["0-2", "0", "1", "2", "0,2"]
    assert {s.mask_digest for s in baselines} == inputs.masks.keys()
    whole = load_mask(masks / "a.npz").mask
    assert inputs.masks[baselines[2].mask_digest].digest == whole.select_heads([1]).digest
    with pytest.raises(InputError, match=r"a\.npz.*head 5 doesn't exist"):
        conditions(masks, {"heads": "5"})


def test_equal_conditions_run_once(masks):
    notes = []
    h100 = load_device("h100")
    space = make_space({"wave": ["default", h100.sms, 8], "l2": ["1MB", "1000kB"]}, {})
    baselines, _ = resolve_conditions(space, find_masks([str(masks)]), note=notes.append)
    assert len(baselines) == 2 * 2  # masks x waves
    assert notes == ["8 conditions are the same as others; each runs once."]


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"device": ["h10"]}, "unknown device 'h10'"),
        ({"kernel": ["fa4"], "device": ["h100", "a40"]}, "unknown kernel on a40: 'fa4'"),
        ({"model": ["slow"]}, "unknown model"),
        ({"regime": ["hot"]}, "unknown regime"),
        ({"l2": ["1kB"]}, "smaller than one"),
    ],
)
def test_conditions_that_can_not_be(masks, table, word):
    with pytest.raises(InputError, match=word):
        conditions(masks, table)


def test_energy_is_not_promised_where_it_is_not_known(masks):
    space = make_space({"device": ["a40"]}, {})
    with pytest.raises(InputError, match="power budget of 'a40' isn't known"):
        resolve_conditions(space, find_masks([str(masks)]), "energy")


# Trials


def test_a_trial_is_what_the_simulator_says(masks):
    _, (spec, *_), inputs = conditions(masks, {"wave": 8, "l2": "2MiB", "seed": 3})
    spec = dataclasses.replace(spec, policy="random/shuffled")
    mask = inputs.masks[spec.mask_digest]
    record = run_trial(spec, mask, load_device("h100"))
    setup = Setup.make("h100", l2_bytes=2**21, wave=8)
    expected = run_schedule(
        mask, build_schedule(mask, spec.policy, 8, 3), setup, seed=3, name="a", heads="0-2"
    )
    assert record.result == expected
    assert (record.status, record.error) == ("done", None)
    assert TrialRecord.from_json(record.to_json()) == record
    belady = run_trial(spec, mask, load_device("h100"), belady=True).result
    assert 0 < belady.belady_bytes <= expected.hbm_read_bytes
    assert belady.replaced(belady_bytes=None) == expected


def test_a_trial_that_fails_says_why(masks):
    _, (spec, *_), inputs = conditions(masks)
    spec = dataclasses.replace(spec, policy="nzz")
    record = run_trial(spec, inputs.masks[spec.mask_digest], load_device("h100"))
    assert (record.status, record.result) == ("failed", None)
    assert record.error.startswith("InputError: unknown policy 'nzz'")


# Searches


def test_a_grid_runs_every_combination_once_and_original_always(masks, tmp_path):
    notes = []
    space, baselines, _ = conditions(masks, {"policy": ["nnz", "nnz", "{r}", "svd"], "r": ["nnz"]})
    search = make_search(space, baselines, "grid", None, 0, "time", None, notes.append)
    specs = list(iter(search.ask, None))
    assert [s.policy for s in specs] == ["original", "original", "nnz", "svd", "nnz", "svd"]
    assert search.total == 6
    assert notes == ["4 combinations are the same as others; each runs once."]


def test_a_grid_can_not_go_through_a_range(masks):
    space, baselines, _ = conditions(masks, {"policy": ["{p}"], "p": ["nnz"]})
    ranged = dataclasses.replace(space, parameters={"p": Range(1, 5)})
    with pytest.raises(InputError, match="a grid can't go through"):
        make_search(ranged, baselines, "grid", None, 0, "time", None, print)
    with pytest.raises(InputError, match="a grid runs all of it"):
        make_search(space, baselines, "grid", 5, 0, "time", None, print)
    with pytest.raises(InputError, match="needs --trials"):
        make_search(space, baselines, "tpe", None, 0, "time", None, print)


POLICIES = {"policy": ["original", "random", "svd", "nnz", "nnz-wave", "{rows}/{visits}"],
            "rows": ["nnz", "svd+nnz", "nnz-dealt"],
            "visits": ["shuffled", "sawtooth", "phased", "shuffled+phased"],
            "wave": 8, "l2": "1MiB"}  # fmt: skip


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_a_drawn_search_that_was_interrupted_goes_on_as_if_it_had_not(masks, tmp_path, kind):
    pytest.importorskip("optuna")
    whole = sweep(tmp_path / "whole", masks, POLICIES, kind, 50, seed=4)
    first = sweep(tmp_path / "cut", masks, POLICIES, kind, 50, seed=4, stop=21)
    rest = sweep(tmp_path / "cut", masks, POLICIES, kind, 50, seed=4)
    ran = [r.spec.identity for r, ran in [*first, *rest] if ran]
    assert len(set(ran)) == len(ran)
    assert ran == [r.spec.identity for r, _ in whole]
    for name in ("results.jsonl", "draws.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    other = sweep(tmp_path / "other", masks, POLICIES, kind, 50, seed=5)
    assert [r.spec.identity for r, _ in other] != ran


def test_a_parallel_search_keeps_its_trials_over_an_interruption(masks, tmp_path):
    pytest.importorskip("optuna")
    first = sweep(tmp_path / "s", masks, POLICIES, "tpe", 50, stop=25, slots=3, order=-1)
    rest = sweep(tmp_path / "s", masks, POLICIES, "tpe", 50, slots=3, order=-1)
    ran = [r.spec.identity for r, ran in [*first, *rest] if ran]
    assert len(set(ran)) == len(ran)
    assert {r.spec.identity for r in read_trials(tmp_path / "s")} == set(ran)
    assert len((tmp_path / "s" / "draws.jsonl").read_text().splitlines()) == 50


def test_tpe_learns(masks, tmp_path):
    """After the random start TPE draws the better half of the space more often than chance."""
    pytest.importorskip("optuna")
    table = {
        "policy": ["{rows}/{visits}"],
        "rows": ["random", "original", "nnz", "svd+nnz"],
        "visits": ["ascending", "shuffled", "sawtooth", "phased"],
        "wave": 8,
        "l2": "1MiB",
    }
    records = sweep(tmp_path / "s", masks, table, "tpe", 120)
    draws = [json.loads(line) for line in (tmp_path / "s" / "draws.jsonl").read_text().splitlines()]
    value = {(r.spec.mask, r.spec.policy): r.result.time_ms for r, _ in records}
    mean = {m: np.mean([v for (n, _), v in value.items() if n == m]) for m in "ab"}
    better = [
        value["ab"[d["number"] % 2], "{rows}/{visits}".format(**d["values"])]
        < mean["ab"[d["number"] % 2]]
        for d in draws
    ]
    assert np.mean(better[60:]) > 0.7


def test_fewer_draws_than_conditions(masks):
    pytest.importorskip("optuna")
    space, baselines, _ = conditions(masks)
    with pytest.raises(InputError, match="fewer than the 2 conditions"):
        make_search(space, baselines, "random", 1, 0, "time", None, print)


def test_ranges_are_drawn_within_their_bounds(masks, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    import wavealign.sweep.space as module

    named = type("P", (), {})

    def parse(text):
        found = named()
        found.name = text
        return found

    monkeypatch.setattr(module, "parse_policy", parse)
    table = {
        "policy": ["p({k},{x},{g})"],
        "k": {"low": 2, "high": 8, "step": 2},
        "x": {"low": 0.5, "high": 1.0},
        "g": {"low": 1, "high": 1000, "log": True},
    }
    space, baselines, _ = conditions(masks, table)
    log = Store(tmp_path / "s", MANIFEST, print).draws
    (tmp_path / "s").mkdir()
    search = make_search(space, baselines, "random", 60, 0, "time", log, print)
    drawn = [eval(s.policy[1:]) for s in iter(search.ask, None) if s.policy != "original"]
    assert {k for k, _, _ in drawn} == {2, 4, 6, 8}
    assert all(0.5 <= x <= 1.0 and len(f"{x}") <= 8 for _, x, _ in drawn)
    assert 0.2 < np.mean([g < 32 for _, _, g in drawn]) < 0.8


# The store


@pytest.fixture
def records(masks):
    _, baselines, inputs = conditions(masks, {"wave": 8, "l2": "1MiB"})
    specs = [dataclasses.replace(b, policy=p) for b in baselines for p in ("original", "nnz")]
    return [run_trial(s, inputs.masks[s.mask_digest], load_device("h100")) for s in specs]


def test_what_is_stored_is_read_and_exported_in_one_order(records, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, order in (("x", records), ("y", records[::-1])):
        with Store(tmp_path / name, MANIFEST, print) as store:
            for k, record in enumerate(order):
                store.append(dataclasses.replace(record, worker=f"w{k % 2}"))
            assert store.export()
    results = (tmp_path / "x" / "results.jsonl").read_bytes()
    assert results == (tmp_path / "y" / "results.jsonl").read_bytes()
    rows = [Result.from_json(line) for line in results.decode().splitlines()]
    assert rows == [record.result for record in read_trials(tmp_path / "x")]
    assert [(r.mask, r.policy) for r in rows] == [
        ("a", "nnz"), ("a", "original"), ("b", "nnz"), ("b", "original")
    ]  # fmt: skip
    table = parquet.read_table(tmp_path / "x" / "results.parquet").to_pylist()
    assert [row["time_ms"] for row in table] == [row.time_ms for row in rows]
    assert [row["hbm_read_bytes"] for row in table] == [row.hbm_read_bytes for row in rows]
    assert all(row["planning_ms"] > 0 and row["energy_j"] is not None for row in table)
    assert sorted(p.name for p in (tmp_path / "x" / "trials").iterdir()) == ["w0.jsonl", "w1.jsonl"]


def test_a_torn_last_line_is_dropped_and_said_so(records, tmp_path):
    notes = []
    with Store(tmp_path / "s", MANIFEST, print) as store:
        for record in records[:3]:
            store.append(dataclasses.replace(record, worker="w"))
    path = tmp_path / "s" / "trials" / "w.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert len(read_trials(tmp_path / "s", notes.append)) == 2
    assert "left out a last line that was cut off" in notes[0]
    with Store(tmp_path / "s", MANIFEST, notes.append) as store:
        assert "dropped a last line" in notes[1]
        assert len(store.records) == 2
        store.append(dataclasses.replace(records[2], worker="w"))
    assert len(read_trials(tmp_path / "s", notes.append)) == 3
    assert len(notes) == 2


def test_a_failed_trial_may_be_done_later(records, tmp_path):
    done = records[0]
    bad = dataclasses.replace(done, status="failed", result=None, error="X: y", worker="z")
    with Store(tmp_path / "s", MANIFEST, print) as store:
        store.append(bad)
    with Store(tmp_path / "s", MANIFEST, print) as store:
        assert store.records[done.spec.named].status == "failed"
        store.forget_failed()
        assert store.records == {}
        store.append(done)
    assert read_trials(tmp_path / "s") == [done]


def test_stores_that_are_refused(records, tmp_path):
    folder = tmp_path / "s"
    with Store(folder, {**MANIFEST, "search": {"kind": "tpe", "seed": 0}}, print) as store:
        store.append(records[0])
    path = folder / "sweep.json"
    text = path.read_text()
    with (
        pytest.raises(InputError, match=r"other search: seed there 0, here 1\. Continue"),
        Store(folder, {**MANIFEST, "search": {"kind": "tpe", "seed": 1}}, print),
    ):
        pass
    path.write_text(text.replace('"version": "', '"version": "0.0.0+'))
    with pytest.raises(InputError, match=r"written by wavealign 0\.0\.0"):
        Store(folder, MANIFEST, print).check()
    path.write_text(text.replace("wavealign.sweep/1", "wavealign.sweep/2"))
    with pytest.raises(InputError, match=r"has schema 'wavealign\.sweep/2'"):
        read_trials(folder)
    path.write_text("{")
    with pytest.raises(InputError, match="can't be read"):
        read_trials(folder)
    path.write_text(text)
    trials = next((folder / "trials").iterdir())
    line = trials.read_text()
    trials.write_text(line.replace('"policy": "original"', '"policy": "nnz"', 1))
    with pytest.raises(InputError, match=r"line 1: trial .* the file was edited"):
        read_trials(folder)
    trials.write_text(line.replace("wavealign.trial/1", "wavealign.trial/0"))
    with pytest.raises(InputError, match=r"not of schema 'wavealign\.trial/1'"):
        read_trials(folder)
    with pytest.raises(InputError, match="holds no sweep"):
        read_trials(tmp_path)
    with pytest.raises(InputError, match="isn't empty and holds no sweep"):
        Store(tmp_path, MANIFEST, print).check()
    with pytest.raises(InputError, match="is a file"):
        Store(trials, MANIFEST, print).check()


def test_one_writer_at_a_time(tmp_path):
    with (
        Store(tmp_path / "s", MANIFEST, print),
        pytest.raises(InputError, match="another process runs a sweep there"),
        Store(tmp_path / "s", MANIFEST, print),
    ):
        pass
    with Store(tmp_path / "s", MANIFEST, print):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_keeps_what_is_there(records, tmp_path):
    with Store(tmp_path / "s", MANIFEST, print) as store:
        store.append(records[0])
        (tmp_path / "s" / "trials" / "full.jsonl").symlink_to("/dev/full")
        with pytest.raises(StoreError, match=r"No space left on device.*Finished trials are kept"):
            store.append(dataclasses.replace(records[1], worker="full"))
        (tmp_path / "s" / "trials" / "full.jsonl").unlink()
    assert read_trials(tmp_path / "s") == [records[0]]


def test_a_write_that_stops_half_way_leaves_no_half_line(records, tmp_path, monkeypatch):
    with Store(tmp_path / "s", MANIFEST, print) as store:
        store.append(dataclasses.replace(records[0], worker="w"))
        before = (tmp_path / "s" / "trials" / "w.jsonl").read_bytes()

        def full(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(StoreError):
            store.append(dataclasses.replace(records[1], worker="w"))
        monkeypatch.undo()
        assert (tmp_path / "s" / "trials" / "w.jsonl").read_bytes() == before
        store.append(dataclasses.replace(records[1], worker="w"))
    assert len(read_trials(tmp_path / "s")) == 2


# What comes out


def test_the_best_of_a_condition_is_the_lowest(records):
    best = best_by_condition(records, "hbm_read_bytes")
    assert [c.mask for c in best] == ["a", "b"]
    for condition, (found, base) in best.items():
        rows = [r for r in records if r.spec.mask == condition.mask]
        assert found.result.hbm_read_bytes == min(r.result.hbm_read_bytes for r in rows)
        assert base.spec.policy == "original"
    no_base = [r for r in records if r.spec.policy != "original"]
    assert {base for _, base in best_by_condition(no_base, "time_ms").values()} == {None}


# Silicon


def faked(record, policy, time_ms, **changes):
    spec = dataclasses.replace(record.spec, policy=policy, **changes)
    row = record.result.replaced(policy=policy, time_ms=time_ms)
    return dataclasses.replace(record, spec=spec, result=row)


def test_finalists_are_the_best_of_each_mask_and_original(records):
    a, b = records[0], records[2]
    trials = [
        faked(a, "original", 9.0), faked(a, "nnz", 5.0), faked(a, "svd", 4.0),
        faked(a, "nnz", 3.0, wave=16), faked(a, "random", 8.0),
        faked(a, "greedy", 1.0, device="a40"), faked(a, "svd+nnz", 0.5, source="measured"),
        faked(b, "random", 1.0), faked(b, "original", 2.0),
    ]  # fmt: skip
    found = finalists(trials, "time", 2, "h100")
    assert [(s.mask, s.policy) for s in found] == [
        ("a", "original"), ("a", "nnz"), ("a", "svd"), ("b", "original"), ("b", "random")
    ]  # fmt: skip
    card = Card("NVIDIA H100 80GB HBM3", "h100")
    specs = [measured_spec(spec, card, 132, 7) for spec in found]
    assert {(s.source, s.wave, s.model, s.l2_bytes, s.seed) for s in specs} == {
        ("measured", 132, None, None, 7)
    }
    assert [[s.policy for s in group] for group in launches(specs)] == [
        ["original", "nnz", "svd"], ["original", "random"]
    ]  # fmt: skip


def fake_measurement(specs, mask):
    """What a card might say; in the place of the launch alone."""
    rows = []
    for k, spec in enumerate(specs):
        record = run_trial(dataclasses.replace(spec, model="full"), mask, load_device("h100"))
        row = record.result.replaced(source="measured", model=None, time_ms=10.0 - k)
        rows.append(dataclasses.replace(record, spec=spec, result=row))
    return rows


@pytest.fixture
def card(monkeypatch):
    """Everything of ``--gpu`` but the launch: a card by name, and a measurement of its own."""
    found = Card("NVIDIA H100 80GB HBM3", "h100")
    monkeypatch.setattr(gpu_phase_module, "find_card", lambda *_: found)
    monkeypatch.setattr(gpu_phase_module, "inspect_launch", lambda spec, mask: (found, 8))
    monkeypatch.setattr(gpu_phase_module, "measure_launch", fake_measurement)

    class Here(InProcess):
        def __init__(self, inputs, jobs, per_process=None):
            super().__init__(inputs)

    monkeypatch.setattr(gpu_phase_module, "LocalEngine", Here)
    monkeypatch.setattr("wavealign.sweep.engines.local.LocalEngine", Here)


GPU = ["--l2", "1MiB", "--wave", "8", "--quiet", "--policy", "nnz", "--policy", "svd", "--policy",
       "random", "--gpu", "--finalists", "2"]  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(main, ["sweep", *map(str, arguments)])


def test_simulation_proposes_and_silicon_decides(masks, tmp_path, card):
    out = tmp_path / "s"
    result = run("--mask", masks, *GPU, "--out", out)
    assert result.exit_code == 0, result.output
    simulated, measured = result.stdout.split("measured, 6 trials")
    assert "simulated, 8 trials" in simulated
    assert "7.000" not in simulated
    trials = read_trials(out)
    found = [r for r in trials if r.spec.source == "measured"]
    assert len(found) == 6
    assert {r.spec.policy for r in found} >= {"original"}
    assert "8.000 ms" in measured  # the last of three: 10 - 2
    assert "1.250x" in measured
    before = {p: p.read_bytes() for p in (out / "trials").iterdir()}
    again = run("--mask", masks, *GPU, "--out", out)
    assert again.stdout == result.stdout
    assert {p: p.read_bytes() for p in (out / "trials").iterdir()} == before


def test_the_card_must_be_among_the_devices(masks, tmp_path, card):
    result = run("--mask", masks, *GPU, "--device", "a40", "--out", tmp_path / "s")
    assert result.exit_code == 2
    assert "add its profile, e.g. --device h100" in result.stderr
    assert not (tmp_path / "s").exists()


def test_a_profile_of_ones_own_of_this_card_proposes(masks, tmp_path, card):
    mine = tmp_path / "mine.toml"
    mine.write_text(profile_toml(load_device("h100")))
    result = run("--mask", masks, *GPU, "--device", mine, "--out", tmp_path / "s")
    assert result.exit_code == 0, result.output
    assert "measured, 6 trials" in result.stdout
    mine.write_text(mine.read_text().replace("clock_max_ghz = 1", "clock_max_ghz = 2"))
    load_device.cache_clear()  # another process would read the file anew
    again = run("--mask", masks, *GPU, "--device", mine, "--out", tmp_path / "s")
    assert again.exit_code == 2
    assert "holds a sweep of other device profiles" in again.stderr


def test_a_measurement_that_fails_is_recorded(masks, tmp_path, card, monkeypatch):
    import wavealign.sweep.silicon as silicon

    monkeypatch.setattr(gpu_phase_module, "measure_launch", silicon.measure_launch)
    result = run("--mask", masks, *GPU, "--out", tmp_path / "s")
    assert result.exit_code == 1
    assert "6 of 14 trials failed" in result.stderr
    errors = {r.error for r in read_trials(tmp_path / "s") if r.status == "failed"}
    assert len(errors) == 1  # no NVML or no backend here: the package's own words


def test_without_a_gpu_nothing_begins(masks, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run("--mask", masks, "--gpu", "--out", tmp_path / "s")
    assert result.exit_code == 3
    assert "isn't installed" in result.stderr or "needs an NVIDIA GPU" in result.stderr
    assert not (tmp_path / "s").exists()


# The command


SMALL = ["--l2", "1MiB", "--wave", "8", "--quiet", "--jobs", "1"]


def test_the_command_runs_and_continues(masks, tmp_path):
    out = tmp_path / "s"
    options = ["--mask", masks, *SMALL, "--policy", "nnz", "--device", "h100,a40"]
    result = run(*options, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout == (out / "results.jsonl").read_text()
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(r["mask"], r["device"], r["policy"]) for r in rows] == [
        (m, d, p) for m in "ab" for d in ("a40", "h100") for p in ("nnz", "original")
    ]
    again = run(*options, "--out", out)
    assert again.exit_code == 0, again.output
    assert "simulated, 8 trials" in again.stdout
    assert len(read_trials(out)) == 8
    assert sum(len(p.read_text().splitlines()) for p in (out / "trials").iterdir()) == 8
    manifest = json.loads((out / "sweep.json").read_text())
    assert manifest["schema"] == "wavealign.sweep/1"
    assert [m["name"] for m in manifest["masks"]] == ["a", "b"]
    other = run(*options, "--policy", "svd", "--out", out)
    assert other.exit_code == 2
    assert "holds a sweep of other space" in other.stderr


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--policy", "nzz"], 2, "Did you mean 'nnz'"),
        (["--device", "h10"], 2, "unknown device"),
        (["--device", ","], 2, "'device' is empty"),
        (["--wave", "many"], 2, "wave has 'many'"),
        (["--space", "none.toml"], 2, "none.toml: can't be read"),
        (["--trials", "5"], 2, "a grid runs all of it"),
        (["--search", "tpe"], 2, "needs --trials"),
        (["--address", "x"], 2, "--executor ray or dask"),
        (["--objective", "energy", "--device", "a40"], 2, "isn't known"),
        (["--mask", "none/*.npz"], 2, "matches no file"),
    ],
)
def test_bad_input_leaves_nothing(masks, tmp_path, monkeypatch, options, code, word):
    monkeypatch.chdir(tmp_path)
    result = run("--mask", masks, *options, "--out", "s")
    assert (result.exit_code, word in result.stderr) == (code, True), result.output
    assert [p.name for p in tmp_path.iterdir()] == ["masks"]


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        (["--search", "random", "--trials", "20"], "sweep"),
        (["--executor", "ray"], "ray"),
        (["--executor", "dask"], "dask"),
    ],
)
def test_extras_that_are_not_installed(masks, tmp_path, monkeypatch, options, extra):
    def absent(module, extra, purpose):
        raise MissingCapabilityError(f"pip install 'wavealign[{extra}]'")

    for module in ("search", "engines.on_ray", "engines.on_dask"):
        monkeypatch.setattr(f"wavealign.sweep.{module}.require", absent)
    result = run("--mask", masks, *options, "--out", tmp_path / "s")
    assert result.exit_code == 3
    assert f"pip install 'wavealign[{extra}]'" in result.stderr
    assert not (tmp_path / "s").exists()


def test_a_job_measures_or_simulates(records, masks):
    spec = records[0].spec
    mask = load_mask(masks / "a.npz").mask
    job = Job((spec,), fake_measurement)
    assert run_job(job, mask, None)[0].result.source == "measured"
    assert run_job(Job((spec,)), mask, load_device("h100"))[0].result == records[0].result


def test_every_field_of_a_trial_but_the_masks_name_is_its_identity():
    from helpers import run_result

    launch = run_result(head_dim=128, dtype="bf16").launch
    others = {
        "source": "measured", "mask_digest": "d9", "heads": "0", "policy": "nnz",
        "device": "a100", "kernel": "fa2", "wave": 7, "l2_bytes": 5, "head_dim": 64,
        "dtype": "fp16", "model": "fast", "regime": "steady", "seed": 8,
    }  # fmt: skip
    assert set(launch.spec) == {*others, "mask"}
    for name, other in others.items():
        assert dataclasses.replace(launch, **{name: other}).identity != launch.identity
    assert dataclasses.replace(launch, mask="other").identity == launch.identity


def test_an_export_holds_what_is_on_disk(tmp_path, masks):
    """An interrupt may come between a record's line and its place in memory."""
    folder = tmp_path / "store"
    sweep(folder, masks, {"policy": ["original", "nnz"]})
    wanted = (folder / "results.jsonl").read_text()
    assert len(wanted.splitlines()) > 1
    with Store(folder, MANIFEST, lambda _: None) as store:
        store.records.clear()
        store.export()
    assert (folder / "results.jsonl").read_text() == wanted


def test_a_trial_that_failed_and_was_done_is_done(tmp_path, masks):
    folder = tmp_path / "store"
    sweep(folder, masks, {"policy": ["original"]})
    done = read_trials(folder)
    file = next((folder / "trials").glob("*.jsonl"))
    for first in (True, False):
        failed = [
            dataclasses.replace(r, status="failed", result=None, error="out of memory")
            for r in done
        ]
        both = [*failed, *done] if first else [*done, *failed]
        file.write_text("".join(f"{record.to_json()}\n" for record in both))
        assert {r.status for r in read_trials(folder)} == {"done"}
    file.write_text("".join(f"{record.to_json()}\n" for record in [*failed, *failed]))
    assert {r.status for r in read_trials(folder)} == {"failed"}


@pytest.mark.parametrize("key", list(MANIFEST))
def test_a_store_goes_on_with_the_same_sweep_only(tmp_path, key):
    with Store(tmp_path / "store", MANIFEST, lambda _: None):
        pass
    with pytest.raises(InputError, match=r"holds a sweep of other .*there null, here true"):
        Store(tmp_path / "store", {**MANIFEST, key: True}, lambda _: None).check()
