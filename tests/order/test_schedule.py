from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import random_mask

from wavealign.errors import InputError
from wavealign.masks import save_mask
from wavealign.order import Schedule, build_schedule


@pytest.fixture
def mask():
    return random_mask(shape=(3, 10, 8))


@pytest.fixture
def schedule(mask):
    return build_schedule(mask, "nnz/shuffled+phased", 4)


def test_file_round_trip(tmp_path, mask, schedule):
    schedule.save(tmp_path / "s.npz")
    again = Schedule.load(tmp_path / "s.npz")
    again.check(mask)
    for field in ("row_order", "indptr", "indices"):
        assert np.array_equal(getattr(again, field), getattr(schedule, field))
        assert getattr(again, field).dtype == getattr(schedule, field).dtype
    assert (again.shape, again.policy) == (schedule.shape, schedule.policy)


def test_select_heads_fits_the_selected_mask(mask, schedule):
    schedule.select_heads([2, 0]).check(mask.select_heads([2, 0]))


def test_not_a_permutation(mask, schedule):
    twice = schedule.row_order.copy()
    twice[1, 0] = twice[1, 1]
    with pytest.raises(InputError, match=r"head 1 is not a permutation.*named twice"):
        dataclasses.replace(schedule, row_order=twice).check(mask)
    outside = schedule.row_order.copy()
    outside[0, 3] = 10
    with pytest.raises(InputError, match="names query block 10"):
        dataclasses.replace(schedule, row_order=outside).check(mask)
    with pytest.raises(InputError, match="row_order has shape"):
        dataclasses.replace(schedule, row_order=twice[:2]).check(mask)


def test_another_masks_shape(schedule):
    with pytest.raises(InputError, match=r"\[3, 10, 8\], this mask is \[3, 10, 9\]"):
        schedule.check(random_mask(shape=(3, 10, 9)))


def test_blocks_dropped_added_or_repeated(mask, schedule):
    row = int(np.argmax(np.diff(schedule.indptr) > 1))
    begin = schedule.indptr[row]
    repeated = schedule.indices.copy()
    repeated[begin] = repeated[begin + 1]
    with pytest.raises(InputError, match="drops, adds or repeats"):
        dataclasses.replace(schedule, indices=repeated).check(mask)
    outside = schedule.indices.copy()
    outside[begin] = 8
    with pytest.raises(InputError, match="outside 0 to 7"):
        dataclasses.replace(schedule, indices=outside).check(mask)
    indptr = schedule.indptr.copy()
    indptr[1] += 1
    with pytest.raises(InputError, match="Head 0, query block 0"):
        dataclasses.replace(schedule, indptr=indptr).check(mask)
    with pytest.raises(InputError, match="K/V blocks, the mask keeps"):
        dataclasses.replace(schedule, indices=schedule.indices[:-1]).check(mask)


def test_files_that_are_no_schedule(tmp_path, mask, schedule):
    save_mask(tmp_path / "m.npz", mask)
    with pytest.raises(InputError, match=r"'wavealign.mask/1'; expected a schedule"):
        Schedule.load(tmp_path / "m.npz")
    np.savez(tmp_path / "bare.npz", row_order=schedule.row_order)
    with pytest.raises(InputError, match="no schema; expected a schedule"):
        Schedule.load(tmp_path / "bare.npz")
    good = {
        "schema": "wavealign.schedule/1",
        "row_order": schedule.row_order,
        "indptr": schedule.indptr,
        "indices": schedule.indices,
        "shape": schedule.shape,
        "policy": "p",
    }
    for change, text in (
        ({"row_order": schedule.row_order * 1.0}, "expected whole numbers"),
        ({"indices": schedule.indices.astype(np.int64) + 2**40}, "beyond any block index"),
        ({"shape": [3, 10]}, "expected 3 whole"),
        ({"policy": 3}, "expected one string"),
    ):
        np.savez(tmp_path / "s.npz", **{**good, **change})
        with pytest.raises(InputError, match=text):
            Schedule.load(tmp_path / "s.npz")
