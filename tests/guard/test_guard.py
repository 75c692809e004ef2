"""The guard: its statistics against a slow twin, its decisions, its profile, its commands."""

import dataclasses
import itertools
import json

import numpy as np
import oracles
import pytest
from click.testing import CliRunner
from helpers import DATA, dense_masks, random_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.cli import main
from wavealign.errors import InputError
from wavealign.guard import CostModel, Guard, load_guard_profile, mask_statistics
from wavealign.guard.decide import LOOK_FRAC
from wavealign.guard.model import CANDIDATES, RESYNC, SAWTOOTH
from wavealign.guard.profile import guard_profile_names
from wavealign.guard.statistics import SNAPSHOTS, WINDOW_WAVES, HeadStatistics
from wavealign.masks import BlockMask, load_mask, save_mask
from wavealign.order import build_schedule
from wavealign.sim.devices import device_names
from wavealign.sim.power import Work, clock_and_energy


def slow_hits(schedules, wave, capacity):
    """Hit ratio of each head from snapshots of the launch, block by block."""
    free = [0] * wave
    found = []
    for order, lists in schedules:
        dealt = oracles.list_schedule([len(lists[row]) for row in order], free, [2] * wave, 1)
        rows = [(start, lists[row]) for row, (start, _) in zip(order, dealt, strict=True)]
        last = max(start + 1 + 2 * len(blocks) for start, blocks in rows)
        begin = rows[0][0]
        requests = misses = 0
        for s in range(SNAPSHOTS):
            now = begin + (2 * s + 1) * (last - begin) // (2 * SNAPSHOTS)
            seen = [entry for entry in rows if entry[0] <= now][-WINDOW_WAVES * wave :]
            age, wanted = {}, set()
            for start, blocks in seen:
                done = max(0, now - start - 1) // 2
                for visit, block in enumerate(blocks[:done]):
                    since = now - start - 1 - 2 * visit
                    age[block] = min(age.get(block, since), since)
                if done < len(blocks):
                    requests += 1
                    wanted.add(blocks[done])
            for block in wanted:
                younger = sum(other < age[block] for other in age.values()) if block in age else 0
                # Of blocks read at the same tick, L2 keeps all or none of the last ones.
                misses += (
                    block not in age
                    or younger >= capacity
                    or (len(age) > capacity and sorted(age.values())[capacity] <= age[block])
                )
        found.append(1 - misses / requests if requests else 1.0)
    return found


@settings(max_examples=25, deadline=None)
@given(dense_masks(), st.integers(1, 6), st.integers(1, 14))
def test_snapshots_against_the_slow_twin(dense, wave, capacity):
    mask = BlockMask.from_dense(dense)
    found = mask_statistics(mask, wave, capacity)
    shared = max(1, int(capacity / max(1.0, wave / mask.M)))
    for policy, name in (("original", "hit_original"), (SAWTOOTH, "hit_sawtooth")):
        schedule = build_schedule(mask, policy, wave)
        heads = []
        for h in range(mask.H):
            part = schedule.head_lists(h)
            lists = [part.indices[a:b].tolist() for a, b in itertools.pairwise(part.indptr)]
            heads.append((schedule.row_order[h].tolist(), lists))
        expected = slow_hits(heads, wave, shared)
        assert [getattr(s, name) for s in found] == pytest.approx(expected)


def test_heads_of_few_rows_share_l2():
    """With twice as many workers as rows of a head, two are in flight: each has half of L2."""
    told = set()
    for seed in range(8):
        dense = np.random.default_rng(seed).random((3, 4, 14)) < 0.7
        mask = BlockMask.from_dense(dense)
        schedule = build_schedule(mask, "original", 8)
        heads = []
        for h in range(mask.H):
            part = schedule.head_lists(h)
            lists = [part.indices[a:b].tolist() for a, b in itertools.pairwise(part.indptr)]
            heads.append((schedule.row_order[h].tolist(), lists))
        found = [s.hit_original for s in mask_statistics(mask, 8, 8)]
        assert found == pytest.approx(slow_hits(heads, 8, 4))
        told.add(found == pytest.approx(slow_hits(heads, 8, 8)))
    assert told != {True}


def content():
    return load_mask(DATA / "h200/video_cv1_2841.npz").mask


@pytest.fixture(scope="module")
def model():
    return CostModel.make("h200")


@pytest.fixture(scope="module")
def video(model):
    mask = content()
    return mask_statistics(mask, 132, model.capacity_blocks(128))


def test_it_reorders_where_it_pays_and_says_why(model, video):
    decision = Guard(model).decide(video, 128, 128)
    assert decision.policies == (SAWTOOTH,)
    # 38.3 ms -> 30.2 ms in the simulator (benchmarks/guard_offline.py).
    assert decision.win_frac == pytest.approx(0.21, abs=0.04)
    assert "head 0: nnz/shuffled+sawtooth" in decision.explain()
    assert "hits 2" in decision.explain()


