from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracles
import pytest
import scipy.linalg
from helpers import dense_masks, random_mask, row_lists
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from wavealign.errors import InputError
from wavealign.masks import BlockMask
from wavealign.order import blas, build_schedule, parse_policy, registry
from wavealign.order.context import OrderContext
from wavealign.order.policies import DEFAULT_POLICIES, policy_names
from wavealign.order.row_orders import nnz_inside_waves
from wavealign.order.spectra import fiedler_vector, singular_coordinates

ROWS = [e.name for e in registry() if e.kind == "rows" and not e.name.startswith("+")]
VISITS = [
    f"{base}{way}" for base in ("ascending", "shuffled") for way in ("", "+sawtooth", "+phased")
]


@pytest.mark.parametrize("rows", [*ROWS, *(f"{name}+nnz" for name in ROWS)])
@settings(deadline=None, max_examples=15)
@given(dense=dense_masks(), wave=st.integers(1, 15), visits=st.sampled_from(VISITS))
def test_every_policy_makes_a_schedule_of_the_mask(rows, dense, wave, visits):
    mask = BlockMask.from_dense(dense)
    schedule = build_schedule(mask, f"{rows}/{visits}", wave)
    schedule.check(mask)


@pytest.mark.parametrize("policy", [*DEFAULT_POLICIES, "nnz-bucket+svd", "svd/shuffled+sawtooth"])
def test_seed_and_threads(policy):
    mask = random_mask(shape=(5, 40, 30))
    first = build_schedule(mask, policy, 8, seed=3)
    again = build_schedule(mask, policy, 8, seed=3, jobs=4)
    assert np.array_equal(first.row_order, again.row_order)
    assert np.array_equal(first.indices, again.indices)


def test_blas_has_one_thread_whichever_thread_leaves_last():
    def threads():
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    before = threads()
    with ThreadPoolExecutor(2) as first, ThreadPoolExecutor(2) as second:
        for one, other in ((first, second), (second, first)) * 3:
            one.submit(blas.single_threaded_blas.__enter__).result()
            other.submit(blas.single_threaded_blas.__enter__).result()
            one.submit(blas.single_threaded_blas.__exit__).result()
            assert threads() == {1}
            other.submit(blas.single_threaded_blas.__exit__).result()
            assert threads() == before


def test_seed_changes_only_what_chance_decides():
    mask = random_mask(shape=(2, 40, 30))
    a, b = (build_schedule(mask, "random/shuffled", 8, seed=s) for s in (0, 1))
    assert not np.array_equal(a.row_order, b.row_order)
    assert not np.array_equal(a.indices, b.indices)
    assert not np.array_equal(a.row_order[0], a.row_order[1])
    a, b = (build_schedule(mask, "svd+nnz", 8, seed=s) for s in (0, 1))
    assert np.array_equal(a.row_order, b.row_order)


def test_original_and_nnz_by_hand():
    dense = np.array([[[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]]], dtype=bool)
    mask = BlockMask.from_dense(dense)
    assert build_schedule(mask, "original", 2).row_order.tolist() == [[0, 1, 2, 3, 4]]
    assert build_schedule(mask, "nnz", 2).row_order.tolist() == [[1, 4, 3, 0, 2]]
    assert build_schedule(mask, "nnz-wave", 2).row_order.tolist() == [[1, 0, 3, 2, 4]]
    assert build_schedule(mask, "nnz-wave", 9).row_order.tolist() == [[1, 4, 3, 0, 2]]


@given(dense_masks(max_heads=1), st.integers(1, 15))
def test_nnz_inside_waves_sorts_each_wave_and_moves_no_row_out(dense, wave):
    head = BlockMask.from_dense(dense).head(0)
    order = np.random.default_rng(0).permutation(head.M).astype(np.int32)
    refined = nnz_inside_waves(order, head, wave)
    for first in range(0, head.M, wave):
        before, after = order[first : first + wave], refined[first : first + wave]
        assert sorted(before) == sorted(after)
        assert (np.diff(head.row_nnz[after]) <= 0).all()


@settings(deadline=None)
@given(dense_masks(max_heads=1, max_rows=40, max_columns=40), st.integers(1, 9))
def test_nnz_dealt_against_the_oracle(dense, wave):
    mask = BlockMask.from_dense(dense)
    lengths = [len(row) for row in row_lists(mask)[0]]
    order = build_schedule(mask, "nnz-dealt", wave).row_order[0]
    assert order.tolist() == oracles.nnz_dealt(lengths, wave)


def test_nnz_dealt_by_hand():
    """Rows of 100 to 95 blocks make one group, dealt to two waves; 50 and 49 another."""
    lengths = [95, 50, 97, 99, 49, 100]
    dense = np.arange(100) < np.array(lengths)[:, None]
    order = build_schedule(BlockMask.from_dense(dense), "nnz-dealt", 2).row_order[0]
    assert order.tolist() == [5, 2, 3, 0, 1, 4]


