from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import numpy as np
import oracles
import pytest
from click.testing import CliRunner
from helpers import dense_masks, random_mask, row_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.cli import main
from wavealign.cli.curve import CURVE_POLICIES
from wavealign.errors import InputError
from wavealign.masks import BlockMask, save_mask
from wavealign.order import build_schedule
from wavealign.sim import Setup
from wavealign.sim._kernels import stream_lru
from wavealign.sim._replay_kernels import (
    launch_trace,
    opt_misses,
    split_heads,
    stack_distances,
)
from wavealign.sim.curve import belady_read_bytes, curve_sizes, hit_curve

RECIPES = st.sampled_from(["original", "random", "nnz/sawtooth", "lockstep"])
BLOCK = 65536  # bytes of 128 tokens
TOKEN = BLOCK // 128


@st.composite
def traces(draw, max_keys=12, max_length=150):
    """Traces with and without locality; returns trace, keys, columns."""
    heads, columns = draw(st.integers(1, 3)), draw(st.integers(1, max_keys // 3))
    keys = heads * columns
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length = draw(st.integers(0, max_length))
    if draw(st.booleans()):
        found = rng.integers(keys, size=length)
    else:  # a slow drift
        found = (np.arange(length) // 7 + rng.integers(3, size=length)) % keys
    return found.astype(np.uint32), keys, columns


def raw_trace(schedule, workers, block=128, start=58):
    return launch_trace(
        schedule.row_order, schedule.indptr, schedule.indices, schedule.shape[2], workers, block,
        start,
    )  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(
    dense=dense_masks(),
    policy=RECIPES,
    workers=st.integers(1, 16),
    block=st.integers(1, 5),
    start=st.integers(0, 11),
)
def test_trace_is_that_of_the_slow_simulator(dense, policy, workers, block, start):
    schedule = build_schedule(BlockMask.from_dense(dense), policy, workers)
    N = schedule.shape[2]
    *_, slow = oracles.stream(
        schedule.row_order.tolist(), row_lists(schedule), N, workers, 1, block, block, start
    )
    trace = raw_trace(schedule, workers, block, start)
    assert trace.dtype == np.uint32
    assert trace.tolist() == [h * N + j for h, j in slow]
    for keep in (N - 1, N):
        blocks = np.empty(len(trace), np.uint16)
        first = split_heads(trace, len(dense), N, keep, blocks)
        assert [blocks[a:b].tolist() for a, b in pairwise(first)] == [
            [j for g, j in slow if g == h and j < keep] for h in range(len(dense))
        ]


@settings(deadline=None, max_examples=200)
@given(case=traces())
def test_distances_and_misses_of_every_capacity(case):
    trace, keys, columns = case
    every, last = stack_distances(trace, keys, columns)
    assert (every.tolist(), last.tolist()) == oracles.stack_distances(trace.tolist(), keys, columns)
    distinct = len(set(trace.tolist()))
    for capacity in range(1, keys + 1):
        misses = oracles.lru_misses(trace.tolist(), capacity)
        assert misses == oracles.stack_distance_misses(trace.tolist(), capacity)
        assert misses == every[capacity:].sum()
        least = opt_misses(trace, keys, capacity)
        assert least == oracles.belady(trace.tolist(), capacity)
        assert distinct <= least <= misses


@pytest.mark.parametrize("keys", [1, 700, 5000])
@pytest.mark.parametrize("spread", [1.0, 0.02])
def test_long_traces_outlive_the_bitmap(keys, spread):
    """Slots run out several times; short and long distances."""
    rng = np.random.default_rng(keys)
    steps = np.cumsum(rng.integers(0, 2, 90_000))
    trace = ((steps + rng.integers(0, max(1, int(keys * spread)), 90_000)) % keys).astype(np.uint32)
    every, last = stack_distances(trace, keys, keys)
    assert every.sum() == len(trace)
    assert last.sum() == np.count_nonzero(trace == keys - 1)
    for capacity in {1, keys // 50 + 1, keys // 2 + 1, keys}:
        assert oracles.lru_misses(trace.tolist(), capacity) == every[capacity:].sum()


@settings(deadline=None, max_examples=100)
@given(case=traces(max_keys=9, max_length=25), capacity=st.integers(1, 4))
def test_no_choice_of_what_to_keep_beats_belady(case, capacity):
    trace, keys, _ = case
    assert opt_misses(trace, keys, capacity) == oracles.least_cost(
        trace.tolist(), capacity, lambda key: 1
    )


@settings(deadline=None, max_examples=60)
@given(
    dense=dense_masks(max_heads=2, max_rows=4, max_columns=4),
    last_tokens=st.integers(1, 128),
    workers=st.integers(1, 3),
    capacity=st.integers(1, 4),
)
def test_belady_bytes_are_a_bound(dense, last_tokens, workers, capacity):
    H, M, N = dense.shape
    tokens = (M * 128, (N - 1) * 128 + last_tokens)
    mask = BlockMask.from_dense(dense, tokens=tokens)
    setup = Setup.make("h200", wave=workers)
    schedule = build_schedule(mask, "nnz", workers)
    trace = raw_trace(schedule, workers).tolist()
    least = oracles.least_cost(
        trace, capacity, lambda key: TOKEN * (last_tokens if key % N == N - 1 else 128)
    )
    bound = belady_read_bytes(mask, schedule, setup, capacity)
    assert bound <= least
    if H == 1 and last_tokens == 128:
        assert bound == least
    if capacity >= N:
        touched, touches_last = mask.touched_kv_blocks
        compulsory = touched.sum() * BLOCK - touches_last.sum() * (128 - last_tokens) * TOKEN
        assert bound == compulsory


@pytest.mark.parametrize("policy", ["original", "svd+nnz", "lockstep"])
def test_curve_is_the_streaming_lru_at_every_size(policy):
    mask = random_mask(3, (3, 60, 40), tokens=(60 * 128, 39 * 128 + 48))
    setup = Setup.make("h200", wave=12)
    schedule = build_schedule(mask, policy, setup.wave)
    sizes = [BLOCK, 5 * BLOCK + 17, 20 * BLOCK, 40 * BLOCK, 500 * BLOCK]
    curve = hit_curve(mask, schedule, setup, sizes)
    start = round(setup.kernel.row_start_blocks * 128)
    last = np.count_nonzero(mask.indices == mask.N - 1)
    assert curve.requested_bytes == TOKEN * (128 * (mask.nnz - last) + 48 * last)
    for i, size in enumerate(sizes):
        misses, last_misses, _ = stream_lru(
            schedule.row_order, schedule.indptr, schedule.indices, mask.N, setup.wave,
            size // BLOCK, 128, 128, start,
        )  # fmt: skip
        read = BLOCK * misses.sum() - (128 - 48) * TOKEN * last_misses.sum()
        assert curve.misses[i] == misses.sum()
        assert curve.hbm_read_bytes[i] == read
        assert curve.hit_frac[i] == 1 - read / curve.requested_bytes
        assert belady_read_bytes(mask, schedule, setup, size // BLOCK) <= read


@settings(deadline=None, max_examples=60)
@given(dense=dense_masks(), policy=RECIPES, workers=st.integers(1, 9))
def test_more_l2_never_hits_less(dense, policy, workers):
    mask = BlockMask.from_dense(dense)
    setup = Setup.make("h200", wave=workers)
    curve = hit_curve(
        mask, build_schedule(mask, policy, workers), setup, [n * BLOCK for n in range(1, 40)]
    )
    assert np.all(np.diff(curve.misses) <= 0)
    assert np.all(np.diff(curve.hit_frac) >= 0) or not mask.nnz
    assert curve.misses[-1] == mask.touched_kv_blocks[0].sum()


def test_masks_without_blocks():
    mask = BlockMask.from_dense(np.zeros((2, 5, 5)))
    setup = Setup.make("h200")
    schedule = build_schedule(mask, "original", setup.wave)
    curve = hit_curve(mask, schedule, setup, [BLOCK])
    assert np.isnan(curve.hit_frac).all()
    assert curve.requested_bytes == belady_read_bytes(mask, schedule, setup, 3) == 0


def test_sizes_below_one_block():
    mask = random_mask()
    setup = Setup.make("h200")
    schedule = build_schedule(mask, "original", setup.wave)
    with pytest.raises(InputError, match="65535 bytes is smaller than one K/V block of 65536"):
        hit_curve(mask, schedule, setup, [BLOCK, BLOCK - 1])
    with pytest.raises(InputError, match="capacity_blocks is 0"):
        belady_read_bytes(mask, schedule, setup, 0)


@pytest.mark.parametrize(("columns", "low"), [(2841, 16), (17, 16), (16, 1), (1, 1)])
def test_default_sizes(columns, low):
    mask = BlockMask.from_dense(np.ones((1, 1, columns)))
    setup = dataclasses.replace(Setup.make("h200"), l2_capacity_bytes=5 * BLOCK + 1)
    sizes = curve_sizes(mask, setup)
    grid = [size for size in sizes if size != setup.l2_capacity_bytes]
    assert len(grid) == len(sizes) - 1 <= 24
    assert grid[0] == low * BLOCK
    assert grid[-1] > columns * BLOCK
    assert sizes == sorted(sizes)
    assert not any(size % BLOCK for size in grid)


@pytest.fixture
def masks(tmp_path):
    path = tmp_path / "masks.npz"
    save_mask(path, random_mask(shape=(4, 40, 50)))
    return path


def run(*arguments):
    command = ["curve", *arguments, "--device", "h200", "--wave", "8", "--quiet"]
    return CliRunner().invoke(main, [str(a) for a in command])


def test_table(masks):
    result = run("--mask", masks, "--l2", "2MiB")
    assert result.exit_code == 0, result.output
    heading, *table = result.stdout.split("above.\n\n")[1].splitlines()
    assert heading.split() == ["L2", "size", *CURVE_POLICIES]
    (marked,) = (line for line in table if "*" in line)
    assert marked.split()[:3] == ["2.00", "MiB", "*"]
    assert "2,097,152 bytes (given) = 32 K/V blocks" in result.stdout
    assert "One LRU over whole K/V blocks, a constant time per block" in table[-1]


def test_json_out_and_schedule_files(masks, tmp_path):
    out, path = tmp_path / "curve.jsonl", tmp_path / "s.npz"
    schedule = ["order", "--mask", masks, "--device", "h200", "--policy", "nnz", "--out", path]
    assert CliRunner().invoke(main, [*map(str, schedule), "--wave", "8"]).exit_code == 0
    result = run(
        "--mask", masks, "--policy", "nnz", "--schedule", path, "--sizes", "3MiB,1MiB, 64KiB",
        "--heads", "1-2", "--json", "--out", out, "--seed", 5, "--l2", "34MiB",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == out.read_text()
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    sizes = [65536, 2**20, 3 * 2**20, 34 * 2**20]
    assert [r["l2_bytes"] for r in rows] == sizes * 2
    assert [r["policy"] for r in rows] == ["nnz"] * 4 + ["s.npz (nnz)"] * 4
    assert list(rows[0]) == [
        "schema", "policy", "mask", "mask_digest", "heads", "device", "kernel", "seed", "wave",
        "l2_bytes", "l2_hit_frac", "hbm_read_bytes", "version",
    ]  # fmt: skip
    assert (rows[0]["schema"], rows[0]["heads"], rows[0]["seed"]) == ("wavealign.curve/1", "1-2", 5)
    for a, b in zip(rows[:4], rows[4:], strict=True):
        assert a["l2_hit_frac"] == b["l2_hit_frac"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curve.jsonl", "masks.npz", "s.npz"]


def test_masks_without_blocks_are_told_by_null_and_dash(tmp_path):
    path, plot = tmp_path / "empty.npz", tmp_path / "empty.png"
    save_mask(path, BlockMask.from_dense(np.zeros((1, 4, 4))))
    common = ["--mask", path, "--policy", "nnz", "--sizes", "1MiB"]
    assert json.loads(run(*common, "--json").stdout.splitlines()[0])["l2_hit_frac"] is None
    result = run(*common, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(" -\n") == 2


def test_pictures_are_the_same_for_the_same_curves(masks, tmp_path):
    for name in ("a.png", "b.png", "c.svg", "d.pdf"):
        result = run("--mask", masks, "--policy", "nnz", "--plot", tmp_path / name)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sizes", "8"], "size '8' has no unit"),
        (["--sizes", "8MiB,,9MiB"], "size '' can't be read"),
        (["--sizes", "8MiB,1KiB"], "1024 bytes is smaller than one K/V block"),
        (["--policy", "nzz"], "unknown policy 'nzz'. Did you mean 'nnz'"),
        (["--schedule", "none.npz"], "no such file"),
        (["--l2", "1KiB"], "smaller than one K/V block"),
        (["--out", "nowhere/x.jsonl"], "the folder nowhere doesn't exist"),
        (["--plot", "x.gif"], "unknown picture format"),
    ],
)
def test_bad_input(masks, arguments, text):
    result = run("--mask", masks, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert text in result.stderr
