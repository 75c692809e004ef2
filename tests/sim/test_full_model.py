from __future__ import annotations

import dataclasses
import math

import numpy as np
import oracles
import pytest
from helpers import DATA, dense_masks, random_mask, row_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.masks import BlockMask, load_mask
from wavealign.order import build_schedule
from wavealign.order._kernels import list_schedule
from wavealign.sim import Setup, device_names, load_device, run_schedule, simulate
from wavealign.sim._kernels import stream_lru
from wavealign.sim._partition_kernels import stream_partitioned
from wavealign.sim.bounds import bounds
from wavealign.sim.power import Work, clock_and_energy
from wavealign.sim.traffic import FULL_TICKS, launch_traffic, start_time, step_times

INF = math.inf


def fast_and_slow(schedule, steps, start, half_miss, partitions, capacity, window, l2, hbm):
    fast = stream_partitioned(
        schedule.row_order,
        schedule.indptr,
        schedule.indices,
        schedule.shape[2],
        np.array(steps, np.uint64),
        np.uint64(start),
        np.uint64(half_miss),
        partitions,
        capacity,
        window,
        l2,
        hbm,
    )
    slow = oracles.partitioned(
        schedule.row_order.tolist(),
        row_lists(schedule),
        schedule.shape[2],
        steps,
        start,
        half_miss,
        partitions,
        capacity,
        window,
        l2,
        hbm,
    )
    return [part.tolist() for part in fast], list(slow)


@settings(deadline=None, max_examples=300)
@given(
    dense=dense_masks(),
    policy=st.sampled_from(["original", "random/shuffled", "nnz/sawtooth", "lockstep"]),
    workers=st.integers(1, 9),
    partitions=st.integers(1, 2),
    capacity=st.integers(2, 40),
    start=st.integers(0, 5 << 16),
    half_miss=st.integers(0, 3 << 16),
    window=st.integers(1, 9),
    limits=st.tuples(st.sampled_from([1.5, 7.0, INF]), st.sampled_from([0.7, 3.0, INF])),
    seed=st.integers(0, 9),
)
def test_against_the_slow_simulator(
    dense, policy, workers, partitions, capacity, start, half_miss, window, limits, seed
):
    schedule = build_schedule(BlockMask.from_dense(dense), policy, workers)
    steps = np.random.default_rng(seed).integers(1 << 16, 6 << 16, workers).tolist()
    fast, slow = fast_and_slow(
        schedule, steps, start, half_miss, partitions, capacity, window, *limits
    )
    assert fast[:4] == slow[:4]
    assert fast[4] == pytest.approx(slow[4], rel=1e-12)
    assert fast[5] == pytest.approx(slow[5], rel=1e-12)


@settings(deadline=None)
@given(dense=dense_masks(), workers=st.integers(1, 9), capacity=st.integers(1, 40))
def test_neutral_figures_make_it_the_plain_lru(dense, workers, capacity):
    schedule = build_schedule(BlockMask.from_dense(dense), "nnz/shuffled", workers)
    columns = schedule.shape[2]
    lists = schedule.row_order, schedule.indptr, schedule.indices
    steps = np.full(workers, 128 << 16, np.uint64)
    full = stream_partitioned(
        *lists, columns, steps, np.uint64(58 << 16), np.uint64(0), 1, 2 * capacity, 128, INF, INF
    )
    plain = stream_lru(*lists, columns, workers, capacity, 128, 128, 58)
    assert (full[0] == 2 * plain[0]).all()
    assert (full[1] == 2 * plain[1]).all()
    assert (full[3] == plain[2]).all()
    assert full[4].tolist() == plain[2].tolist()


def test_neutral_profile_makes_both_models_agree():
    device = load_device("a40")  # one partition, equal speeds, nothing exposed
    kernel = dataclasses.replace(device.kernels["fa2"], row_start_blocks=0.5)  # whole ticks in both
    device = dataclasses.replace(device, kernels={"fa2": kernel})
    mask = random_mask(shape=(2, 60, 70))
    terms = {"l2_bytes": 20 * 65536, "wave": 16}
    full, fast = (simulate(mask, "nnz", device, model=m, **terms) for m in ("full", "fast"))
    assert full.hbm_read_bytes == fast.hbm_read_bytes
    assert full.imbalance_frac == pytest.approx(fast.imbalance_frac, abs=1e-12)


