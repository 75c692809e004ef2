"""The whole of measuring on the CPU: rows, checks, counters, each against its definition."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
from helpers import ROOT
from on_cpu import Readings, TickingRig

from wavealign import validation
from wavealign._version import __version__
from wavealign.cli import main
from wavealign.errors import InputError, MissingCapabilityError
from wavealign.gpu.correctness import WrongResultError
from wavealign.gpu.counted import CONTROL_BYTES, count_launches
from wavealign.gpu.counters import Counters
from wavealign.gpu.measure import Options, measure, sizes_of
from wavealign.gpu.registry import find_backend
from wavealign.gpu.rig import Rig
from wavealign.masks import BlockMask, load_mask, save_mask
from wavealign.order import build_schedule
from wavealign.runs.launch import Launch
from wavealign.runs.result import FIELDS, Result
from wavealign.sim.devices import load_device, profile_toml
from wavealign.sim.simulate import simulate_launch

POLICIES = ("original", "nnz/shuffled")


def small_mask(seed=1, H=2):
    kept = np.random.default_rng(seed).random((H, 4, 5)) < 0.5
    kept[0, 2] = False
    kept[:, 0] = True
    return BlockMask.from_dense(kept, (8, 16), (30, 75))


def launches_of(mask, policies=POLICIES, regimes=("single",), **changes):
    return [
        Launch(
            source="measured", mask="m", mask_digest=mask.digest, heads="0-1", policy=policy,
            device="h200", kernel="reference", wave=3, regime=regime, seed=5,
            **{"head_dim": 16, "dtype": "bf16", **changes},
        )
        for regime in regimes
        for policy in policies
    ]  # fmt: skip


def test_a_row_says_what_ran_and_what_came_of_it():
    mask, rig, words = small_mask(), TickingRig(), []
    launches = launches_of(mask, regimes=("single", "steady"))
    counters = {
        "original": Counters(
            "k", time_ms=2.0, l2_hit_frac=0.9, lts_sector_hit_frac=0.8, l2_requested_bytes=70_000,
            fabric_bytes=500, hbm_read_bytes=10_000, hbm_write_bytes=40, tensor_active_frac=0.7,
            clock_ghz=1.7,
        )
    }  # fmt: skip
    options = Options(repeats=5, settle_s=0.25, measure_s=0.5)
    rows = list(
        measure(launches, mask, rig, Readings(), options, counters=counters, progress=words.append)
    )
    assert [(row.policy, row.regime) for row in rows] == [(x.policy, x.regime) for x in launches]
    assert words == [
        "reference", "checked original", "checked nnz/shuffled", "dense", "timed original",
        "timed nnz/shuffled", "timed original, steady", "timed nnz/shuffled, steady",
    ]  # fmt: skip
    block_bytes = 16 * 16 * 2 * 2  # tokens x head_dim x (K and V) x bytes
    touched = np.zeros((2, 5), bool)
    for h in range(2):
        touched[h, mask.head(h).indices] = True
    tokens = 16 * touched.sum() - 5 * touched[:, -1].sum()
    flops = 4 * 8 * 16 * 16 * mask.nnz
    said = {
        "source": "measured", "policy": "original", "mask": "m", "mask_digest": mask.digest,
        "heads": "0-1", "head": None, "device": "h200", "kernel": "reference", "seed": 5,
        "wave": 3, "model": None, "l2_capacity_bytes": None, "kv_block_bytes": block_bytes,
        "tokens_kv": 75, "density": mask.density, "batch": 1, "kv_heads": 2, "head_dim": 16,
        "dtype": "bf16", "schedule_file": None, "l2_bytes": None, "device_digest": None,
        "l2_hit_frac": 0.9, "lts_sector_hit_frac": 0.8, "l2_requested_bytes": 70_000,
        "fabric_bytes": 500, "hbm_read_bytes": 10_000, "hbm_write_bytes": 40,
        "compulsory_bytes": tokens * 16 * 4, "belady_bytes": None, "imbalance_frac": None,
        "intensity_flop_per_byte": flops / 10_000, "roofline": None, "bound": None,
        "counters_ms": 2.0, "tensor_active_frac": 0.7, "cache_control": "all",
        "gather_ms": 0.0, "scatter_ms": 0.0, "ragged_kv_first": False, "version": __version__,
        "gpu": "NVIDIA H200", "driver": "580.1", "error_frac": rows[0].error_frac,
        "backend_version": find_backend("reference").version(),
    }  # fmt: skip
    single = {
        "regime": "single", "time_ms": 125.0, "repeats": 5, "time_spread_frac": 0.0,
        "limit_ms": 125.0, "dense_ms": 125.0, "gap": 1 / mask.density, "clock_ghz": 1.7,
        "energy_j": None, "power_w": None, "temperature_c": None, "throttle": None,
    }  # fmt: skip
    # A tick is 125 ms, so 0.2 s are two launches. The clock goes on where it is looked at: before
    # each batch, of which three begin in 0.5 s, before the one that doesn't, and at the end.
    steady = {
        "regime": "steady", "time_ms": 625.0 / 6, "repeats": 6, "time_spread_frac": None,
        "limit_ms": 625.0 / 6, "dense_ms": None, "gap": None, "clock_ghz": 1.5,
        "energy_j": 100 / 6, "power_w": 650.0, "temperature_c": 70.0, "throttle": "a,b",
    }  # fmt: skip
    assert rows[0].flat() == said | single
    assert rows[2].flat() == said | steady
    assert set(said | single) == set(FIELDS)
    assert 0 < rows[0].error_frac < 8e-3
    uncounted = rows[1]
    assert uncounted.cache_control is uncounted.clock_ghz is uncounted.l2_hit_frac is None
    assert uncounted.l2_requested_bytes == mask.nnz * block_bytes
    assert Result.from_json(rows[3].to_json()) == rows[3]


def test_candidates_and_their_limits_are_timed_in_turns():
    rig = TickingRig()
    list(measure(launches_of(small_mask()), small_mask(), rig, Readings(), Options(repeats=2)))
    # Three launches of dense attention, then two rounds of two policies and their limits.
    assert rig.turns == [0, 1, 2, *[0] * 4, *[1] * 4]


def test_what_is_not_asked_for_is_not_measured():
    rig = TickingRig()
    options = Options(repeats=1, check=False, limit=False, dense=False)
    (row,) = measure(launches_of(small_mask(), ["nnz"]), small_mask(), rig, Readings(), options)
    assert (row.limit_ms, row.dense_ms, row.gap, row.error_frac) == (None,) * 4
    assert rig.turns == [0]


def test_batches_and_shared_heads_ask_for_more_and_read_no_more():
    mask = small_mask()
    row, *_ = measure(
        launches_of(mask, batch=3, kv_heads=1), mask, TickingRig(), Readings(), Options(1)
    )
    assert (row.batch, row.kv_heads) == (3, 1)
    assert row.l2_requested_bytes == 3 * mask.nnz * row.kv_block_bytes
    both = np.zeros(5, bool)  # K/V blocks that either query head keeps
    for h in range(2):
        both[mask.head(h).indices] = True
    assert row.compulsory_bytes == 3 * (16 * both.sum() - 5 * both[-1]) * 16 * 4


def test_refused_before_anything_runs():
    mask, rig = small_mask(), TickingRig()
    rows = measure(launches_of(mask, kv_heads=3), mask, rig, Readings())
    with pytest.raises(InputError, match="2 query heads don't divide among 3 K/V heads"):
        next(rows)
    assert rig.turns == []


def test_a_wrong_output_is_no_row():
    mask, rig = small_mask(), TickingRig()
    right = build_schedule(mask, "original", 3)
    wrong = dataclasses.replace(right, indices=(right.indices + 1) % mask.N)
    rows = measure(
        launches_of(mask, ["original"]), mask, rig, Readings(), schedules={"original": wrong}
    )
    with pytest.raises(WrongResultError, match="reference, m, original: relative error"):
        next(rows)
    assert rig.turns == []


def test_a_launch_that_says_little_is_the_usual_one():
    mask = small_mask()
    problem = sizes_of(launches_of(mask, head_dim=None, dtype=None)[0], mask)
    assert (problem.batch, problem.head_dim, problem.dtype) == (1, 128, "bf16")
    assert problem.heads_per_kv_head == 1


# Counters


PROFILER = """#!{python}
# Runs `python -m MODULE JOB` as a profiler does; what the rig marks becomes a line of its table.
import runpy, sys
if "--query-metrics" in sys.argv:
    sys.exit(1)  # it can't list them
