"""What makes two runs comparable: keys of launches, also where rows of several versions meet."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from helpers import measured_result, run_result, trial
from hypothesis import given
from hypothesis import strategies as st

from wavealign.errors import InputError
from wavealign.runs.files import Row
from wavealign.runs.launch import KEY_FIELDS, ORDER, SHARED, Launch, LaunchKeys, but
from wavealign.runs.metrics import METRICS
from wavealign.runs.pairing import compare_rows

SAYS_ALL = {
    "head_dim": 128, "dtype": "bf16", "batch": 1, "kv_heads": 2, "device_digest": "aaaa",
}  # fmt: skip


def keys_of(*results, fields=KEY_FIELDS):
    launches = [result.launch for result in results]
    keys = LaunchKeys(launches)
    return [keys.key(launch, fields) for launch in launches]


@pytest.mark.parametrize(("heads", "count"), [("0", 1), ("0-1", 2), ("0,3-7", 6), ("2,9,11", 3)])
def test_heads_are_counted(heads, count):
    assert run_result(heads=heads).launch.head_count == count


def test_a_row_that_says_less_is_the_same_launch():
    old, new = keys_of(run_result(), run_result(**SAYS_ALL))
    assert old == new


@pytest.mark.parametrize(
    ("field", "other"),
    [("head_dim", 64), ("dtype", "fp16"), ("batch", 2), ("kv_heads", 1), ("device_digest", "bbbb"),
     ("l2_capacity_bytes", 1), ("kv_block_bytes", 1), ("schedule_file", "x.npz"), ("seed", 1)],
)  # fmt: skip
def test_what_all_rows_say_tells_them_apart(field, other):
    a, b = keys_of(run_result(**SAYS_ALL), run_result(**{**SAYS_ALL, field: other}))
    assert a != b


@pytest.mark.parametrize(("field", "other"), [("dtype", "fp16"), ("device_digest", "bbbb")])
def test_what_one_row_of_a_source_does_not_say_tells_nobody_of_it_apart(field, other):
    new = [run_result(**SAYS_ALL), run_result(**{**SAYS_ALL, field: other})]
    assert len(set(keys_of(run_result(), *new))) == 1
    measured = [measured_result(**SAYS_ALL), measured_result(**{**SAYS_ALL, field: other})]
    assert len(set(keys_of(run_result(), *measured))) == 3  # measured rows say it all the same


def test_one_sequence_and_a_kv_head_a_head_is_what_earlier_rows_had():
    """So the prediction of one sequence isn't taken for two, even where no row says it."""
    assert len(set(keys_of(run_result(), run_result(batch=2), run_result(kv_heads=1)))) == 3


def test_the_head_dimension_follows_from_mask_and_bytes():
    old = [run_result(), run_result(kv_block_bytes=32768)]
    new = [run_result(**SAYS_ALL), run_result(kv_block_bytes=32768, **{**SAYS_ALL, "head_dim": 64})]
    found = keys_of(*old, *new, fields=("source", "head_dim"))
    assert [head_dim for _, head_dim in found] == [128, 64, 128, 64]


@given(st.permutations(range(6)))
def test_keys_do_not_depend_on_the_order(order):
    rows = [
        run_result(), run_result(**SAYS_ALL), run_result(dtype="fp16"),
        measured_result(head_dim=64), measured_result(),
        run_result(kv_block_bytes=32768, head_dim=64),
    ]  # fmt: skip
    shuffled = keys_of(*(rows[i] for i in order))
    assert [shuffled[order.index(i)] for i in range(6)] == keys_of(*rows)


def test_without_the_source_neither_source_says_more_than_the_other():
    was, will = measured_result(**{**SAYS_ALL, "device_digest": None}), run_result()
    assert len(set(keys_of(was, will, fields=SHARED))) == 1
    assert len(set(keys_of(was, run_result(**{**SAYS_ALL, "dtype": "fp16"}), fields=SHARED))) == 2


def test_the_groups_of_fields():
    assert but(("a", "b", "c"), "b") == ("a", "c")
    launch_fields = {field.name for field in dataclasses.fields(Launch)}
    assert set(KEY_FIELDS) <= launch_fields
    assert set(SHARED) == set(KEY_FIELDS) - {
        "source", "model", "l2_capacity_bytes", "device_digest",
    }  # fmt: skip


def test_a_condition_is_its_baseline():
    specs = [trial(run_result(policy=p)).spec for p in ("original", "nnz", "svd+nnz")]
    assert len({spec.baseline for spec in specs}) == 1
    assert len({spec.key(but(KEY_FIELDS, *ORDER)) for spec in specs}) == 1
    assert specs[1].baseline == specs[0]


def rows(*results):
    return [Row(result, "a") for result in results]


def test_compare_pairs_rows_of_two_versions():
    """What this version says and the one before didn't keeps no pair apart."""
    found = compare_rows(rows(run_result()), rows(run_result(**SAYS_ALL)), METRICS["time_ms"])
    assert len(found.pairs) == 1


def test_compare_tells_profiles_of_one_name_apart():
    a, b = run_result(**SAYS_ALL), run_result(**{**SAYS_ALL, "device_digest": "bbbb"}, time_ms=5.0)
    with pytest.raises(InputError, match=r"'device_digest' \(A: aaaa; B: bbbb\). --ignore device"):
        compare_rows(rows(a), rows(b), METRICS["time_ms"])
    both = compare_rows(rows(a, b), rows(a, b), METRICS["time_ms"])
    assert [pair.a for pair in both.pairs] == [10.0, 5.0]  # no repeats of each other
    ignoring = compare_rows(rows(a), rows(b), METRICS["time_ms"], ["device_digest"])
    assert ignoring.pairs[0].b == 5.0


def test_compare_across_sources_where_asked():
    was = measured_result(**{**SAYS_ALL, "device_digest": None})
    across = ["source", "model", "l2_capacity_bytes"]
    for will in (run_result(), run_result(**SAYS_ALL)):
        assert len(compare_rows(rows(was), rows(will), METRICS["time_ms"], across).pairs) == 1


def test_every_pair_of_fields_of_a_measured_row_is_told_apart():
    """The old keys of the report, of recordings and of sweeps knew fewer fields each."""
    changes = {"heads": "0", "wave": 264, "regime": "steady", "kernel": "flex", "device": "a40"}
    made = [measured_result(**SAYS_ALL), *(measured_result(**{**SAYS_ALL, k: v}) for k, v in
                                           changes.items())]  # fmt: skip
    for a, b in itertools.combinations(keys_of(*made), 2):
        assert a != b
