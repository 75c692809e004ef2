"""The families beyond the first ones, against slow oracles and by what they are for."""

from __future__ import annotations

import sys

import numpy as np
import oracles
import pytest
from click.testing import CliRunner
from helpers import dense_masks, random_mask, row_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.cli import main
from wavealign.errors import MissingCapabilityError
from wavealign.masks import BlockMask
from wavealign.masks.files import save_mask
from wavealign.order import build_schedule
from wavealign.order.bisection import cumulative_profile, nearest_with_room
from wavealign.order.context import OrderContext
from wavealign.order.graphs import neighbour_graph
from wavealign.order.policies import VISITS, parse_policy, visiting_lists
from wavealign.order.registry import ROWS
from wavealign.order.spectra import hilbert_index, singular_coordinates, turned_to_long

BY_WAVES = ("wave-pack", "pd-bisect", "profile-bisect", "kmeans", "graph-bisect", "metis")
NEW = (*BY_WAVES, "rcm", "svd(rank=3)", "svd(sign=short)", "nnz-bucket+svd(bucket=1,rank=2)")


@pytest.mark.parametrize("rows", ["svd(rank=8)", "rcm", "spectral"])
def test_masks_of_low_rank_have_one_order(rows):
    """ARPACK runs out of such a mask's rank, and then goes on from random numbers of its own."""
    rng = np.random.default_rng(5)
    for kinds, columns in ((5, 9), (5, 100), (30, 200)):
        distinct = rng.random((kinds, columns)) < 0.5
        mask = BlockMask.from_dense(distinct[rng.integers(kinds, size=120)][None])
        orders = [build_schedule(mask, rows, 12, 0).row_order for _ in range(6)]
        assert all(np.array_equal(order, orders[0]) for order in orders)


def clusters(waves=4, wave=12, columns=80, seed=0):
    """Rows of `waves` interleaved clusters of one wave each, on columns of their own, with noise.

    Returns the mask and each row's cluster.
    """
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.arange(waves * wave) % waves)
    own = np.arange(columns) * waves // columns == label[:, None]
    dense = (own & (rng.random(own.shape) < 0.8)) | (rng.random(own.shape) < 0.03)
    return BlockMask.from_dense(dense), label


@pytest.mark.parametrize("rows", ROWS)
@settings(deadline=None, max_examples=10)
@given(
    dense=dense_masks(max_rows=40, max_columns=40),
    wave=st.integers(1, 50),
    seed=st.integers(0, 3),
)
def test_families_permute_and_depend_on_the_seed_alone(rows, dense, wave, seed):
    mask = BlockMask.from_dense(dense)
    first, again = (build_schedule(mask, rows, wave, seed, jobs) for jobs in (1, 3))
    assert np.array_equal(first.row_order, again.row_order)
    assert (np.sort(first.row_order, axis=1) == np.arange(mask.M)).all()
    if not ROWS[rows][1].seeded:
        other = build_schedule(mask, rows, wave, seed + 10)
        if rows in ("svd", "nnz", "original", "greedy", "wave-pack", "profile-bisect"):
            assert np.array_equal(first.row_order, other.row_order)


@pytest.mark.parametrize("rows", dict.fromkeys([*NEW, *ROWS]))
@pytest.mark.parametrize(
    "dense",
    [
        np.zeros((1, 30, 20), bool),
        np.ones((1, 30, 20), bool),
        np.tile(np.arange(20) % 3 == 0, (1, 30, 1)),
        np.ones((2, 1, 20), bool),
        np.ones((1, 30, 1), bool),
        np.eye(30, dtype=bool)[None],
        np.arange(30)[:, None] // 10 == np.arange(20) // 7,
        np.concatenate([np.zeros((15, 20), bool), np.ones((15, 20), bool)]),
    ],
    ids=["empty", "full", "equal", "one row", "one column", "diagonal", "three kinds", "two"],
)
@pytest.mark.parametrize("wave", [4, 1000])
def test_heads_without_structure(rows, dense, wave):
    mask = BlockMask.from_dense(dense)
    build_schedule(mask, rows, wave).check(mask)


@pytest.mark.parametrize("rows", NEW)
def test_equal_rows_of_a_larger_head(rows):
    """ARPACK's size: nothing is left after centring."""
    mask = BlockMask.from_dense(np.tile(np.arange(90) % 4 == 0, (1, 70, 1)))
    build_schedule(mask, rows, 8).check(mask)


