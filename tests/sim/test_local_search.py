"""The search never loses, never cheats, and stops when told to."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import random_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.cli import main
from wavealign.errors import InputError
from wavealign.masks import BlockMask
from wavealign.masks.files import save_mask
from wavealign.order import Schedule, build_schedule
from wavealign.sim import Setup, local_search, run_schedule
from wavealign.sim.local_search import BATCH, START_ROWS, improve
from wavealign.sim.moves import Moves

SETUP = Setup.make("h200", wave=6, l2_bytes=24 * 65536, model="fast")
LEAST = len(START_ROWS) + 1 + BATCH + 2


def score(mask, schedule, objective="time", setup=SETUP):
    result = run_schedule(mask, schedule, setup)
    return result.time_ms if objective == "time" else result.hbm_read_bytes


@pytest.mark.parametrize("objective", ["time", "reads"])
@pytest.mark.parametrize("policy", ["original", "lockstep(seed=4)", "svd+nnz/shuffled+sawtooth"])
def test_what_it_finds_is_what_the_simulator_says(policy, objective):
    mask = random_mask(1, (3, 40, 36))
    found = improve(mask, policy, SETUP, 200, objective=objective, seed=2)
    found.schedule.check(mask)
    assert found.best == pytest.approx(score(mask, found.schedule, objective))
    start = build_schedule(mask, found.start_policy, 6, seed=2)
    assert found.start == pytest.approx(score(mask, start, objective))
    own = score(mask, build_schedule(mask, policy, 6, seed=2), objective)
    assert found.best <= found.start <= own
    if objective == "reads":
        assert found.best < found.start
    assert found.evaluations <= 200
    assert found.start_policy in found.schedule.policy
    assert "improved" in found.schedule.policy
    with pytest.raises(InputError):
        build_schedule(mask, found.schedule.policy, 6)


def test_seed_and_threads():
    mask = random_mask(2, (2, 40, 48))
    a, b, c = (
        improve(mask, "nnz", SETUP, 150, objective="reads", seed=seed, jobs=jobs)
        for seed, jobs in ((1, 1), (1, 3), (2, 1))
    )
    assert np.array_equal(a.schedule.row_order, b.schedule.row_order)
    assert (a.best, a.evaluations) == (b.best, b.evaluations)
    assert not np.array_equal(a.schedule.row_order, c.schedule.row_order)


def test_it_reaches_the_optimum_where_that_can_be_enumerated():
    """Six rows on two workers: all 720 orders are simulated."""
    mask = random_mask(3, (1, 6, 20))
    setup = Setup.make("h200", wave=2, l2_bytes=6 * 65536, model="fast")
    for objective in ("time", "reads"):
        best = min(
            score(
                mask,
                Schedule(np.array([order], np.int32), mask.indptr, mask.indices, mask.shape, ""),
                objective,
                setup,
            )
            for order in itertools.permutations(range(6))
        )
        found = improve(mask, "random", setup, 400, objective=objective)
        assert found.best == pytest.approx(best)


def test_longer_searches_find_no_less_on_average():
    masks = [random_mask(seed, (1, 48, 40)) for seed in range(4)]
    short, long = (
        np.mean([improve(m, "nnz", SETUP, n, objective="reads").best for m in masks])
        for n in (LEAST, 300)
    )
    assert long < short


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_every_move_is_a_permutation(rows, wave, seed):
    rng = np.random.default_rng(seed)
    moves = Moves(rng.integers(0, 5, rows), wave, [rng.permutation(rows).astype(np.int32)] * 2)
    order = rng.permutation(rows).astype(np.int32)
    before = order.copy()
    for _ in range(20):
        new = moves.propose(order, rng)
        assert np.array_equal(np.sort(new), np.arange(rows))
        assert np.array_equal(order, before)
        order = before = new.copy()


@pytest.mark.parametrize(
    "dense",
    [np.zeros((1, 8, 8), bool), np.ones((2, 1, 4), bool), np.ones((1, 3, 4), bool)],
    ids=["empty", "one row", "fewer rows than workers"],
)
def test_heads_with_nothing_to_find(dense):
    mask = BlockMask.from_dense(dense)
    found = improve(mask, "lockstep", SETUP, 60)
    found.schedule.check(mask)
    assert found.best <= found.start


def test_wrong_questions():
    mask = random_mask(shape=(2, 20, 20))
    with pytest.raises(InputError, match="expected at least 23: 11 orders to start from, and 6"):
        improve(mask, "lockstep", SETUP, 10)
    with pytest.raises(InputError, match="unknown objective 'speed'"):
        improve(mask, "lockstep", SETUP, 100, objective="speed")
    with pytest.raises(InputError, match="unknown policy"):
        improve(mask, "lockstpe", SETUP, 100)


@pytest.mark.parametrize("after", [30, 90])
def test_ctrl_c_keeps_the_best_so_far(after):
    mask = random_mask(1, (2, 40, 36))

    def interrupt(done, best):
        if done >= after:
            raise KeyboardInterrupt  # as if it came between two simulations

    found = improve(mask, "nnz", SETUP, 300, progress=interrupt)
    found.schedule.check(mask)
    assert found.interrupted
    assert found.evaluations < 300
    assert found.best <= found.start
    assert found.best == pytest.approx(score(mask, found.schedule))


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_order_improve(tmp_path):
    path, out = tmp_path / "m.npz", tmp_path / "s.npz"
    mask = random_mask(1, (2, 40, 36))
    save_mask(path, mask)
    command = ["order", "--mask", path, "--policy", "lockstep", "--out", out]
    command += ["--wave", 6, "--l2", "1536KiB"]
    result = run(*command, "--improve", 120, "--objective", "reads", "--json")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    search = row["search"]
    assert search["objective"] == "reads"
    assert search["best"] <= search["start"]
    assert not search["interrupted"]
    schedule = Schedule.load(out)
    schedule.check(mask)
    assert schedule.policy == row["policy"]
    assert "improved" in row["policy"]
    scored = run(
        "sim", "--mask", path, "--schedule", out, "--policy", "nnz", "--device", "h100", "--wave",
        6, "--l2", "1536KiB", "--json", "--no-belady",
    )  # fmt: skip
    best = [json.loads(line) for line in scored.stdout.splitlines()][1]
    assert best["hbm_read_bytes"] == search["best"]
    text = run(*command, "--improve", 120).stdout
    assert "improved" in text
    assert " ms" in text
    assert run(*command, "--improve", 5).exit_code == 2
    result = run(*command, "--objective", "time")
    assert result.exit_code == 2
    assert "--objective needs --improve" in result.stderr


def test_order_improve_interrupted(tmp_path, monkeypatch):
    path, out = tmp_path / "m.npz", tmp_path / "s.npz"
    mask = random_mask(1, (2, 40, 36))
    save_mask(path, mask)
    evaluate, interrupted = local_search._Search.evaluate, []

    def tired(self, window, orders):
        if self.spent > 40 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return evaluate(self, window, orders)

    monkeypatch.setattr(local_search._Search, "evaluate", tired)
    command = ["order", "--mask", path, "--policy", "nnz", "--out", out, "--improve", 200]
    result = run(*command, "--wave", 6, "--l2", "1536KiB", "--json", "--quiet")
    assert result.exit_code == 1, result.output
    assert "interrupted" in result.stderr
    assert json.loads(result.stdout)["search"]["interrupted"]
    Schedule.load(out).check(mask)
