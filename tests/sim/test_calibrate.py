from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import DATA, measured_result, random_mask, run_result

from wavealign.cli import main
from wavealign.errors import InputError
from wavealign.masks import BlockMask, save_mask
from wavealign.order import build_schedule
from wavealign.runs.result import Environment, Result
from wavealign.sim import Setup, load_device, run_schedule
from wavealign.sim.calibrate import calibrate, replay, replay_errors
from wavealign.sim.recordings import Recording, load_recordings
from wavealign.sim.traffic import launch_traffic

POLICIES = ["original", "random/shuffled", "nnz", "nnz/shuffled", "svd+nnz", "lockstep"]


def small_device():
    """An H200 cut down to 16 SMs and an L2 of 200 K/V blocks, power cap to match."""
    h200 = load_device("h200")
    power = dataclasses.replace(h200.power, cap_w=85.0, static_w=13.0)
    return dataclasses.replace(
        h200, sms=16, l2_bytes=200 * 65536, l2_bytes_per_clock=1000.0, power=power
    )


def changed(device, *, usable, spread, exposed, cycles, hbm_pj):
    kernel = dataclasses.replace(
        device.kernels["fa4"],
        sm_spread_frac=spread,
        miss_exposed_blocks=exposed,
        block_cycles={(128, 128): cycles},
    )
    return dataclasses.replace(
        device,
        l2_usable_frac=usable,
        kernels={"fa4": kernel},
        power=dataclasses.replace(device.power, hbm_pj_per_byte=hbm_pj),
    )


def synthetic_runs(device, count=4):
    """What a card of this profile would have measured on random masks."""
    runs = []
    setup = Setup.make(device)
    for i in range(count):
        mask = random_mask(i, (1, 200, 600), density=0.15 + 0.08 * i)
        for policy in POLICIES:
            schedule = build_schedule(mask, policy, setup.wave)
            result = run_schedule(mask, schedule, setup, name=f"m{i}")
            cycles = launch_traffic(mask, schedule, setup).cycles
            active = setup.flops(mask, mask.nnz) / (cycles * device.sms * device.flop_per_clock_sm)
            result = result.replaced(source="measured", model=None, tensor_active_frac=active)
            runs.append(Recording(result.launch, result.outcome, None, "", mask, schedule))
    return runs


def test_the_fit_recovers_a_known_card():
    start = small_device()
    truth = changed(start, usable=0.8, spread=0.006, exposed=0.03, cycles=2000.0, hbm_pj=120.0)
    runs = synthetic_runs(truth)
    before = replay_errors(runs, replay(runs, Setup.make(start)))
    fitted = calibrate(runs, start)
    after = replay_errors(runs, replay(runs, Setup.make(fitted)))
    assert np.abs(before.hit_points).mean() > 2
    assert np.abs(after.hit_points).mean() < 0.5
    assert np.abs(after.time_percent).mean() < 0.3
    assert fitted.l2_usable_frac == pytest.approx(0.8, abs=0.04)
    kernel = fitted.kernels["fa4"]
    assert kernel.block_cycles[128, 128] == pytest.approx(2000, rel=5e-3)
    # The power terms trade against each other; what they predict together is the times above.


def test_too_few_runs_are_refused():
    runs = synthetic_runs(small_device(), 2)
    with pytest.raises(InputError, match=r"6 runs with hit ratios of 1 masks can't determine 9"):
        calibrate(runs[:6], small_device())


def test_measured_rows_of_this_projects_schema(tmp_path):
    mask = random_mask(shape=(2, 40, 50))
    save_mask(tmp_path / "m.npz", mask)
    setup = Setup.make("h200", wave=8)
    lines = []
    for policy in ("nnz", "lockstep"):
        result = run_schedule(
            mask, build_schedule(mask, policy, 8, seed=3), setup, seed=3, name="m"
        )
        lines.append(result.replaced(source="measured", model=None).to_json())
    (tmp_path / "runs.jsonl").write_text("\n".join(lines))
    found = list(load_recordings(tmp_path / "runs.jsonl", tmp_path / "m.npz"))
    assert [r.schedule.policy for r in found] == ["nnz", "lockstep"]
    again = replay(found, setup)
    assert [r.hbm_read_bytes for r in again] == [json.loads(x)["hbm_read_bytes"] for x in lines]


def test_a_part_of_a_mask_file_is_found_by_its_key(tmp_path):
    mask = random_mask(shape=(1, 20, 30))
    dense = mask.head(0).to_dense()
    np.savez(tmp_path / "m.npz", **{"a/mask": dense, "b/mask": ~dense, "a/block_size": [128, 128]})
    for key, digest in (("a", mask.digest), ("b", BlockMask.from_dense(~dense[None]).digest)):
        row = measured_result(mask=f"m:{key}", mask_digest=digest, heads="0", wave=8)
        (tmp_path / "runs.jsonl").write_text(row.to_json())
        (found,) = load_recordings(tmp_path)
        assert found.mask.digest == digest
        assert found.launch == row.launch