sys.path[:0] = {path!r}
from wavealign.gpu.rig import Rig
marked, run_plainly = [], Rig.count
def count(self, run):
    run_plainly(self, run)
    marked.append(run)
Rig.count = count
log = sys.argv[sys.argv.index("--log-file") + 1]
_, _, module, job = sys.argv[sys.argv.index("--") + 1 :]
sys.argv = [module, job]
runpy.run_module(module, run_name="__main__")
names = ["lts__t_sectors_srcunit_tex.sum", "lts__t_sectors_srcunit_tex_lookup_hit.sum",
         "lts__t_sectors_srcunit_ltcfabric_lookup_hit.sum", "dram__bytes_read.sum",
         "gpu__time_duration.sum"]
def line(cells):
    return ",".join(f'"{{cell}}"' for cell in cells) + "\\n"
with open(log, "w") as table:
    table.write(line(["ID", "Process ID", "Kernel Name", *names]))
    for i in range(len(marked)):
        read = {control} if i == 0 else 1000 * i
        values = [{control} // 32 if i == 0 else 100, 0 if i == 0 else 10 * i, 0, read, 1e6]
        table.write(line([i, 7, f"kernel {{i}}", *values]))
"""


@pytest.fixture
def profiler(tmp_path, monkeypatch):
    """A function that puts a stand-in for ncu in place."""

    def make(control=CONTROL_BYTES):
        script = tmp_path / "ncu"
        path = [str(ROOT)]
        script.write_text(PROFILER.format(python=sys.executable, path=path, control=control))
        script.chmod(0o755)
        monkeypatch.setenv("WAVEALIGN_NCU", str(script))

    return make


def work_of(*masks):
    return [
        (sizes_of(launches_of(m)[0], m), [build_schedule(m, policy, 3) for policy in POLICIES])
        for m in masks
    ]


def test_a_child_process_counts_each_schedule_once_after_a_control(profiler):
    profiler()
    work = work_of(small_mask(), small_mask(2))
    counted = count_launches(find_backend("reference"), work, 0, "all", "cpu")
    assert [[c.kernel for c in launches] for launches in counted] == [
        ["kernel 1", "kernel 2"], ["kernel 3", "kernel 4"]
    ]  # fmt: skip
    assert counted[1][0].hbm_read_bytes == 3000
    assert counted[1][0].l2_hit_frac == pytest.approx(0.3)
    assert counted[0][1].l2_requested_bytes == 3200


def test_counters_that_are_wrong_about_the_control_are_not_used(profiler):
    profiler(control=CONTROL_BYTES // 2)
    with pytest.raises(MissingCapabilityError, match="can't be trusted: a control kernel"):
        count_launches(find_backend("reference"), work_of(small_mask()), 0, "all", "cpu")


# Validation


class Steps:
    """Progress that keeps what it was told."""

    def __init__(self):
        self.begun, self.done = [], []

    def __call__(self, total, what):
        self.begun.append((total, what))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def advance(self, detail):
        self.done.append(detail)


@pytest.fixture
def files(tmp_path):
    """Two masks, a schedule of the first, and the H200's profile with our kernel in it."""
    for seed, name in ((1, "a"), (2, "b")):
        save_mask(tmp_path / f"{name}.npz", small_mask(seed))
    build_schedule(small_mask(1), "svd", 3).save(tmp_path / "s.npz")
    text = profile_toml(load_device("h200")).replace("kernels.fa4", "kernels.reference")
    (tmp_path / "mine.toml").write_text(text)
    return tmp_path


def validate(files, names="a", rig=None, stages=None, options=None, note=None, **terms):
    masks = [load_mask(files / f"{name}.npz") for name in names]
    terms = {"device_name": str(files / "mine.toml"), "head_dim": 16, "wave": 3, **terms}
    return validation.validate(
        [(loaded, range(loaded.mask.H)) for loaded in masks],
        [find_backend("reference")],
        validation.Terms(**{"policies": POLICIES, **terms}),
        rig or TickingRig(),
        Readings(),
        options or Options(repeats=1, settle_s=0.25, measure_s=0.25),
        stages or Steps(),
        note or (lambda text: None),
    )


def test_each_measured_row_has_the_same_launch_simulated_beside_it(files):
    steps = Steps()
    runs = list(validate(files, "ab", stages=steps, regimes=("single", "steady"), seed=4))
    assert [(row.mask, row.regime, row.policy) for _, row, _ in runs] == [
        (mask, regime, policy)
        for mask in "ab" for regime in ("single", "steady") for policy in POLICIES
    ]  # fmt: skip
    assert steps.begun == [(8, "reference, a"), (8, "reference, b")]
    assert len(steps.done) == 16
    profile = load_device(str(files / "mine.toml"))
    for case, measured, simulated in runs:
        launch, predicted = measured.launch, simulated.launch
        assert (launch.device, launch.seed, launch.wave) == (profile.name, 4, 3)
        same = {"source": "measured", "model": None, "l2_capacity_bytes": None}
        assert dataclasses.replace(predicted, **same, device_digest=None) == launch
        assert simulated == simulate_launch(launch, case.mask, profile)
        assert predicted.device_digest == profile.digest


def test_without_a_profile_or_with_shapes_that_are_not_modelled_nothing_is_predicted(files):
    for terms in ({"device_name": None}, {"batch": 2}, {"kv_heads": 1}, {"predict": False}):
        assert {predicted for _, _, predicted in validate(files, **terms)} == {None}


def test_heads_on_their_own_and_schedules_from_files(files):
    terms = {"per_head": True, "schedule_paths": [str(files / "s.npz")], "policies": ["nnz"]}
    rows = [row for _, row, _ in validate(files, **terms)]
    assert [(r.heads, r.head, r.policy) for r in rows] == [
        (head, int(head), policy) for head in "01" for policy in ("nnz", "s.npz (svd)")
    ]
    assert [r.schedule_file for r in rows] == [None, str(files / "s.npz")] * 2
    assert rows[2].mask_digest == small_mask().select_heads([1]).digest


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"policies": ["nnz", "nnz"]}, "a policy or schedule is named twice"),
        ({"kv_heads": 3}, "don't divide among 3 K/V heads"),
        ({"device_name": "h20"}, "unknown device 'h20'"),
        ({"schedule_paths": ["s.npz"]}, r"s\.npz: "),  # of the other mask
    ],
)
def test_everything_is_planned_before_anything_runs(files, monkeypatch, terms, said):
    monkeypatch.chdir(files)
    rig = TickingRig()
    with pytest.raises(InputError, match=said):
        validate(files, "ab", rig=rig, **terms)
    assert rig.turns == []