def test_it_leaves_alone_what_has_nothing_to_win(model):
    dense = BlockMask.from_dense(np.ones((2, 264, 300), bool))
    decision = Guard(model).decide_mask(dense)
    assert decision.policies == ("original", "original")
    assert decision.plan_ms == 0.0
    assert decision.win_frac == 0.0
    assert decision.explain().count("original") == 2
    slash = load_mask(DATA / "h200/vslash_2841.npz").mask
    assert Guard(model).decide_mask(slash).policies == ("original",)


def test_looking_is_paid_for(model):
    guard, block = Guard(model), (128, 128)
    profile = model.profile
    assert guard.looks((2, 40, 40), block, None)
    assert not guard.looks((2, 40, 40), block, 32)  # 66 µs on the card
    assert guard.looks((40, 2841, 2841), block, 32)
    # Where it is worth it, by hand: all blocks kept, or as many as there are.
    shape = (8, 591, 591)
    most_ms = model.least_ms(8 * 591 * 591, 8 * 591, *block)
    calls = profile.lengths_ms(8, 591) / (LOOK_FRAC * most_ms)
    assert not guard.looks(shape, block, int(calls))
    assert guard.looks(shape, block, int(calls) + 1)
    nnz = 8 * 591 * 100
    calls = profile.look_ms(*shape) / (LOOK_FRAC * model.least_ms(nnz, 8 * 591, *block))
    assert not guard.looks_closely(nnz, shape, block, int(calls))
    assert guard.looks_closely(nnz, shape, block, int(calls) + 1)
    calls = profile.look_ms(*shape) / (0.02 * model.least_ms(nnz, 8 * 591, *block))
    eager = Guard(model, close_frac=0.02)
    assert not eager.looks_closely(nnz, shape, block, int(calls))
    assert eager.looks_closely(nnz, shape, block, int(calls) + 1)
    # 800 blocks of rows that could hold many more: looking must serve so many calls.
    least = guard.least_calls(800, shape, block)
    short_ms = model.least_ms(800, 8 * 591, *block)
    assert (least - 1) * LOOK_FRAC * short_ms < profile.lengths_ms(8, 591)
    assert least * LOOK_FRAC * short_ms >= profile.lengths_ms(8, 591)
    left = guard.leave_alone((2, 40, 40), block)
    assert left.policies == ("original", "original")
    assert (left.win_frac, left.plan_ms) == (0.0, 0.0)
    assert "2 heads: original; looking would cost more" in left.explain()


def test_the_time_of_a_launch_in_l2_by_hand(model):
    # Rows' blocks at the kernel's pace, over all workers, at the highest clock.
    step = model.setup.kernel.step_cycles(128, 128, 128)
    cycles = step * (1000 + 132 * model.setup.kernel.row_start_blocks) / 132
    assert model.least_ms(1000, 132, 128, 128) == pytest.approx(
        cycles / (model.setup.device.clock_max_ghz * 1e6)
    )


def plain(model, **terms):
    """The model without partitions, stalls and limits of bandwidth, but for what is said."""
    device = dataclasses.replace(
        model.setup.device,
        **{"l2_partitions": 1, "l2_bytes_per_clock": None, "hbm_bytes_per_s": 1e18, **terms},
    )
    profile = dataclasses.replace(model.profile, miss_stall_frac=0.0)
    return dataclasses.replace(
        model, setup=dataclasses.replace(model.setup, device=device), profile=profile
    )


def head(**changes):
    given = {
        "rows": 264, "columns": 300, "nnz": 40_000, "spread": 0.2, "overlap": None,
        "working_set_blocks": 300, "hit_original": 0.4, "hit_sawtooth": 0.7, "tail_original": 1.0,
        "tail_nnz": 1.0, **changes,
    }  # fmt: skip
    return HeadStatistics(**given)


@pytest.mark.parametrize(
    ("crossing", "miss", "moved"), [(0.0, 0.0, 1), (0.5, 0.0, 1.5), (0.5, 1.0, 2.5)]
)
def test_l2_moves_requests_crossings_and_fills_and_bends_by_sixteen(model, crossing, miss, moved):
    step, size = 2000.0, 65536
    asked = 132 * size / step
    bound = plain(model, l2_bytes_per_clock=asked * moved)  # as much as is asked for
    found = bound._stretch(step, size, np.array(miss), crossing, np.array(1.8))
    assert float(found) == pytest.approx(2 ** (1 / 16))
    far = plain(model, l2_bytes_per_clock=asked * moved / 10)
    assert float(
        far._stretch(step, size, np.array(miss), crossing, np.array(1.8))
    ) == pytest.approx(10)