def test_recorded_orders_are_replayed_as_they_were():
    files = (DATA / "h200", DATA / "h200" / "runs-first.jsonl")
    found = {r.label: r for runs in files for r in load_recordings(runs)}
    random_order = found["vslash_2841 random"]
    with np.load(DATA / "h200" / "recorded" / "vslash_2841.npz") as file:
        assert np.array_equal(random_order.schedule.row_order[0], file["row_order/random"][0])
        firsts, kv_order = file["first_block/nnz/shuffled+phased"][0], file["kv_order"][0]
    phased = found["vslash_2841 nnz/shuffled+phased"].schedule.head_lists(0)
    place = np.argsort(kv_order)
    for row in (0, 7, 2840):
        walked = phased.indices[phased.indptr[row] : phased.indptr[row + 1]]
        assert walked[0] == firsts[row]
        wraps = np.flatnonzero(np.diff(place[walked]) < 0)
        assert len(wraps) <= 1
        assert place[walked[-1]] < place[walked[0]] or not wraps.size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: is not JSON"),
        ("[1]", "line 1: a result row is not of schema 'wavealign.run/1'"),
        ('{"kernel": "fa4"}', "line 1: a result row is not of schema 'wavealign.run/1'"),
        ('{"schema": "wavealign.run/1", "kernel": "fa4"}', "line 1: a result row lacks .*mask"),
        (measured_result(mask="q").to_json(), "holds no mask named 'q'"),
        (run_result().to_json(), "a run has source 'simulated'; expected 'measured'"),
        (measured_result(time_ms=None).to_json(), "a run of original on m has time_ms None"),
        (measured_result(time_ms=0).to_json(), "has time_ms 0"),
        (measured_result(batch=2).to_json(), "has batch 2; runs with 1 can be replayed"),
        (measured_result(kv_heads=1).to_json(), "has kv_heads 1; runs with 2 can"),
        (measured_result(head_dim=64).to_json(), "has head_dim 64; runs with 128 can"),
        (measured_result(l2_hit_frac=1.5).to_json(), "l2_hit_frac 1.5; expected a number from 0"),
        (measured_result(time_ms=-5.0).to_json(), "time_ms -5.0; expected a number from 0"),
    ],
)
def test_runs_that_are_none(tmp_path, text, message):
    (tmp_path / "runs.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        list(load_recordings(tmp_path))


def run(*arguments):
    return CliRunner().invoke(main, ["calibrate", *[str(a) for a in arguments]])


def test_command_line(tmp_path):
    device = small_device()
    runs = synthetic_runs(
        changed(device, usable=0.9, spread=0.004, exposed=0.02, cycles=2400.0, hbm_pj=80.0)
    )
    masks = {}
    lines = []
    for recording in runs:
        masks[recording.mask_name] = recording.mask
        launch = recording.launch
        if launch.policy != "original":
            launch = dataclasses.replace(launch, policy="nnz", wave=132)
        lines.append(Result(launch, recording.measured, Environment("")).to_json())
    for name, mask in masks.items():
        assert isinstance(mask, BlockMask)
        save_mask(tmp_path / f"{name}.npz", mask)
    (tmp_path / "runs.jsonl").write_text("\n".join(lines))
    out = tmp_path / "mine.toml"
    few = run("--runs", tmp_path, "--device", "h200", "--out", out)
    assert few.exit_code == 2
    assert "can't determine" in few.stderr
    assert "validate --per-head --counters" in few.stderr
    assert not out.exists()
    done = run("--runs", tmp_path, "--device", "h200", "--all", "--out", out)
    assert done.exit_code == 0, done.output
    assert "fitted      24 runs" in done.stdout
    profile = load_device(str(out))
    assert "24 runs of 4 masks" in profile.kernels["fa4"].calibrated_on
    assert "24 runs of 4 masks" in profile.sources["l2_usable_frac"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--runs", "no.jsonl", "--device", "h200"], "can't be read"),
        (["--runs", DATA / "h200", "--device", "h2000"], "unknown device"),
        (["--runs", DATA / "h200", "--device", "h200", "--kernel", "x"], "unknown kernel"),
        (["--runs", DATA / "h200", "--device", "h200", "--out", "p.txt"], "expected .toml"),
        (["--runs", "a", "--masks", "b", "--masks", "c", "--device", "h200"], "1 --runs and 2"),
    ],
)
def test_bad_usage(options, text):
    result = run(*options)
    assert result.exit_code == 2
    assert text in result.stderr
