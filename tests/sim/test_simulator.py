from __future__ import annotations

import dataclasses

import numpy as np
import oracles
import pytest
from helpers import dense_masks, random_mask, row_lists
from hypothesis import given, settings
from hypothesis import strategies as st

import wavealign
from wavealign.errors import InputError
from wavealign.masks import BlockMask
from wavealign.order import build_schedule
from wavealign.sim import Setup, load_device, run_schedule, simulate
from wavealign.sim._kernels import stream_lru
from wavealign.sim.campaign import Campaign, Task

POLICIES = [
    f"{rows}/{visits}"
    for rows in ("original", "random", "nnz")
    for visits in (
        "ascending",
        "shuffled",
        "sawtooth",
        "phased",
        "shuffled+sawtooth",
        "shuffled+phased",
    )
]


def play(schedule, workers, capacity, hit, miss, start):
    """The fast and the slow simulator's answers."""
    N = schedule.shape[2]
    fast = stream_lru(
        schedule.row_order,
        schedule.indptr,
        schedule.indices,
        N,
        workers,
        capacity,
        hit,
        miss,
        start,
    )
    *slow, trace = oracles.stream(
        schedule.row_order.tolist(), row_lists(schedule), N, workers, capacity, hit, miss, start
    )
    return [part.tolist() for part in fast], slow, trace


@settings(deadline=None, max_examples=400)
@given(
    dense=dense_masks(),
    policy=st.sampled_from(POLICIES),
    workers=st.integers(1, 16),
    capacity=st.integers(1, 40),
    hit=st.integers(1, 5),
    stall=st.integers(0, 9),
    start=st.integers(0, 11),
)
def test_against_the_slow_simulator(dense, policy, workers, capacity, hit, stall, start):
    schedule = build_schedule(BlockMask.from_dense(dense), policy, workers)
    fast, slow, trace = play(schedule, workers, capacity, hit, hit + stall, start)
    assert fast == slow
    assert sum(fast[0]) == oracles.stack_distance_misses(trace, capacity)


@pytest.mark.parametrize("policy", ["original", "random/shuffled", "lockstep"])
@pytest.mark.parametrize("workers", [7, 132])
def test_against_the_slow_simulator_at_size(policy, workers):
    schedule = build_schedule(random_mask(1, (3, 90, 150)), policy, workers)
    fast, slow, trace = play(schedule, workers, 40, 128, 171, 58)
    assert fast == slow
    assert sum(fast[0]) == oracles.stack_distance_misses(trace, 40)


def launch(dense, policy="original", workers=1, capacity=1, row_start_blocks=0.0, **device_terms):
    """A fast-model Result at round figures: 1000 cycles a block at 1 GHz, blocks of 64 KiB."""
    device = load_device("a100")  # no power budget: the clock is the maximum
    kernel = dataclasses.replace(
        device.kernels["fa2"],
        block_cycles={(128, 128): 1000.0},
        row_start_blocks=row_start_blocks,
    )
    terms = {"clock_max_ghz": 1.0, "hbm_bytes_per_s": 1e15, "hbm_usable_frac": 1.0}
    device = dataclasses.replace(device, kernels={"fa2": kernel}, **{**terms, **device_terms})
    mask = BlockMask.from_dense(dense)
    setup = Setup.make(device, wave=workers, l2_bytes=capacity * 65536, model="fast")
    return run_schedule(mask, build_schedule(mask, policy, workers), setup)


def test_dense_rows_one_after_another_never_hit_when_l2_is_short():
    result = launch(np.ones((1, 6, 20)), workers=1, capacity=19)
    assert result.l2_hit_frac == 0.0
    assert result.hbm_read_bytes == result.l2_requested_bytes == 6 * 20 * 65536
    assert launch(np.ones((1, 6, 20)), workers=1, capacity=20).l2_hit_frac == pytest.approx(5 / 6)


def test_dense_rows_in_lockstep_read_each_block_once_a_wave():
    result = launch(np.ones((1, 12, 50)), workers=4, capacity=1)
    assert result.l2_hit_frac == pytest.approx(1 - 1 / 4)
    assert result.time_ms == pytest.approx(3 * 50 * 1e-3)
    assert result.imbalance_frac == 0.0


def test_sawtooth_saves_what_l2_still_holds():
    plain = launch(np.ones((1, 8, 50)), "original", workers=4, capacity=20)
    turned = launch(np.ones((1, 8, 50)), "original/sawtooth", workers=4, capacity=20)
    assert plain.hbm_read_bytes - turned.hbm_read_bytes == 20 * 65536


def test_heads_share_nothing_but_capacity():
    dense = np.ones((3, 2, 5))
    result = launch(dense, workers=2, capacity=100)
    assert result.hbm_read_bytes == result.compulsory_bytes == 3 * 5 * 65536


def test_rows_take_time_to_start():
    result = launch(np.ones((1, 2, 10)), workers=1, row_start_blocks=0.5)
    assert result.time_ms == pytest.approx(1e-6 * (2 * 500 + 20 * 1000))


def test_time_is_never_less_than_hbm_needs():
    result = launch(np.ones((1, 4, 10)), "random/shuffled", 2, hbm_bytes_per_s=1e9)
    assert result.time_ms == pytest.approx(result.hbm_read_bytes / 1e9 * 1e3)
    assert result.bound == "hbm"


def test_imbalance_is_the_idle_share_at_the_end():
    dense = np.zeros((1, 2, 10), dtype=bool)
    dense[0, 0] = True
    dense[0, 1, :4] = True
    assert launch(dense, workers=2).imbalance_frac == pytest.approx(1 - 7 / 10)


