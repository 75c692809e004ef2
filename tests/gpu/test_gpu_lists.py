"""Schedules in each backend's list convention: the same attention, rows back where they belong."""

import dataclasses

import numpy as np
import pytest
from helpers import dense_attention, dense_masks, random_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.gpu.capabilities import Capabilities
from wavealign.gpu.sizes import Sizes
from wavealign.masks import BlockMask
from wavealign.order import build_schedule

pytest.importorskip("torch")

from wavealign.gpu.execution import resident
from wavealign.planning import DeviceSchedule, ListLayout

BLOCK_Q, BLOCK_KV, HEAD_DIM = 4, 3, 8
POLICIES = ("original", "nnz-wave", "nnz/shuffled+sawtooth", "lockstep")

ANY = Capabilities(
    blocks=((BLOCK_Q, BLOCK_KV),),
    dtypes=("bf16",),
    head_dims=(HEAD_DIM,),
    compute_capability=((9, 0), (9, 0)),
)


def kernel(q, k, v, mask, lists, ragged_kv_first):
    """What a block-sparse kernel does with the lists it is given, online softmax and all."""
    (H, M), counts, table = lists.counts.shape, lists.counts.numpy(), lists.table.numpy()
    out = np.full(q.shape, np.nan)
    for h in range(H):
        for launched in range(M):
            place = launched if lists.layout.rows == "gathered" else table[h, launched]
            row = lists.indices.numpy()[h, place, : counts[h, place]]
            walk = row if lists.layout.walks == "forwards" else row[::-1]
            rows = slice(place * mask.block_q, (place + 1) * mask.block_q)
            acc, total, highest = 0.0, 0.0, -np.inf
            for visit, block in enumerate(walk):
                keys = slice(block * mask.block_kv, (block + 1) * mask.block_kv)
                scores = q[rows, h] @ k[keys, h].T
                if visit == 0 or not ragged_kv_first:
                    scores[
                        :, np.arange(block * mask.block_kv, keys.stop) >= mask.tokens_kv
                    ] = -np.inf
                new = max(highest, scores.max())
                weights = np.exp(scores - new)
                acc = acc * np.exp(highest - new) + weights @ v[keys, h]
                total = total * np.exp(highest - new) + weights.sum(1)
                highest = new
            out[rows, h] = acc / total[:, None] if len(walk) else 0.0
    return out


def padded(x, blocks, block):
    """Zeros behind the tokens, as a TMA load or a gathered Q has them."""
    return np.concatenate([x, np.zeros((blocks * block - len(x), *x.shape[1:]))])


@settings(deadline=None)
@given(
    dense_masks(max_heads=2, max_rows=7, max_columns=6),
    st.sampled_from(POLICIES),
    st.sampled_from(["forwards", "backwards"]),
    st.sampled_from(["gathered", "table"]),
    st.booleans(),
    st.integers(0, BLOCK_Q - 1),
    st.integers(0, BLOCK_KV - 1),
)
def test_every_convention_computes_the_attention_of_the_mask(
    dense, policy, walks, rows, ragged_kv_first, short_q, short_kv
):
    H, M, N = dense.shape
    tokens = (M * BLOCK_Q - short_q, N * BLOCK_KV - short_kv)
    mask = BlockMask.from_dense(dense, (BLOCK_Q, BLOCK_KV), tokens)
    capabilities = dataclasses.replace(ANY, layout=ListLayout(rows, walks, ragged_kv_first))
    layout = capabilities.layout_for(Sizes.of(mask))
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, H, HEAD_DIM)) for n in (tokens[0], tokens[1], tokens[1]))
    schedule = build_schedule(mask, policy, wave=3)
    layout.executed(schedule).check(mask)
    order = schedule.row_order
    launched = padded(q, M, BLOCK_Q)
    natural = launched.reshape(M, BLOCK_Q, H, HEAD_DIM)
    if rows == "gathered":
        gathered = np.stack([natural[order[h], :, h] for h in range(H)], axis=2)
        launched = gathered.reshape(M * BLOCK_Q, H, HEAD_DIM)
    lists = DeviceSchedule.of(schedule, layout)
    assert lists.table.tolist() == order.tolist()
    keys, values = padded(k, N, BLOCK_KV), padded(v, N, BLOCK_KV)
    out = kernel(launched, keys, values, mask, lists, ragged_kv_first)
    if rows == "gathered":
        back = np.empty_like(natural)
        for h in range(H):
            back[order[h], :, h] = out.reshape(M, BLOCK_Q, H, HEAD_DIM)[:, :, h]
        out = back.reshape(out.shape)
    wanted = dense_attention(q, k, v, mask)
    np.testing.assert_allclose(out[: tokens[0]], wanted, atol=1e-10)