@pytest.mark.parametrize("partitions", [1, 2])
def test_what_crosses_costs_energy(model, partitions):
    bare = plain(model, l2_partitions=partitions)
    (found,) = bare.predict([head()], 128, 128)
    step = bare.setup.kernel.step_cycles(128, 128, 128)
    cycles = step * (40_000 + 264 * bare.setup.kernel.row_start_blocks) / 132
    requested = 40_000 * 65536
    for prediction, hit in zip(found, (0.4, 0.7, 1 - 300 / 40_000), strict=True):
        crossings = 0.5 * (partitions - 1)
        work = Work(cycles, 4 * 128**3 * 40_000, (1 - hit) * requested, (1 + crossings) * requested)
        expected = clock_and_energy(bare.setup.device.power, 1.8, work, "single")
        assert expected.power_bound
        assert prediction.time_ms == pytest.approx(expected.time_ms)
        assert prediction.energy_j == pytest.approx(expected.energy_j)
        assert prediction.hit == pytest.approx(hit)


def test_hits_leave_the_compulsory_reads(model):
    for policy in CANDIDATES:
        assert model.hit(head(hit_original=1.0, hit_sawtooth=1.0), policy, 600) == 1 - 300 / 40_000
    # A wave of several reads its working set again, as far as L2 doesn't hold it.
    again = 1 - 300 / 40_000 * (1 + model.profile.phased_sweeps * (264 / 132 - 1))
    assert model.hit(head(), RESYNC, 299) == pytest.approx(again)
    assert model.hit(head(rows=100), RESYNC, 299) == 1 - 300 / 40_000
    assert model.hit(head(nnz=0), RESYNC, 299) == 1.0


@pytest.mark.parametrize(("rows", "closing"), [(132, 1), (131, 2), (66, 2), (65, 3), (1, 4)])
def test_the_workers_wait_falls_on_the_heads_that_close(model, rows, closing):
    """As many heads as hold a row for each worker; they share the wait evenly."""
    bare = plain(model)
    heads = [head(rows=rows, nnz=20_000 + 1000 * h, tail_original=1.5) for h in range(4)]
    late, even = (
        [row[0].time_ms for row in bare.predict(part, 128, 128)]
        for part in (heads, [dataclasses.replace(h, tail_original=1.0) for h in heads])
    )
    waits = np.array(late) - np.array(even)
    assert (waits[: 4 - closing] == 0).all()
    assert (waits[4 - closing :] > 0).all()
    if closing > 1:  # more or less, as the clock rises while they wait
        assert np.ptp(waits[4 - closing :]) < 0.1 * waits[-1]


def test_phases_take_a_second_pass_of_planning(model):
    profile = model.profile
    assert profile.plan_ms(("original",) * 2, 2, 300, 400) == 0
    once = profile.plan_launch_ms + 1e-6 * profile.plan_cell_ns * 2 * 300 * 400
    assert profile.plan_ms(("original", SAWTOOTH), 2, 300, 400) == pytest.approx(once)
    phases = 1e-6 * 300 * (2 * profile.phase_row_ns + profile.phase_slot_ns)
    assert profile.plan_ms((SAWTOOTH, RESYNC), 2, 300, 400) == pytest.approx(2 * once + phases)


def test_planning_is_paid_for(model):
    small = random_mask(0, (1, 200, 200))
    dear = dataclasses.replace(model, profile=dataclasses.replace(model.profile, plan_launch_ms=9))
    assert Guard(dear).decide_mask(small).policies == ("original",)
    assert Guard(dear).decide_mask(small, uses=1e6).policies != ("original",)


def test_phases_are_planned_where_a_plan_is_used_often(model, video):
    head = [dataclasses.replace(video[0], hit_sawtooth=0.9)]
    once, often = (Guard(model).decide(head, 128, 128, uses) for uses in (1, 1000))
    assert once.policies == (SAWTOOTH,)
    assert often.policies == (RESYNC,)
    assert often.win_frac > once.win_frac > 0


def test_hysteresis(model, video):
    def with_hits(original, sawtooth):
        return [dataclasses.replace(video[0], hit_original=original, hit_sawtooth=sawtooth)]

    free = dict.fromkeys(("plan_launch_ms", "plan_cell_ns", "phase_row_ns", "phase_slot_ns"), 0.0)
    model = dataclasses.replace(model, profile=dataclasses.replace(model.profile, **free))
    guard = Guard(model)
    lockstep = model.hit(video[0], RESYNC, 600)
    assert guard.decide(with_hits(0.3, lockstep + 0.004), 128, 128).policies == (SAWTOOTH,)
    kept = guard.decide(with_hits(0.3, lockstep - 0.004), 128, 128)
    assert kept.policies == (SAWTOOTH,)
    assert "kept from before" in kept.explain()
    assert guard.decide(with_hits(0.3, lockstep - 0.2), 128, 128).policies == (RESYNC,)
    guard.forget()
    assert guard.decide(with_hits(0.3, lockstep - 0.004), 128, 128).policies == (RESYNC,)
    # What has come to lose against today's order isn't kept.
    flat = [dataclasses.replace(video[0], hit_original=0.999, tail_original=1.0, tail_nnz=1.2)]
    assert guard.decide(flat, 128, 128).policies == ("original",)