@pytest.mark.parametrize("model", ["full", "fast"])
@pytest.mark.parametrize("policy", ["original", "random/shuffled", "lockstep"])
def test_bounds_lie_where_they_must(model, policy):
    mask = random_mask(3, (2, 120, 140), tokens=(120 * 128, 140 * 128 - 40))
    setup = Setup.make("h200", l2_bytes=40 * 65536, wave=16, model=model)
    schedule = build_schedule(mask, policy, 16)
    result = run_schedule(mask, schedule, setup, belady=True)
    assert result.compulsory_bytes <= result.belady_bytes <= result.hbm_read_bytes
    assert result.hbm_read_bytes <= result.l2_requested_bytes
    assert result.limit_ms <= result.time_ms
    assert 0 < result.lts_sector_hit_frac <= 1 if model == "full" else True
    assert result.intensity_flop_per_byte == pytest.approx(
        4 * 128**3 * mask.nnz / result.hbm_read_bytes
    )


def test_compute_limit_is_the_list_schedule():
    mask = random_mask(shape=(2, 50, 40))
    setup, schedule = Setup.make("h200", wave=8), build_schedule(mask, "nnz", 8)
    steps, start = step_times(setup).astype(np.int64), int(start_time(setup))
    lists = row_lists(schedule)
    lengths = [len(lists[h][row]) for h in range(2) for row in schedule.row_order[h]]
    free, ends = [0] * 8, np.zeros(8, np.int64)
    dealt = oracles.list_schedule(lengths, free, steps.tolist(), start)
    starts, workers = list_schedule(np.array(lengths), ends, steps, start)
    assert list(zip(starts.tolist(), workers.tolist(), strict=True)) == dealt
    assert ends.tolist() == free
    cycles = max(free) / 2**16 / FULL_TICKS * setup.step_cycles(mask)
    traffic = launch_traffic(mask, schedule, setup)
    limit = bounds(mask, schedule, setup, traffic, math.inf)
    flops, requested = setup.flops(mask, mask.nnz), traffic.requested_bytes
    work = Work(cycles, flops, limit.compulsory_bytes, requested)
    expected = clock_and_energy(setup.device.power, setup.device.clock_max_ghz, work, "single")
    assert limit.limit_ms == expected.time_ms


def test_everything_resident_runs_at_the_compute_limit():
    mask = random_mask(shape=(1, 300, 60), density=0.5)
    result = simulate(mask, "nnz", "h200", model="fast")
    assert result.hbm_read_bytes == result.compulsory_bytes
    assert result.time_ms == pytest.approx(result.limit_ms, rel=1e-2)


def test_speeds_are_those_of_the_profile():
    setup = Setup.make("h200")
    ticks = step_times(setup) / 2**16 / FULL_TICKS
    assert ticks.mean() == pytest.approx(1, rel=1e-4)
    assert ticks.std() == pytest.approx(setup.kernel.sm_spread_frac, rel=0.05)
    assert (step_times(Setup.make("h200", model="fast")) == FULL_TICKS << 16).all()
    assert start_time(setup) == round(0.45 * FULL_TICKS * 2**16)


def test_copies_cost_capacity():
    """A set that fits L2 once but not twice is read again by two partitions, not by one."""
    dense = np.ones((1, 64, 30))
    hits = {}
    for partitions in (1, 2):
        device = dataclasses.replace(load_device("h200"), l2_partitions=partitions)
        result = simulate(
            BlockMask.from_dense(dense), "random/shuffled", device, l2_bytes=32 * 65536, wave=2
        )
        hits[partitions] = result.l2_hit_frac
    assert hits[1] == pytest.approx(1 - 1 / 64)
    assert hits[2] < hits[1]


def test_profiler_counts_a_crossing_twice():
    result = simulate(random_mask(shape=(1, 100, 120)), "original", "h200", l2_bytes=20 * 65536)
    assert result.fabric_bytes > 0
    assert result.lts_sector_hit_frac < result.l2_hit_frac


def test_hbm_bound_launches_stretch_and_say_so():
    device = dataclasses.replace(load_device("h200"), hbm_bytes_per_s=2e11)
    mask = random_mask(shape=(1, 300, 400))
    result = simulate(mask, "random/shuffled", device, l2_bytes=8 * 65536)
    assert result.bound == "hbm"
    assert result.time_ms >= result.hbm_read_bytes / (2e11 * device.hbm_usable_frac) * 1e3