def test_a_ragged_block_moves_to_the_front_and_nothing_else_moves():
    kept = np.array([[[1, 1, 1], [0, 1, 0], [1, 0, 1], [0, 0, 1], [0, 0, 0]]], dtype=bool)
    mask = BlockMask.from_dense(kept, (4, 4), (20, 11))
    schedule = build_schedule(mask, "original", wave=2)
    assert schedule.ragged_kv_first(mask).indices.tolist() == [2, 0, 1, 1, 2, 0, 2]
    whole = BlockMask.from_dense(kept, (4, 4))
    assert build_schedule(whole, "original", wave=2).ragged_kv_first(whole) is not None
    same = build_schedule(whole, "original", wave=2)
    assert same.ragged_kv_first(whole) is same


def test_the_compute_limit_keeps_rows_and_lengths_in_few_blocks():
    mask = random_mask(shape=(2, 30, 24))
    schedule = build_schedule(mask, "lockstep", wave=4)
    limit = resident(schedule, 5)
    assert limit.indices.max() == 4
    assert np.array_equal(limit.indptr, schedule.indptr)
    assert np.array_equal(limit.row_order, schedule.row_order)


@pytest.mark.parametrize(
    ("change", "sizes", "capability", "reason"),
    [
        ({}, {}, (9, 0), None),
        ({}, {}, (10, 0), "runs on compute capability 9.0 to 9.0, this GPU has 10.0"),
        ({"blocks": ((128, 128),)}, {}, (9, 0), "takes blocks of 128x128 tokens, the mask has 4x3"),
        ({}, {"dtype": "fp16"}, (9, 0), "takes bf16, not fp16"),
        ({}, {"head_dim": 64}, (9, 0), "takes head dimensions 8, not 64"),
        ({}, {"kv_heads": 3}, (9, 0), "2 query heads don't divide among 3 K/V heads"),
        ({"batch": False}, {"batch": 2}, (9, 0), "takes one sequence at a time, not 2"),
        ({"gqa": False}, {"kv_heads": 1}, (9, 0), "takes as many K/V heads as query heads"),
        ({"ragged_q": False}, {}, (9, 0), "query tokens that is a multiple of 4, not 9"),
        ({}, {}, None, "runs on compute capability 9.0 to 9.0, there is no GPU"),
        ({"compute_capability": None, "blocks": None}, {"block_q": 5}, None, None),
        ({"dtypes": None, "head_dims": None}, {"dtype": "fp32", "head_dim": 3}, (9, 0), None),
        # Sequences with masks of their own come one at a time.
        ({"batch": False}, {"batch": 2, "masks": 2}, (9, 0), None),
    ],
)
def test_a_backend_says_why_it_refuses(change, sizes, capability, reason):
    kept = np.ones((2, 3, 2), dtype=bool)
    kept[1, 0] = False
    mask = BlockMask.from_dense(kept, (BLOCK_Q, BLOCK_KV), (9, 6))
    sizes = dataclasses.replace(Sizes.of(mask, head_dim=HEAD_DIM), **sizes)
    found = dataclasses.replace(ANY, **change).refusal(sizes, capability)
    assert found is None if reason is None else reason in found