@pytest.mark.parametrize("rows", [*BY_WAVES, "rcm", "greedy"])
@pytest.mark.parametrize("seed", range(3))
def test_clusters_of_a_wave_become_waves(rows, seed):
    mask, label = clusters(seed=seed)
    order = build_schedule(mask, rows, 12).row_order[0]
    waves = label[order].reshape(4, 12)
    alike = sum(np.bincount(wave).max() for wave in waves)
    # Of 48; a random order has some 20. `graph-bisect` can start where halves are alike in every
    # cluster, and then no swap pays (docs/orders.md).
    assert alike >= (24 if rows == "graph-bisect" else 44)


@pytest.mark.parametrize("rows", BY_WAVES)
def test_long_rows_come_first(rows):
    mask = random_mask(2, (1, 96, 80))
    nnz = mask.head(0).row_nnz[build_schedule(mask, rows, 12).row_order[0]]
    assert nnz[:24].mean() > nnz[-24:].mean()


@settings(deadline=None, max_examples=50)
@given(dense_masks(max_heads=1), st.integers(1, 6))
def test_wave_pack_against_the_oracle(dense, wave):
    mask = BlockMask.from_dense(dense)
    sets = [set(row) for row in row_lists(mask)[0]]
    order = build_schedule(mask, "wave-pack", wave).row_order[0].tolist()
    assert order == oracles.wave_pack(sets, wave)


@settings(deadline=None, max_examples=30)
@given(dense_masks(max_heads=1, max_rows=24, max_columns=20), st.integers(1, 7), st.integers(1, 5))
def test_graph_bisect_against_the_oracle(dense, wave, rounds):
    mask = BlockMask.from_dense(dense)
    sets = [set(row) for row in row_lists(mask)[0]]
    order = build_schedule(mask, f"graph-bisect(rounds={rounds})", wave).row_order[0].tolist()
    assert order == oracles.graph_bisect(sets, wave, rounds)


@settings(deadline=None, max_examples=30)
@given(dense_masks(max_heads=1, max_rows=24, max_columns=20), st.integers(1, 7))
def test_profile_bisect_cuts_every_part_by_its_principal_direction(dense, wave):
    mask = BlockMask.from_dense(dense)
    head = mask.head(0)
    order = build_schedule(mask, "profile-bisect(bins=5)", wave).row_order[0]
    profile = cumulative_profile(head, 5)
    for i, row in enumerate(head.to_dense()):
        for b in range(5):
            assert profile[i, b] == sum(row[j] for j in range(head.N) if j * 5 // head.N <= b)
    parts = [order]
    while parts:
        rows = parts.pop()
        waves = -(-len(rows) // wave)
        if waves < 2:
            assert (np.diff(rows) > 0).all()
            continue
        cut = waves // 2 * wave
        points = profile[rows] - profile[rows].mean(axis=0)
        _, values, right = np.linalg.svd(points, full_matrices=False)
        if values[0] > 1e-6 and (len(values) < 2 or values[1] < 0.99 * values[0]):
            along = points @ right[0]
            # Apart by projection, but for what rounding to 5 digits calls equal.
            slack = 2e-5 * np.abs(along).max()
            left, rest = along[:cut], along[cut:]
            assert left.min() >= rest.max() - slack or left.max() <= rest.min() + slack
        parts += [rows[:cut], rows[cut:]]


def test_kmeans_ends_where_no_row_is_nearer_to_another_centre_with_room():
    distance = np.array([[1.0, 2.0], [1.0, 5.0], [2.0, 2.5], [3.0, 1.0]])
    assert nearest_with_room(distance, np.array([2, 2])).tolist() == [0, 0, 1, 1]
    assert nearest_with_room(distance, np.array([3, 1])).tolist() == [0, 0, 0, 1]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 100))
