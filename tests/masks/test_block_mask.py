from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import dense_masks, random_mask
from hypothesis import given

import wavealign as wa
from wavealign.errors import InputError
from wavealign.masks import BlockMask, mask_stats


@given(dense_masks())
def test_dense_round_trip(dense):
    mask = BlockMask.from_dense(dense)
    assert mask.shape == dense.shape
    assert mask.nnz == dense.sum()
    for h, head in enumerate(mask.heads()):
        assert np.array_equal(head.to_dense(), dense[h])
        assert np.array_equal(head.row_nnz, dense[h].sum(axis=1))


@given(dense_masks())
def test_csr_accepts_unsorted_rows(dense):
    mask = BlockMask.from_dense(dense)
    rng = np.random.default_rng(0)
    indices = np.concatenate(
        [np.empty(0, dtype=np.int32)]
        + [
            rng.permutation(mask.indices[a:b].copy())
            for a, b in zip(mask.indptr[:-1], mask.indptr[1:], strict=True)
        ]
    )
    again = BlockMask.from_csr(mask.indptr, indices, mask.shape)
    assert again.digest == mask.digest


def test_batch_axis_is_folded_into_heads():
    dense = np.random.default_rng(0).random((2, 3, 4, 5)) < 0.5
    assert BlockMask.from_dense(dense).digest == BlockMask.from_dense(dense.reshape(6, 4, 5)).digest


def test_arrays_are_read_only_and_fields_frozen():
    mask = random_mask()
    with pytest.raises(ValueError, match="read-only"):
        mask.indices[0] = 1
    with pytest.raises(AttributeError):
        mask.H = 3


def test_ragged_tail():
    mask = random_mask(shape=(1, 3, 5), tokens=(3 * 128 - 50, 5 * 128 - 48))
    assert mask.last_kv_tokens == 80


@pytest.mark.parametrize(
    ("tokens", "text"),
    [((400, 640), "4 blocks, the mask has 3"), ((384, 512), "4 blocks, the mask has 5")],
)
def test_sequence_length_must_fit_the_blocks(tokens, text):
    with pytest.raises(InputError, match=text):
        BlockMask.from_dense(np.ones((1, 3, 5), dtype=bool), tokens=tokens)


@pytest.mark.parametrize(
    ("indptr", "indices", "text"),
    [
        ([0, 2, 1, 3], [0, 1, 2], "indptr is not sorted: it falls from 2 to 1 at row 1"),
        ([0, 1, 2, 4], [0, 1, 2], "expected 0 to 3"),
        ([1, 1, 2, 3], [0, 1, 2], "expected 0 to 3"),
        ([0, 1, 3], [0, 1, 2], r"expected \(4,\)"),
        ([0, 1, 2, 3], [0, 1, 4], "K/V block 4; expected 0 to 3"),
        ([0, 1, 2, 3], [0, -1, 2], "K/V block -1"),
        ([0, 1, 1, 3], [0, 2, 2], "row 2 lists K/V block 2 twice"),
    ],
)
def test_csr_that_contradicts_itself(indptr, indices, text):
    with pytest.raises(InputError, match=text):
        BlockMask.from_csr(indptr, indices, (1, 3, 4))


@given(dense_masks())
def test_select_heads_and_take_rows(dense):
    mask = BlockMask.from_dense(dense)
    backwards = list(range(mask.H))[::-1]
    assert mask.select_heads(backwards).digest == BlockMask.from_dense(dense[::-1]).digest
    rows = np.random.default_rng(0).permutation(mask.M)[: (mask.M + 1) // 2]
    assert np.array_equal(mask.head(0).take_rows(rows).to_dense(), dense[0][rows])


def test_digest_tells_masks_apart():
    dense = np.ones((1, 2, 2), dtype=bool)
    digests = {
        BlockMask.from_dense(dense).digest,
        BlockMask.from_dense(dense, (64, 128)).digest,
        BlockMask.from_dense(dense, tokens=(256, 200)).digest,
        BlockMask.from_dense(dense & [True, False]).digest,
    }
    assert len(digests) == 4


@given(dense_masks())
def test_stats_against_their_definitions(dense):
    mask = BlockMask.from_dense(dense)
    total, per_head = mask_stats(mask)
    nnz = dense.sum(axis=2)
    assert total.density == pytest.approx(dense.mean())
    assert total.row_nnz_min == nnz.min()
    assert total.row_nnz_max == nnz.max()
    assert total.row_nnz_spread == pytest.approx(nnz.std() / nnz.mean() if nnz.any() else 0)
    assert total.empty_rows == (nnz == 0).sum()
    assert total.empty_heads == (nnz.sum(axis=1) == 0).sum()
    for h, stats in enumerate(per_head):
        sets = [set(np.flatnonzero(row)) for row in dense[h]]
        overlaps = [len(a & b) / len(a | b) for a, b in itertools.pairwise(sets) if a | b]
        expected = pytest.approx(np.mean(overlaps)) if overlaps else None
        assert stats.neighbour_overlap == expected
        assert stats.working_set_blocks == len(set().union(*sets))
    assert total.working_set_blocks == max(stats.working_set_blocks for stats in per_head)


def test_scores_are_no_mask():
    scores = np.random.default_rng(0).random((2, 3, 4))
    with pytest.raises(InputError, match="Threshold scores first"):
        BlockMask.from_dense(scores)
    with pytest.raises(InputError, match="holds -1"):
        BlockMask.from_dense(-np.ones((1, 2, 2), dtype=np.int64))
    with pytest.raises(InputError, match="expected bool"):
        BlockMask.from_dense(np.full((1, 2, 2), "x"))
    kept = scores > 0.5
    assert BlockMask.from_dense(kept * 1.0).digest == BlockMask.from_dense(kept).digest


def test_a_block_size_is_a_pair():
    kept = np.ones((2, 2), bool)
    for make in (
        lambda: BlockMask.from_dense(kept, 128),
        lambda: BlockMask.from_csr([0, 1], [0], (1, 1, 1), 128),
        lambda: BlockMask.from_packed(np.packbits(kept[None], axis=-1), 2, 128),
    ):
        with pytest.raises(InputError, match="block is 128; expected tokens"):
            make()


@pytest.mark.parametrize("use", [wa.simulate, lambda mask: wa.build_schedule(mask, "nnz", 4)])
def test_an_array_is_no_block_mask(use):
    with pytest.raises(InputError, match=r"is a ndarray; expected a BlockMask, .*from_dense"):
        use(np.ones((1, 2, 2), bool))