def test_energy_is_an_objective(model, video):
    decision = Guard(model, "energy").decide(video, 128, 128)
    (head,) = decision.heads
    assert head.chosen.energy_j < head.original.energy_j
    with pytest.raises(InputError, match="Did you mean 'energy'"):
        Guard(model, "energi")


def test_empty_heads_and_few_rows(model):
    dense = np.zeros((3, 5, 7), bool)
    dense[1] = True
    decision = Guard(model).decide_mask(BlockMask.from_dense(dense))
    assert decision.policies == ("original",) * 3
    nothing = Guard(model).decide_mask(BlockMask.from_dense(np.zeros((1, 2, 2), bool)))
    assert nothing.win_frac == 0.0


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_a_guard_profile(name):
    profile = load_guard_profile(name)
    assert profile.device == name
    assert profile.calibrated_on
    assert profile.source == ("measured" if name == "h200" else "simulated")
    assert CostModel.make(name).capacity_blocks(128) > 10


def test_profiles_on_disk(tmp_path):
    assert set(guard_profile_names()) == set(device_names())
    profile = load_guard_profile("h200")
    path = tmp_path / "mine.toml"
    path.write_text(profile.to_toml())
    assert load_guard_profile(str(path)) == profile
    for text, message in (
        (profile.to_toml().replace("guard/1", "guard/9"), "expected 'wavealign.guard/1'"),
        (profile.to_toml().replace("capacity_frac", "capacity"), "has no 'capacity_frac'"),
        (profile.to_toml().replace("measured", "guessed", 1), "expected measured or simulated"),
        (profile.to_toml().replace("margin_frac = ", "margin_frac = -"), "number from 0 up"),
        ("=", "is not TOML"),
    ):
        bad = tmp_path / f"bad{len(message)}{len(text)}.toml"
        bad.write_text(text)
        with pytest.raises(InputError, match=message):
            load_guard_profile(str(bad))
    with pytest.raises(InputError, match="unknown guard profile 'h2000'"):
        load_guard_profile("h2000")
    with pytest.raises(InputError, match="no such file"):
        load_guard_profile(str(tmp_path / "none.toml"))


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def test_guard_command(tmp_path):
    path = tmp_path / "masks.npz"
    save_mask(path, random_mask(2, (3, 300, 280), 0.3))
    text = run("guard", "--mask", path, "--device", "h200", "--heads", "0,2").stdout
    assert [line.split(":")[0] for line in text.splitlines()[:2]] == ["head 0", "head 2"]
    assert "ms of planning" in text
    rows = [json.loads(x) for x in run("guard", "--mask", path, "--json").stdout.splitlines()]
    assert [row["head"] for row in rows] == [0, 1, 2]
    assert rows[0]["schema"] == "wavealign.guard.decision/1"
    assert {"policy", "win_frac", "chosen", "original", "statistics"} <= rows[0].keys()
    assert "unknown" in run("guard", "--mask", path, "--device", "h201", code=2).output
    assert "objective" in run("guard", "--mask", path, "--objective", "x", code=2).output


def test_calibrating_the_guard(tmp_path):
    masks = []
    for seed, density in ((0, 0.3), (1, 0.15)):
        masks.append(tmp_path / f"m{seed}.npz")
        save_mask(masks[-1], random_mask(seed, (1, 400, 700), density))
    out = tmp_path / "guard.toml"
    simulate = [part for mask in masks for part in ("--simulate", mask)]
    done = run("calibrate", "--guard", "--device", "a100", *simulate, "--out", out)
    assert "simulated: 6 runs, hit ratio" in done.stdout
    profile = load_guard_profile(str(out))
    assert profile.source == "simulated"
    assert "6 simulated runs (m0.npz, m1.npz)" in profile.calibrated_on
    row = run("calibrate", "--guard", "--device", "a100", *simulate, "--json").stdout
    assert json.loads(row)["hit_points"] < 5
    for arguments, message in (
        (["--guard"], "nothing to fit"),
        (["--guard", "--simulate", masks[0]], "at least two masks"),
        (["--simulate", masks[0]], "goes with --guard"),
        ([], "--runs is missing"),
    ):
        assert message in run("calibrate", "--device", "a100", *arguments, code=2).output