def test_balanced_clusters_are_full(rows, wave, seed):
    capacity = np.full(-(-rows // wave), wave)
    capacity[-1] -= capacity.sum() - rows
    distance = np.random.default_rng(seed).random((rows, len(capacity)))
    label = nearest_with_room(distance, capacity)
    assert np.bincount(label, minlength=len(capacity)).tolist() == capacity.tolist()


@pytest.mark.parametrize("rows", [10, 11, 12, 15])
def test_kmeans_is_lloyds_two_steps_and_leaves_the_short_wave_for_last(rows):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        mask = BlockMask.from_dense(rng.random((1, rows, 12)) < rng.random((1, rows, 1)))
        head, context = mask.head(0), OrderContext(4)
        points = singular_coordinates(head, 8, context).astype(float)
        begun = build_schedule(mask, "pd-bisect", 4).row_order[0].tolist()
        waves = [begun[first : first + 4] for first in range(0, rows, 4)]
        for _ in range(100):
            centres = [points[wave].mean(axis=0) for wave in waves]
            distance = np.array([[((p - c) ** 2).sum() for c in centres] for p in points])
            label = nearest_with_room(distance, np.array([len(wave) for wave in waves]))
            found = [np.flatnonzero(label == i).tolist() for i in range(len(waves))]
            if [sorted(wave) for wave in waves] == found:
                break
            waves = found
        waves.sort(key=lambda wave: (len(wave) < 4, -head.row_nnz[wave].mean()))
        order = build_schedule(mask, "kmeans(rounds=100)", 4).row_order[0].tolist()
        assert order == [row for wave in waves for row in sorted(wave)]


def test_kmeans_is_at_least_as_tight_as_where_it_starts():
    mask = random_mask(5, (1, 96, 80))
    points = singular_coordinates(mask.head(0), 8, OrderContext(12)).astype(float)

    def spread(policy):
        waves = build_schedule(mask, policy, 12).row_order[0].reshape(-1, 12)
        return sum(((points[w] - points[w].mean(axis=0)) ** 2).sum() for w in waves)

    assert spread("kmeans(rounds=1)") < spread("pd-bisect") * 1.02
    assert spread("kmeans") < spread("pd-bisect")


def test_a_direction_that_leans_nowhere_has_its_largest_entry_up():
    head = BlockMask.from_dense(np.eye(3)).head(0)  # no row is longer
    for sign in (1, -1):
        turned = turned_to_long(sign * np.array([4.0, -2.0, -2.0]), head)
        assert turned.tolist() == [1.0, -0.5, -0.5]
    assert turned_to_long(np.zeros(3), head).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(4))
def test_the_leading_vector_is_right_without_a_spectral_gap(seed):
    dense = np.random.default_rng(seed).random((300, 300)) < 0.3
    head = BlockMask.from_dense(dense[None]).head(0)
    found = singular_coordinates(head, 1, OrderContext(12))[:, 0].astype(float)
    exact = np.linalg.svd(dense - dense.mean(axis=0), full_matrices=False)[0][:, 0]
    assert abs(found @ exact) / np.linalg.norm(found) > 0.99999


@pytest.mark.parametrize(("axes", "bits"), [(2, 3), (3, 2), (4, 2), (5, 1), (2, 5)])
def test_hilbert_index_visits_a_grid_cell_by_cell(axes, bits):
    """On a grid of 2^bits cells an axis, successive cells of the curve are neighbours."""
    grid = np.stack(np.meshgrid(*[np.arange(1 << bits)] * axes, indexing="ij"), -1)
    cells = grid.reshape(-1, axes).astype(float)
    place = hilbert_index(cells)
    assert len(set(place.tolist())) == len(cells)
    # The curve's own cells are finer; their leading bits are those of the grid.
    steps = np.abs(np.diff(cells[np.argsort(place)], axis=0)).sum(axis=1)
    assert (steps == 1).all()


def test_svd_from_the_other_end():
    mask = random_mask(2, (1, 80, 60))
    long, short = (
        build_schedule(mask, policy, 8).row_order[0] for policy in ("svd", "svd(sign=short)")
    )
    nnz = mask.head(0).row_nnz
    assert nnz[short][:20].mean() < nnz[short][-20:].mean()
    assert (long == short[::-1]).mean() > 0.9  # all but ties


def test_neighbour_graph_is_symmetric_and_reaches_the_nearest():
    head = random_mask(2, (1, 60, 50)).head(0)
    graph = neighbour_graph(head, 4, 3, OrderContext(8)).toarray()
    assert (graph == graph.T).all()
    assert not graph.diagonal().any()
    assert (graph.sum(axis=1) >= 4).all()


def test_lists_of_another_order_are_not_made_again():
    mask = random_mask(6, (3, 40, 30))
    for visits in ("ascending", "shuffled", "sawtooth", "shuffled+sawtooth", "shuffled+phased"):
        recipe = parse_policy(f"nnz/{visits}")
        schedule = build_schedule(mask, recipe, 8, seed=2)
        plain = parse_policy(f"nnz/{visits.partition('+')[0].replace('sawtooth', 'ascending')}")
        made = build_schedule(mask, plain, 8, seed=2).indices
        for lent in (None, made):
            lists = visiting_lists(mask, schedule.row_order, recipe.visits, 8, 2, unturned=lent)
            assert np.array_equal(lists, schedule.indices)
    assert set(VISITS) == {"ascending", "shuffled", "sawtooth", "phased"}


def test_metis_without_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    mask = random_mask(shape=(1, 40, 30))
    with pytest.raises(MissingCapabilityError, match=r"pip install 'wavealign\[orders\]'"):
        build_schedule(mask, "metis", 8)
    save_mask(tmp_path / "m.npz", mask)
    command = ["order", "--mask", "m.npz", "--policy", "metis", "--out", "s.npz", "--wave", "8"]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 3
    assert "pip install 'wavealign[orders]'" in result.stderr
    assert not (tmp_path / "s.npz").exists()