@settings(deadline=None)
@given(dense_masks(max_heads=1), st.integers(1, 6))
def test_greedy_against_the_oracle(dense, wave):
    mask = BlockMask.from_dense(dense)
    sets = [set(row) for row in row_lists(mask)[0]]
    assert build_schedule(mask, "greedy", wave).row_order[0].tolist() == oracles.greedy(sets, wave)


def test_greedy_beyond_one_word():
    mask = random_mask(shape=(1, 50, 200))
    sets = [set(row) for row in row_lists(mask)[0]]
    assert build_schedule(mask, "greedy", 7).row_order[0].tolist() == oracles.greedy(sets, 7)


@pytest.mark.parametrize("shape", [(1, 60, 45), (1, 45, 60), (1, 30, 5), (1, 5, 30), (1, 1, 9)])
@pytest.mark.parametrize("rank", [1, 3])
def test_singular_coordinates_are_the_best_embedding(shape, rank):
    """Eckart-Young: no rank-r coordinates leave less of the centred mask unexplained."""
    head = random_mask(5, shape).head(0)
    centred = head.to_dense() - head.to_dense().mean(axis=0)
    coordinates = singular_coordinates(head, rank, OrderContext(4)).astype(np.float64)
    assert coordinates.shape == (shape[1], rank)
    values = np.linalg.svd(centred, compute_uv=False)
    best = np.sqrt((values[rank:] ** 2).sum())
    basis = np.linalg.qr(coordinates[:, np.linalg.norm(coordinates, axis=0) > 1e-6])[0]
    left = np.linalg.norm(centred - basis @ (basis.T @ centred))
    assert left == pytest.approx(best, rel=1e-3, abs=1e-4)
    expected = np.zeros(rank)
    expected[: len(values[:rank])] = values[:rank]
    assert np.linalg.norm(coordinates, axis=0) == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("policy", ["svd", "spectral", "svd+nnz", "nnz-bucket+svd"])
@pytest.mark.parametrize("rows", [2, 21, 49])
def test_equal_rows_keep_their_natural_order(policy, rows):
    mask = BlockMask.from_dense(np.tile([True, False, True], (1, rows, 7)))
    assert build_schedule(mask, policy, 4).row_order.tolist() == [list(range(rows))]


def test_svd_starts_where_rows_are_long():
    mask = random_mask(2, (4, 80, 60))
    for order, head in zip(build_schedule(mask, "svd", 8).row_order, mask.heads(), strict=True):
        nnz = head.row_nnz[order]
        assert nnz[:20].mean() > nnz[-20:].mean()


@pytest.mark.parametrize("policy", ["svd", "spectral", "greedy"])
def test_two_interleaved_clusters_are_told_apart(policy):
    """Even rows read the left half, odd rows the right half, each with some noise."""
    rng = np.random.default_rng(0)
    left = np.arange(60) < 30
    dense = np.where(np.arange(50)[:, None] % 2 == 0, left, ~left) & (rng.random((50, 60)) < 0.8)
    dense |= rng.random((50, 60)) < 0.02
    order = build_schedule(BlockMask.from_dense(dense), policy, 10).row_order[0]
    halves = order % 2
    assert len(set(halves[:25])) == 1
    assert len(set(halves[25:])) == 1


@pytest.mark.parametrize("shape", [(1, 60, 45), (1, 40, 70), (1, 20, 6), (1, 6, 20)])
def test_fiedler_vector_solves_the_generalised_problem(shape):
    dense = random_mask(1, shape, density=0.5).head(0).to_dense()
    dense[:, 0] = True  # no empty row: the dense oracle needs an invertible degree matrix
    head = BlockMask.from_dense(dense).head(0)
    binary = dense.astype(float)
    overlap = binary @ binary.T
    degree = np.diag(overlap.sum(axis=1))
    values = scipy.linalg.eigh(degree - overlap, degree, eigvals_only=True)
    y = fiedler_vector(head, OrderContext(4)).astype(np.float64)
    quotient = (y @ (degree - overlap) @ y) / (y @ degree @ y)
    assert quotient == pytest.approx(values[1], rel=1e-3)
    assert abs(y @ degree @ np.ones(len(y))) < 1e-3 * np.sqrt((y @ degree @ y) * degree.sum())


def test_spectral_keeps_disconnected_parts_apart_and_empty_rows_last():
    dense = np.zeros((1, 30, 20), dtype=bool)
    rng = np.random.default_rng(0)
    dense[0, 0:30:3, :8] = rng.random((10, 8)) < 0.7
    dense[0, 1:30:3, 8:] = rng.random((10, 12)) < 0.9
    dense[0, 0:30:3, 0] = dense[0, 1:30:3, 10] = True
    order = build_schedule(BlockMask.from_dense(dense), "spectral", 5).row_order[0]
    assert (order[:10] % 3 == 1).all()  # the part with the longer rows first
    assert (order[10:20] % 3 == 0).all()
    assert order[20:].tolist() == list(range(2, 30, 3))