def test_bytes_of_a_ragged_last_block():
    mask = random_mask(4, (2, 9, 7), tokens=(9 * 128, 6 * 128 + 80))
    result = simulate(mask, "original", "h200", l2_bytes=65536 * 6, wave=2)
    per_token = 2 * 128 * 2
    last = int((mask.indices == 6).sum())
    assert result.l2_requested_bytes == per_token * (128 * (mask.nnz - last) + 80 * last)
    distinct = {(h, j) for h, rows in enumerate(row_lists(mask)) for row in rows for j in row}
    expected = sum(80 if j == 6 else 128 for _, j in distinct)
    assert result.compulsory_bytes == per_token * expected


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 30), (2, 30, 1), (1, 3, 17)])
def test_odd_shapes(shape):
    result = simulate(BlockMask.from_dense(np.ones(shape)), "lockstep", "h200")
    assert result.hbm_read_bytes == result.compulsory_bytes


def test_masks_without_blocks():
    nothing = simulate(BlockMask.from_dense(np.zeros((2, 5, 5))), "svd+nnz", "h200")
    assert (nothing.l2_hit_frac, nothing.l2_requested_bytes) == (None, 0)
    assert nothing.time_ms > 0  # rows start and end all the same
    half = np.zeros((2, 5, 5))
    half[1, 2:] = 1
    assert (
        simulate(BlockMask.from_dense(half), "spectral+nnz", "h200").compulsory_bytes == 5 * 65536
    )


def test_result_row():
    mask = random_mask()
    result = simulate(mask, "lockstep", "h200", seed=7, name="m")
    assert (result.source, result.policy, result.mask, result.seed) == (
        "simulated",
        "lockstep",
        "m",
        7,
    )
    assert (result.device, result.kernel, result.wave, result.head) == ("h200", "fa4", 132, None)
    assert (result.mask_digest, result.heads) == (mask.digest, "0-1")
    assert (result.model, result.regime, result.belady_bytes) == ("full", "single", None)
    fast = simulate(mask, "lockstep", "h200", model="fast")
    assert fast.lts_sector_hit_frac is fast.fabric_bytes is None
    assert result.version == wavealign.__version__
    assert wavealign.RunResult.from_json(result.to_json()) == result


def test_result_rows_of_other_kinds_are_refused():
    line = simulate(random_mask()).to_json()
    for text, message in (
        ("{", "not JSON"),
        ("[]", "not of schema"),
        (line.replace("run/1", "run/2"), "not of schema"),
        (line.replace('"seed"', '"sead"'), "lacks seed"),
    ):
        with pytest.raises(InputError, match=message):
            wavealign.RunResult.from_json(text)


def test_schedules_are_simulated_as_they_are_and_checked():
    mask = random_mask()
    schedule = build_schedule(mask, "lockstep", 132)
    assert simulate(mask, schedule, "h200") == simulate(mask, "lockstep", "h200")
    with pytest.raises(InputError, match="the schedule is for a mask"):
        simulate(random_mask(shape=(2, 9, 24)), schedule)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "h2000"}, "unknown device 'h2000'. Did you mean 'h200'.*Valid: a100"),
        ({"kernel": "fa5"}, "unknown kernel on h100: 'fa5'. Did you mean 'fa4'"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"model": "fats"}, "unknown model 'fats'. Did you mean 'fast'"),
        ({"regime": "stead"}, "unknown regime 'stead'. Did you mean 'steady'"),
        ({"l2_bytes": 65535, "device": "a40"}, "smaller than one K/V block of 65536 bytes"),
        ({"l2_bytes": 131071}, "smaller than one K/V block.*in each of 2 partitions"),
        ({"l2_bytes": -1}, "l2_bytes is -1"),
        ({"wave": 0}, "wave is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"policy": "nzz"}, "unknown policy 'nzz'. Did you mean 'nnz'"),
    ],
)
def test_bad_terms(options, text):
    with pytest.raises(InputError, match=text):
        simulate(random_mask(), **options)


def test_campaign_rows_come_in_order_and_dont_depend_on_threads():
    mask = random_mask(shape=(3, 60, 50))
    setup = Setup.make("h200", l2_bytes=20 * 65536, wave=8)
    tasks = [
        Task(policy, head) for head in (None, 0, 2) for policy in ("random", "svd", "lockstep")
    ]
    runs = []
    for workers in (1, 3):
        rows = []
        Campaign(mask, setup, [4, 5, 9], "m").run(tasks, workers, rows.append)
        runs.append([row.to_json() for row in rows])
    assert runs[0] == runs[1]
    assert [(r.policy, r.head) for r in rows] == [
        (t.policy, None if t.head is None else (4, 5, 9)[t.head]) for t in tasks
    ]
    assert {r.heads for r in rows} == {"4-5,9", "4", "9"}
    alone = simulate(mask.select_heads([2]), "lockstep", "h200", l2_bytes=20 * 65536, wave=8)
    assert rows[-1].hbm_read_bytes == alone.hbm_read_bytes


def test_campaign_hands_over_what_had_finished_before_an_error():
    rows = []

    def take(row):
        rows.append(row)
        if len(rows) == 2:
            raise KeyboardInterrupt

    tasks = [Task("original")] * 6
    campaign = Campaign(random_mask(), Setup.make("h200"), [0, 1], "m")
    with pytest.raises(KeyboardInterrupt):
        campaign.run(tasks, 1, take)
    assert 2 <= len(rows) <= 6