def test_counters_reach_the_rows(files, profiler):
    profiler()
    notes = []
    rows = [row for _, row, _ in validate(files, "ab", counters=True, note=notes.append)]
    assert notes == ["reference: reading counters, 2 launches"]
    assert [row.hbm_read_bytes for row in rows] == [1000, 2000, 3000, 4000]
    assert {row.cache_control for row in rows} == {"all"}


def test_the_command_prints_what_validate_finds(files, monkeypatch):
    monkeypatch.setattr("wavealign.gpu.rig.find_gpu", lambda purpose: Rig())
    monkeypatch.setattr("wavealign.gpu.telemetry.Telemetry", Readings)
    arguments = [
        "validate", "--gpu", "--backend", "reference", "--head-dim", "16", "--device",
        str(files / "mine.toml"), "--repeats", "2", "--policy", "original", "--policy", "nnz",
        "--mask", str(files / "a.npz"), "--quiet",
    ]  # fmt: skip
    done = CliRunner().invoke(main, [*arguments, "--json", "--out", str(files / "runs.jsonl")])
    assert done.exit_code == 0, done.output
    assert done.output == (files / "runs.jsonl").read_text()
    rows = [json.loads(line) for line in done.output.splitlines()]
    assert [(row["policy"], row["wave"], row["repeats"]) for row in rows] == [
        ("original", 1, 2), ("nnz", 1, 2)
    ]  # fmt: skip
    shown = CliRunner().invoke(main, [*arguments, "--heads", "1"])
    assert shown.exit_code == 0, shown.output
    assert "a, heads 1: 4 x 5 blocks of 8 x 16 tokens" in shown.output
    assert "dense attention takes" in shown.output
    assert "nothing is moved" in shown.output


def test_a_sweep_measures_on_the_same_road(monkeypatch):
    from wavealign.sweep.silicon import measure_launch

    monkeypatch.setattr("wavealign.gpu.rig.CudaRig", TickingRig)
    monkeypatch.setattr("wavealign.gpu.telemetry.Telemetry", Readings)
    mask = small_mask()
    specs = tuple(Launch(**launch.spec) for launch in launches_of(mask))
    records = measure_launch(specs, mask)
    assert [(r.status, r.spec, r.result.policy) for r in records] == [
        ("done", spec, spec.policy) for spec in specs
    ]
    assert records[0].result.time_ms == 125.0
    assert records[0].planning_ms > 0
    failed = measure_launch(tuple(dataclasses.replace(s, dtype="fp8") for s in specs), mask)
    assert {record.status for record in failed} == {"failed"}
    assert all("fp8" in record.error for record in failed)