def test_nnz_bucket_svd_moves_rows_only_inside_buckets():
    mask = random_mask(3, (1, 64, 50))
    wave = 8
    by_nnz = build_schedule(mask, "nnz", wave).row_order[0]
    bucketed = build_schedule(mask, "nnz-bucket+svd", wave).row_order[0]
    for first in range(0, 64, 2 * wave):
        assert set(by_nnz[first : first + 2 * wave]) == set(bucketed[first : first + 2 * wave])
    assert not np.array_equal(by_nnz, bucketed)


def test_aliases():
    mask = random_mask()
    for alias, meaning in (
        ("lockstep", "nnz/shuffled+phased"),
        ("nnz-wave", "original+nnz"),
        ("resync", "nnz-dealt/shuffled+phased"),
    ):
        a, b = (build_schedule(mask, name, 7) for name in (alias, meaning))
        assert np.array_equal(a.row_order, b.row_order)
        assert np.array_equal(a.indices, b.indices)
        assert a.policy == alias
    assert parse_policy("nnz-wave/sawtooth").visits.sawtooth


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("svd+nzn", "unknown policy 'svd\\+nzn'. Did you mean 'svd\\+nnz'"),
        ("", "unknown policy ''"),
        ("zigzag", "unknown policy 'zigzag'.*Valid: original, random"),
        ("nnz/shufled", "Did you mean 'shuffled'"),
        ("nnz/", "unknown visit order"),
        ("nnz/ascending+shuffled", "exclude each other"),
        ("nnz/sawtooth+phased", "exclude each other"),
        ("nnz/phased+phased", "named twice"),
        ("lockstep/sawtooth", "already means 'nnz/shuffled\\+phased'"),
    ],
)
def test_policies_that_are_none(policy, text):
    with pytest.raises(InputError, match=text):
        parse_policy(policy)


def test_wave_must_be_positive():
    with pytest.raises(InputError, match="wave is 0"):
        build_schedule(random_mask(), "nnz", 0)


def test_registry_documents_every_name():
    entries = registry()
    assert {e.name for e in entries} >= set(policy_names()) - {
        "svd+nnz",
        "spectral+nnz",
        "greedy+nnz",
    }
    for entry in entries:
        assert entry.formula
        assert entry.cost
        assert entry.source
    for name in policy_names():
        parse_policy(name)


@settings(deadline=None)
@given(dense_masks(), st.integers(1, 7), st.integers(0, 5))
def test_shuffled_rows_follow_one_permutation_per_head(dense, wave, seed):
    mask = BlockMask.from_dense(dense)
    schedule = build_schedule(mask, "original/shuffled", wave, seed)
    full = build_schedule(
        BlockMask.from_dense(np.ones_like(dense)), "original/shuffled", wave, seed
    )
    for h in range(mask.H):
        permutation = row_lists(full)[h][0]
        assert row_lists(schedule)[h] == oracles.in_kv_order(row_lists(mask)[h], permutation)


@settings(deadline=None)
@given(dense_masks(), st.integers(1, 7), st.sampled_from(["ascending", "shuffled"]))
def test_sawtooth_turns_odd_waves_around(dense, wave, base):
    mask = BlockMask.from_dense(dense)
    plain = build_schedule(mask, f"nnz/{base}", wave)
    turned = build_schedule(mask, f"nnz/{base}+sawtooth", wave)
    for h in range(mask.H):
        for slot, row in enumerate(plain.row_order[h]):
            step = -1 if slot // wave % 2 else 1
            assert row_lists(turned)[h][row] == row_lists(plain)[h][row][::step]


@settings(deadline=None, max_examples=200)
@given(dense_masks(), st.integers(1, 14), st.sampled_from(["nnz", "original"]), st.booleans())
def test_phased_against_the_oracle(dense, wave, rows, shuffled):
    mask = BlockMask.from_dense(dense)
    base = "shuffled" if shuffled else "ascending"
    plain = build_schedule(mask, f"{rows}/{base}", wave)
    phased = build_schedule(mask, f"{rows}/{base}+phased", wave)
    full = build_schedule(BlockMask.from_dense(np.ones_like(dense)), f"original/{base}", wave)
    permutations = [row_lists(full)[h][0] for h in range(mask.H)]
    assert row_lists(phased) == oracles.phases(
        plain.row_order.tolist(), row_lists(plain), permutations, wave
    )


def test_phased_rows_join_a_full_pass():
    """Dense rows on two workers, the second free first: it starts where the other one is."""
    dense = np.ones((1, 3, 12), dtype=bool)
    dense[0, 1, 6:] = False
    schedule = build_schedule(BlockMask.from_dense(dense), "original/phased", 2)
    # Row 1 ends after 1 + 2*6 ticks; row 0, one block in two ticks, then reads block 6.
    assert row_lists(schedule)[0][2] == [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]