def test_l2_bound_launches_say_so():
    device = dataclasses.replace(load_device("h200"), l2_bytes_per_clock=1000.0)
    result = simulate(random_mask(shape=(1, 300, 400)), "nnz", device)
    assert result.bound == "l2"
    assert result.time_ms > 1.5 * result.limit_ms


WORK = Work(cycles=4e7, flops=1.6e13, hbm_bytes=6e10, l2_bytes=1.6e11)


def test_clock_is_where_the_budget_is_spent():
    """A launch starts at f1, where P(f1) is the cap; the steady state runs at s times that."""
    power = load_device("h200").power
    steady = clock_and_energy(power, 1.98, WORK, "steady")
    assert steady.power_bound
    start_ghz = steady.clock_ghz / power.steady_clock_frac
    terms = power.terms(*dataclasses.astuple(WORK))
    assert power.drawn_w(start_ghz, *terms) == pytest.approx(power.cap_w, rel=1e-4)
    assert steady.time_ms == pytest.approx(WORK.cycles / steady.clock_ghz * 1e-6)
    assert steady.energy_j == pytest.approx(700 * steady.time_ms * 1e-3)
    single = clock_and_energy(power, 1.98, WORK, "single")
    assert steady.clock_ghz < single.clock_ghz < start_ghz
    assert steady.energy_j > single.energy_j


@pytest.mark.parametrize("launches", [1e-4, 1.0, 1e4])
def test_a_launch_runs_the_cycles_of_an_exponential_clock(launches):
    """The time solves cycles = integral of the sinking clock, from 1 launch's work to 10⁴."""
    power = load_device("h200").power
    work = Work(*(launches * value for value in dataclasses.astuple(WORK)))
    time_ms = clock_and_energy(power, 1.98, work, "single").time_ms
    s, tau_ms = power.steady_clock_frac, power.settle_ms
    start_ghz = clock_and_energy(power, 1.98, work, "steady").clock_ghz / s
    step_ms = time_ms / 10_000
    moments_ms = (np.arange(10_000) + 0.5) * step_ms
    clock_ghz = start_ghz * (s + (1 - s) * np.exp(-moments_ms / tau_ms))
    assert clock_ghz.sum() * step_ms * 1e6 == pytest.approx(work.cycles, rel=1e-3)


def test_clock_falls_with_hbm_reads_and_stops_at_its_maximum():
    power = load_device("h200").power
    more = dataclasses.replace(WORK, hbm_bytes=1e11)
    idle = dataclasses.replace(WORK, flops=1e11, hbm_bytes=0.0, l2_bytes=0.0)
    clocks = [clock_and_energy(power, 1.98, w, "single").clock_ghz for w in (idle, WORK, more)]
    assert clocks[0] == 1.98 > clocks[1] > clocks[2]
    free = clock_and_energy(power, 1.98, idle, "steady")
    assert (free.clock_ghz, free.power_bound) == (1.98, False)
    assert free.energy_j < 700 * free.time_ms * 1e-3


def test_no_power_budget_means_no_energy_and_the_highest_clock():
    timing = clock_and_energy(None, 1.41, WORK, "single")
    assert timing.energy_j is None
    assert timing.time_ms == pytest.approx(WORK.cycles / 1.41e6)
    result = simulate(random_mask(), "nnz", "a100")
    assert result.clock_ghz is result.energy_j is None


@pytest.mark.parametrize("device", device_names())
@pytest.mark.parametrize("block", [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_every_device_and_tile(device, block):
    mask = random_mask(shape=(1, 40, 50), block=block)
    for head_dim in (64, 128):
        result = simulate(mask, "lockstep", device, head_dim=head_dim, dtype="fp16")
        assert result.limit_ms <= result.time_ms
        assert result.bound in {"tensor", "power", "l2", "hbm"}


def test_lockstep_beats_original_on_natural_video():
    mask = load_mask(DATA / "xattention_75600.npz").mask
    rows = {p: simulate(mask, p, "h200", l2_bytes=8 * 2**20) for p in ("original", "lockstep")}
    assert rows["lockstep"].time_ms < rows["original"].time_ms
    assert rows["lockstep"].gap < rows["original"].gap
