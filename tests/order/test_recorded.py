"""Recorded orders: what a small file keeps of a schedule rebuilds all of it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import random_mask

from wavealign.masks import BlockMask
from wavealign.npz import save_npz
from wavealign.order import build_schedule, parse_policy
from wavealign.order.context import OrderContext
from wavealign.order.recorded import ORDERS_SCHEMA, recorded_schedule
from wavealign.order.visits import draw_kv_order

POLICIES = (
    "nnz", "random/shuffled", "nnz-wave/sawtooth", "nnz/shuffled+sawtooth", "svd/phased",
    "nnz-dealt/shuffled+phased",
)  # fmt: skip


def record(path, mask, schedule, policy, wave, seed):
    """A file of recorded orders as another program could write it."""
    visits = parse_policy(policy).visits
    arrays = {"schema": ORDERS_SCHEMA}
    arrays[f"row_order/{policy.partition('/')[0]}"] = schedule.row_order.astype(np.int16)
    contexts = [OrderContext(wave, seed, h) for h in range(mask.H)]
    orders = [draw_kv_order(mask.head(h), visits, c) for h, c in enumerate(contexts)]
    arrays["kv_order"] = np.stack(orders)
    firsts = np.zeros(mask.H * mask.M, np.int64)
    kept = np.diff(mask.indptr) > 0
    firsts[kept] = schedule.indices[schedule.indptr[:-1][kept]]
    arrays[f"first_block/{policy}"] = firsts.reshape(mask.H, mask.M)
    save_npz(path, arrays)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_schedule_is_rebuilt_from_its_orders(policy, tmp_path):
    wave, seed, path = 7, 3, tmp_path / "orders.npz"
    dense = np.stack([head.to_dense() for head in random_mask(1, (3, 40, 30)).heads()])
    dense[0, 5] = False
    mask = BlockMask.from_dense(dense)
    schedule = build_schedule(mask, policy, wave, seed)
    record(path, mask, schedule, policy, wave, seed)
    for heads in ([0, 1, 2], [2, 0]):
        found = recorded_schedule(path, mask.select_heads(heads), heads, policy, wave)
        expected = schedule.select_heads(heads)
        for name in ("row_order", "indptr", "indices"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))
        assert (found.policy, found.shape) == (policy, expected.shape)


def test_what_holds_no_such_orders_is_passed_over(tmp_path):
    mask, path = random_mask(), tmp_path / "orders.npz"
    schedule = build_schedule(mask, "nnz", 8)
    assert recorded_schedule(path, mask, [0, 1], "nnz", 8) is None
    schedule.save(path)  # a file of another kind
    assert recorded_schedule(path, mask, [0, 1], "nnz", 8) is None
    save_npz(path, {"schema": ORDERS_SCHEMA, "row_order/nnz": schedule.row_order})
    assert recorded_schedule(path, mask, [0, 1], "nnz", 8) is not None
    for policy in ("random", "nnz/shuffled", "nnz/phased"):
        assert recorded_schedule(path, mask, [0, 1], policy, 8) is None
