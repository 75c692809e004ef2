"""What `validate` prints and what becomes of its rows: tables, verdicts, recordings."""

import io
import json

import numpy as np
import pytest
from helpers import random_mask
from rich.console import Console

from wavealign.errors import InputError
from wavealign.masks import BlockMask, save_mask
from wavealign.order import build_schedule
from wavealign.report.validation import costs_line, validation_table, verdict_line
from wavealign.runs.ranking import rank
from wavealign.runs.result import Result
from wavealign.sim.recordings import load_recordings
from wavealign.sim.setup import Setup
from wavealign.sim.simulate import run_schedule


def test_ranking_by_hand():
    """Measured 10, 11, 11.05, 12: the middle two are a tie; one pair of five is the wrong way."""
    ranking = rank([11.0, 10.0, 12.0, 13.0], [10.0, 11.0, 11.05, 12.0])
    assert (ranking.agree, ranking.disagree) == (4, 1)
    assert ranking.kendall_tau == pytest.approx(0.6)
    assert (ranking.chosen, ranking.fastest) == (1, 0)
    assert ranking.regret_frac == pytest.approx(0.1)
    assert rank([1.0], [2.0]).kendall_tau is None


def rows(policies, predicted_ms, measured_ms):
    mask = random_mask(shape=(1, 40, 50))
    setup = Setup.make("h200", wave=8)
    for policy, predicted, measured in zip(policies, predicted_ms, measured_ms, strict=True):
        row = run_schedule(mask, build_schedule(mask, policy, 8), setup, name="m")
        row = row.replaced(time_ms=predicted)
        yield row.replaced(source="measured", model=None, time_ms=measured), row


def text_of(table):
    stream = io.StringIO()
    Console(width=300, file=stream).print(table)
    return stream.getvalue()


def test_predicted_stands_beside_measured():
    pairs = list(rows(("original", "nnz"), (20.0, 10.0), (22.0, 10.0)))
    text = text_of(validation_table(pairs))
    original, nnz = text.splitlines()[1:3]
    assert original.split()[1:3] == ["22.00", "ms"]
    assert "-9.1%" in original
    assert "2.200x" in nnz
    assert "2.000x" in nnz
    assert verdict_line(pairs).startswith("predicted and measured best: nnz; Kendall tau 1.00")


def test_a_wrong_choice_is_named_with_what_it_costs():
    pairs = list(rows(("original", "nnz"), (9.0, 10.0), (11.0, 10.0)))
    line = verdict_line(pairs)
    assert "predicted best: original, measured best: nnz, which is 10.00 % faster" in line
    assert "Kendall tau -1.00 over 1 pairs" in line


def test_without_a_prediction_nothing_is_made_up():
    pairs = [(measured, None) for measured, _ in rows(("nnz",), (1.0,), (2.0,))]
    assert verdict_line(pairs) == "No prediction."
    assert text_of(validation_table(pairs)).splitlines()[1].split()[3:5] == ["-", "-"]


def test_costs_are_told_apart_from_kernels():
    measured = [m for m, _ in rows(("nnz",), (1.0,), (2.0,))]
    assert "nothing is moved" in costs_line(measured)
    assert "not checked" in costs_line(measured)
    moved = [m.replaced(gather_ms=0.5, scatter_ms=0.7, error_frac=2e-3) for m in measured]
    assert "0.500 ms, O and LSE back 0.700 ms" in costs_line(moved)
    assert "at most 2.0e-03" in costs_line(moved)


def measured_rows(tmp_path, mask, **changes):
    """A results file of two heads of a mask, launched together, in both regimes."""
    save_mask(tmp_path / "m.npz", mask)
    chosen = mask.select_heads([0, 2])
    setup = Setup.make("h200", wave=8)
    lines = []
    for policy in ("nnz", "lockstep"):
        schedule = build_schedule(chosen, policy, 8, seed=3).ragged_kv_first(chosen)
        row = run_schedule(chosen, schedule, setup, seed=3, name="m", heads="0,2")
        row = row.replaced(source="measured", model=None, ragged_kv_first=True)
        row = row.replaced(tensor_active_frac=0.8, **changes)
        lines += [row, row.replaced(regime="steady", time_ms=2 * row.time_ms)]
    lines.append(row.replaced(policy="mine.npz (nnz)", schedule_file="mine.npz"))
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(line.to_json() for line in lines), encoding="utf-8")
    return path, lines


def ragged_mask(seed=0):
    dense = np.random.default_rng(seed).random((3, 20, 25)) < 0.4
    return BlockMask.from_dense(dense, (128, 128), (20 * 128, 25 * 128 - 40))


def test_rows_of_validate_are_rebuilt_as_they_ran(tmp_path):
    mask = ragged_mask()
    path, lines = measured_rows(tmp_path, mask)
    found = list(load_recordings(path))
    assert [r.schedule.policy for r in found] == ["nnz", "lockstep"]
    for recording, line in zip(found, lines[::2], strict=False):
        assert recording.mask.shape == (2, 20, 25)
        assert recording.steady_ms == pytest.approx(2 * line.time_ms)
        assert recording.measured.tensor_active_frac == 0.8
        pointers = recording.schedule.indptr
        lists = np.split(recording.schedule.indices, pointers[1:-1])
        with_last = [row for row in lists if 24 in row]
        assert with_last
        assert all(row[0] == 24 for row in with_last)
        again = run_schedule(recording.mask, recording.schedule, Setup.make("h200", wave=8))
        assert again.hbm_read_bytes == line.hbm_read_bytes


def test_another_mask_of_the_same_name_is_refused(tmp_path):
    path, _ = measured_rows(tmp_path, ragged_mask())
    save_mask(tmp_path / "m.npz", ragged_mask(seed=1))
    with pytest.raises(InputError, match="mask 'm', heads 0,2, isn't the one that ran"):
        list(load_recordings(path))


def test_rows_written_before_a_field_existed_are_read():
    _, row = next(rows(("nnz",), (1.0,), (2.0,)))
    row = row.replaced(tokens_kv=None)
    old = json.loads(row.to_json())
    for name in ("tokens_kv", "throttle", "gpu"):
        del old[name]
    assert Result.from_json(json.dumps(old)) == row
    del old["policy"]
    with pytest.raises(InputError, match="lacks policy"):
        Result.from_json(json.dumps(old))
