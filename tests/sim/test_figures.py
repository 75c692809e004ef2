"""Figures of a simulated launch by hand: each by its definition, on cards that make it show."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from helpers import random_mask

from wavealign.masks import BlockMask, save_mask
from wavealign.order import build_schedule
from wavealign.runs.ranking import as_good, rank
from wavealign.sim import Setup, load_device, run_schedule, simulate, traffic
from wavealign.sim.bounds import bounds
from wavealign.sim.power import Work, clock_and_energy
from wavealign.sim.recordings import load_recordings
from wavealign.sim.traffic import launch_traffic, step_times

BLOCK = 65536  # bytes of K and V of 128 tokens of 128 elements


def card(cap_w=None, ctas=1, tiles=None, **terms):
    """An H200 of other figures."""
    h200 = load_device("h200")
    kernel = dataclasses.replace(
        h200.kernels["fa4"],
        ctas_per_sm=ctas,
        block_cycles=tiles or h200.kernels["fa4"].block_cycles,
    )
    power = dataclasses.replace(h200.power, cap_w=cap_w) if cap_w else h200.power
    return dataclasses.replace(h200, kernels={"fa4": kernel}, power=power, **terms)


def played(mask, setup, policy="original"):
    schedule = build_schedule(mask, policy, setup.wave)
    return schedule, launch_traffic(mask, schedule, setup)


def test_sizes_of_a_setup():
    assert Setup.make(card(ctas=3)).wave == 3 * 132
    mask = random_mask()
    for held, size in ((2, 3 * BLOCK - 1), (3, 3 * BLOCK), (3, 4 * BLOCK - 1)):
        assert Setup.make("h200", l2_bytes=size).capacity_blocks(mask) == held


def test_each_workers_speed_is_dealt_as_the_profile_was_fitted():
    """The sixteenth of a percent that a fit leaves holds for this dealing (docs/fidelity.md)."""
    times = step_times(Setup.make("h200"))
    quantiles = np.random.default_rng(4).permutation(132)
    assert np.array_equal(np.argsort(np.argsort(times, kind="stable")), quantiles)


@pytest.mark.parametrize("model", ["full", "fast"])
def test_a_ragged_last_block_is_as_short_in_reads(model):
    mask = random_mask(4, (2, 9, 7), tokens=(9 * 128, 6 * 128 + 80))
    result = simulate(mask, "original", "h200", model=model)
    distinct = {(h, j) for h in range(2) for j in mask.head(h).indices.tolist()}
    tokens = sum(80 if j == 6 else 128 for _, j in distinct)
    assert result.hbm_read_bytes == result.compulsory_bytes == 512 * tokens


def test_a_crossing_moves_half_a_block_and_costs_energy():
    mask = BlockMask.from_dense(np.ones((1, 1, 20)))
    setup = Setup.make("h200", wave=1)
    _, found = played(mask, setup)
    # One row: the half of each block that is at home in the other partition comes from there.
    assert found.crossing_bytes == 20 * BLOCK // 2
    work = found.work(mask, setup)
    assert work.l2_bytes == found.requested_bytes + found.crossing_bytes == 30 * BLOCK
    assert (work.hbm_bytes, work.cycles) == (20 * BLOCK, found.cycles)


def test_the_clock_and_hbms_bytes_a_cycle_agree():
    """More than one round: at the clock that was found, the launch takes the same cycles."""
    mask = random_mask(shape=(1, 300, 400))
    setup = Setup.make(card(hbm_bytes_per_s=1e12), l2_bytes=8 * BLOCK)
    schedule, found = played(mask, setup, "random/shuffled")
    guess = setup.timing(traffic._guess(mask, setup)).clock_ghz
    clock_ghz = setup.timing(found.work(mask, setup)).clock_ghz
    assert abs(clock_ghz / guess - 1) > 0.05  # the first round is off
    again = traffic._full_at(mask, schedule, setup, clock_ghz)
    assert again.cycles == pytest.approx(found.cycles, rel=0.01)


def test_only_the_usable_share_of_hbms_bandwidth_counts():
    mask = random_mask(shape=(1, 300, 400))
    one, two = (
        Setup.make(card(hbm_bytes_per_s=4e11 / part, hbm_usable_frac=part), l2_bytes=8 * BLOCK)
        for part in (1.0, 0.5)
    )
    assert played(mask, one)[1] == played(mask, two)[1]
    assert played(mask, one)[1].hbm_cycles > 0
    slow = card(hbm_bytes_per_s=1e10, hbm_usable_frac=0.5)
    result = simulate(mask, "original", slow, model="fast")
    assert result.time_ms == pytest.approx(result.hbm_read_bytes / 5e9 * 1e3)


def test_the_floor_of_hbm_has_a_time_and_no_energy():
    result = simulate(random_mask(), "original", card(hbm_bytes_per_s=1e9), model="fast")
    assert (result.bound, result.energy_j) == ("hbm", None)
    assert simulate(random_mask(), "original", card(), model="fast").energy_j > 0


def test_bandwidth_binds_from_a_twentieth_of_the_cycles():
    mask, named = random_mask(shape=(1, 300, 400)), {}
    for bytes_per_clock in (9000.0, 4000.0, 2000.0, 1500.0, 1000.0):
        setup = Setup.make(card(l2_bytes_per_clock=bytes_per_clock))
        schedule, found = played(mask, setup, "nnz")
        named[found.l2_cycles / found.cycles] = run_schedule(mask, schedule, setup).bound
    assert any(0.05 < share < 0.45 for share in named)
    assert any(0 < share < 0.05 for share in named)
    for share, bound in named.items():
        assert (bound == "l2") == (share > 0.05)


def test_dense_attention_by_hand():
    """Equal rows, wave after wave; each wave reads K and V once, or a head does that L2 holds."""
    mask, wave = BlockMask.from_dense(np.ones((2, 9, 20))), 4
    for held, passes in ((20, 2), (19, 5)):
        setup = Setup.make(card(cap_w=110), l2_bytes=held * BLOCK, wave=wave)
        schedule, found = played(mask, setup)
        waves = -(-2 * 9 // wave)
        assert waves == 5
        step = setup.step_cycles(mask)
        cycles = waves * (20 + setup.kernel.row_start_blocks) * step
        work = Work(cycles, 4 * 128**3 * 2 * 9 * 20, passes * 20 * BLOCK, 2 * 9 * 20 * BLOCK)
        expected = clock_and_energy(setup.device.power, 1.8, work, "single")
        assert expected.power_bound
        assert bounds(mask, schedule, setup, found, 1.0).dense_ms == expected.time_ms


def test_the_compute_limit_reads_what_it_must():
    mask = random_mask(shape=(2, 50, 40))
    times = []
    for hbm_pj in (0.0, 2000.0):
        device = card(cap_w=150)
        power = dataclasses.replace(device.power, hbm_pj_per_byte=hbm_pj)
        setup = Setup.make(dataclasses.replace(device, power=power), wave=8)
        schedule, found = played(mask, setup)
        times.append(bounds(mask, schedule, setup, found, np.inf).limit_ms)
    assert times[1] > 1.01 * times[0]


def test_the_ridge_is_by_the_datasheet():
    device = load_device("h200")
    assert device.ridge_flop_per_byte == pytest.approx(132 * 4096 * 1.8e9 / 4.8e12)


def test_the_nearest_tile_is_by_queries_first():
    tiles = {(64, 256): 1000.0, (128, 64): 3000.0}
    kernel = card(tiles=tiles).kernels["fa4"]
    assert kernel.step_cycles(64, 64, 128) == 1000.0 / 4
    assert kernel.step_cycles(96, 64, 128) == 3000.0 * 96 / 128  # as far from both


def test_times_within_a_hundredth_have_no_order():
    assert (rank([1, 2], [1.0, 1.02]).agree, rank([2, 1], [1.0, 1.02]).disagree) == (1, 1)
    tie = rank([1, 2], [1.0, 1.009])
    assert (tie.agree, tie.disagree, tie.kendall_tau) == (0, 0, None)
    assert as_good(1.0, 1.009)
    assert not as_good(1.0, 1.02)


@pytest.mark.parametrize("ragged_first", [False, True])
def test_kernels_that_begin_with_the_ragged_block_are_replayed_so(tmp_path, ragged_first):
    mask = random_mask(1, (1, 20, 30), tokens=(20 * 128, 29 * 128 + 5))
    save_mask(tmp_path / "m.npz", mask)
    setup = Setup.make("h200", wave=8)
    schedule = build_schedule(mask, "nnz", 8)
    row = run_schedule(mask, schedule, setup, name="m")
    row = row.replaced(source="measured", model=None, ragged_kv_first=ragged_first)
    (tmp_path / "runs.jsonl").write_text(row.to_json())
    (found,) = load_recordings(tmp_path / "runs.jsonl")
    lists = [
        found.schedule.indices[a:b].tolist() for a, b in itertools.pairwise(found.schedule.indptr)
    ]
    holds = [own for own in lists if 29 in own]
    assert holds
    for own in holds:
        rest = own[1:] if ragged_first else own[:-1]
        assert own[0 if ragged_first else -1] == 29
        assert rest == sorted(rest)
