"""The planner in torch against the numpy schedules, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DATA, dense_masks, random_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.errors import InputError
from wavealign.masks import BlockMask, load_mask
from wavealign.order import build_schedule

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

from wavealign.planning import (  # noqa: E402
    DeviceSchedule,
    ListLayout,
    Planner,
    dense_mask,
    mask_from_lists,
    mask_from_packed,
)

VISITS = [
    f"{base}{way}" for base in ("ascending", "shuffled") for way in ("", "+sawtooth", "+phased")
]


def plan(dense, policies, wave, **options):
    planner = Planner(dense.shape, "cpu", wave=wave, **options)
    return planner(torch.from_numpy(dense), policies)


def same(schedule, expected):
    assert np.array_equal(schedule.row_order, expected.row_order)
    assert np.array_equal(schedule.indptr, expected.indptr)
    assert np.array_equal(schedule.indices, expected.indices)


@settings(max_examples=120, deadline=None)
@given(
    dense_masks(),
    st.integers(1, 6),
    st.sampled_from(["original", "nnz", "nnz-wave", "nnz-dealt"]),
    st.sampled_from(VISITS),
    st.integers(0, 3),
)
def test_schedules_equal_the_numpy_ones(dense, wave, rows, visits, seed):
    policy = f"{rows}/{visits}"
    expected = build_schedule(BlockMask.from_dense(dense), policy, wave, seed)
    same(plan(dense, policy, wave, seed=seed).to_schedule(), expected)


@pytest.mark.parametrize("policy", ["nnz-wave", "lockstep", "resync", "nnz/shuffled+sawtooth"])
def test_a_real_mask(policy):
    mask = load_mask(DATA / "xattention_75600.npz").mask.select_heads([0, 3])
    dense = np.stack([head.to_dense() for head in mask.heads()])
    same(plan(dense, policy, 132).to_schedule(), build_schedule(mask, policy, 132))


@settings(max_examples=25, deadline=None)
@given(dense_masks(), st.integers(1, 4), st.data())
def test_heads_may_have_different_policies(dense, wave, data):
    names = st.sampled_from(["original", "nnz/shuffled+sawtooth", "nnz-wave"])
    policies = data.draw(st.lists(names, min_size=len(dense), max_size=len(dense)))
    mixed = plan(dense, policies, wave).to_schedule()
    mask = BlockMask.from_dense(dense)
    for h, policy in enumerate(policies):
        expected = build_schedule(mask, policy, wave)
        assert np.array_equal(mixed.row_order[h], expected.row_order[h])
        assert np.array_equal(mixed.head_lists(h).indices, expected.head_lists(h).indices)


@settings(max_examples=60, deadline=None)
@given(
    dense_masks(), st.integers(1, 5), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(["original", "nnz-wave/shuffled+sawtooth", "lockstep"]),
)  # fmt: skip
def test_lists_of_the_host_equal_those_of_the_device(
    dense, wave, gathered, backwards, ragged, policy
):
    H, M, N = dense.shape
    layout = ListLayout(
        "gathered" if gathered else "table", "backwards" if backwards else "forwards", ragged
    )
    mask = BlockMask.from_dense(dense, (8, 8), (8 * M, 8 * N - 3))
    schedule = build_schedule(mask, policy, wave)
    lists = DeviceSchedule.of(schedule, layout)
    made = plan(dense, policy, wave, layout=layout)
    assert torch.equal(made.table, lists.table)
    assert torch.equal(made.counts, lists.counts)
    width = lists.indices.shape[-1]
    assert width == max(1, lists.counts.max())
    held = torch.arange(width) < lists.counts[..., None]
    assert torch.equal(made.indices[..., :width][held], lists.indices[held])
    for one in (made, lists):
        assert (one.columns, one.layout, one.policies) == (N, layout, (policy,) * H)
        assert one.starts.tolist() == [one.indices.shape[-1] * i for i in range(H * M)]
    if layout == ListLayout():
        same(lists.to_schedule(), schedule)


def test_buffers_are_reused_and_nothing_is_left_over():
    planner = Planner((2, 9, 11), "cpu", wave=4)
    rng = np.random.default_rng(0)
    kept = None
    for turn in range(4):
        dense = rng.random((2, 9, 11)) < 0.2 * (4 - turn)
        made = planner(torch.from_numpy(dense), "lockstep")
        same(made.to_schedule(), build_schedule(BlockMask.from_dense(dense), "lockstep", 4))
        assert kept is None or made.indices.data_ptr() == kept
        kept = made.indices.data_ptr()


@settings(max_examples=30, deadline=None)
@given(dense_masks())
def test_forms_of_a_mask(dense):
    H, M, N = dense.shape
    expected = torch.from_numpy(dense)
    packed = torch.from_numpy(np.packbits(dense, axis=-1))
    assert torch.equal(mask_from_packed(packed, N), expected)
    mask = BlockMask.from_dense(dense)
    indptr, indices = torch.tensor(mask.indptr), torch.tensor(mask.indices)
    assert torch.equal(mask_from_lists(indices, N, indptr=indptr, shape=(H, M)), expected)
    made = plan(dense, "lockstep", 3)
    assert torch.equal(mask_from_lists(made.indices, N, counts=made.counts), expected)
    assert torch.equal(dense_mask(expected[None]), expected)


def kendall(a, b):
    """Share of pairs of query blocks that two orders put the same way round."""
    from scipy.stats import kendalltau

    return kendalltau(np.argsort(a), np.argsort(b)).statistic


@pytest.mark.parametrize("wave", [16, 132])
def test_svd_is_as_good_as_the_reference(wave):
    from wavealign.order.context import OrderContext
    from wavealign.order.spectra import singular_coordinates
    from wavealign.planning.spectra import leading_coordinate

    mask = load_mask(DATA / "xattention_75600.npz").mask.select_heads([0, 2, 5])
    dense = torch.from_numpy(np.stack([head.to_dense() for head in mask.heads()]))
    start = torch.randn(mask.N, 8, generator=torch.Generator().manual_seed(0))
    ours = leading_coordinate(dense, start).numpy()
    made = plan(dense.numpy(), "svd+nnz", wave)
    expected = build_schedule(mask, "svd", wave)
    stage_one = plan(dense.numpy(), "svd", wave)
    for h, head in enumerate(mask.heads()):
        reference = singular_coordinates(head, 1, OrderContext(wave, 0, h))[:, 0]
        norms = np.linalg.norm(ours[h]) * np.linalg.norm(reference)
        assert abs(ours[h] @ reference) > 0.9999 * norms
        assert kendall(stage_one.table[h].numpy(), expected.row_order[h]) > 0.98
    made.to_schedule().check(mask)


def test_svd_where_rows_are_equal_or_few():
    equal = np.zeros((2, 12, 12), dtype=bool)
    equal[0, :, 3:7] = True
    for policy in ("svd", "svd+nnz"):
        assert torch.equal(plan(equal, policy, 4).table, torch.arange(12).expand(2, 12).int())
    steps = np.tril(np.ones((1, 12, 12), dtype=bool))
    mask = BlockMask.from_dense(steps)
    assert np.array_equal(
        plan(steps, "svd", 4).to_schedule().row_order, build_schedule(mask, "svd", 4).row_order
    )
    one = np.ones((1, 1, 1), dtype=bool)
    assert plan(one, "svd", 4).table.tolist() == [[0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Planner((1, 0, 3), "cpu", wave=4), "expected at least 1"),
        (lambda: Planner((1, 2, 40000), "cpu", wave=4), "at most 32768"),
        (lambda: dense_mask(torch.zeros(2, 2)), "torch.bool"),
        (lambda: dense_mask(torch.zeros(2, dtype=torch.bool)), "of shape"),
        (lambda: mask_from_packed(torch.zeros(1, 2, 2, dtype=torch.uint8), 24), "for 24 K/V"),
        (lambda: mask_from_lists(torch.zeros(3, dtype=torch.int32), 4), "either counts"),
        (
            lambda: plan(np.ones((2, 3, 3), dtype=bool), "spectral", 2),
            "isn't planned on a device",
        ),
        (lambda: plan(np.ones((2, 3, 3), dtype=bool), ["nnz"], 2), "1 policies for 2 heads"),
        (
            lambda: Planner((1, 3, 3), "cpu", wave=2)(torch.ones(2, 3, 3, dtype=torch.bool)),
            "this planner is for",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_lists_that_are_too_narrow_are_not_a_schedule():
    made = plan(np.ones((1, 3, 5), dtype=bool), "nnz", 2, width=4)
    with pytest.raises(InputError, match="keeps 5 K/V blocks, the lists hold 4"):
        made.to_schedule()


def test_random_masks_of_the_helpers_stay_schedules():
    mask = random_mask(3, (3, 40, 24))
    dense = np.stack([head.to_dense() for head in mask.heads()])
    plan(dense, "svd+nnz/shuffled+sawtooth", 8).to_schedule().check(mask)
