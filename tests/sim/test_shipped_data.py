"""The masks and runs that ship, against what data/README.md says of them."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from helpers import DATA

from wavealign.masks import load_mask, mask_stats
from wavealign.order import parse_policy
from wavealign.order.registry import ROWS
from wavealign.runs.result import Result
from wavealign.sim import Setup
from wavealign.sim.calibrate import replay, replay_errors
from wavealign.sim.recordings import load_recordings

RECORDED = (
    "h200/runs-first.jsonl", "h200/runs.jsonl", "xattention_363600.runs.jsonl",
    "spargeattn_363600.runs.jsonl",
)  # fmt: skip
VALIDATED = [DATA / "validated.runs.jsonl", DATA / "h200/validated.runs.jsonl"]

# Densities and NNZ spreads of the single heads, as data/README.md lists them.
HEADS = {
    "xattention_75600": ((8, 591, 591), (128, 128), 75600),
    "spargeattn_75600": ((8, 591, 1182), (128, 64), 75600),
    "xattention_363600": ((4, 2841, 2841), (128, 128), 363600),
    "spargeattn_363600": ((2, 5682, 2841), (64, 128), 363600),
    "h200/video_cv1_2841": ((1, 2841, 2841), (128, 128), 363648),
    "h200/vslash_2841": ((1, 2841, 2841), (128, 128), 363648),
    "h200/rand_cv_2841": ((1, 2841, 2841), (128, 128), 363648),
    "h200/rand_eq_2841": ((1, 2841, 2841), (128, 128), 363648),
    "h200/video_1156h2": ((2, 1156, 1156), (128, 128), 147968),
    "paper/xattention_363600": ((1, 2841, 2841), (128, 128), 363600),
    "paper/spargeattn_363600": ((1, 2841, 2841), (128, 128), 363600),
    "paper/flexprefill_363600": ((1, 2841, 2841), (128, 128), 363600),
    "paper/minference_363600": ((1, 2841, 2841), (128, 128), 363600),
    "h200/content_262144_64x128": ((1, 4096, 2048), (64, 128), 262144),
}


CLIP = {
    "xattention_75600": 8,
    "spargeattn_75600": 8,
    "flexprefill_75600": 8,
    "minference_75600": 8,
    "xattention_363600": 4,
    "xattention_363600_thin": 2,
}


GSRS = {10: 0.647, 20: 0.355, 30: 0.246, 40: 0.187}


@pytest.mark.parametrize("step", GSRS)
def test_masks_of_a_session_are_what_the_provenance_file_says(step):
    mask = load_mask(DATA / f"gsrs/step{step}.npz").mask
    assert (mask.shape, mask.tokens_q, mask.meta["step"]) == ((8, 929, 929), 118_800, step)
    assert mask.density == pytest.approx(GSRS[step], abs=5e-4)
    assert "not a video model" in mask.meta["note"]
    if step > 10:  # searched among the candidates of the first
        first = load_mask(DATA / "gsrs/step10.npz").mask
        assert not (mask.head(5).to_dense() & ~first.head(5).to_dense()).any()


def test_a_session_was_simulated_as_it_was_measured():
    """Hits within a point, single launches within 1 %: docs/results/fidelity.md, last search."""
    found = load_recordings(DATA / "gsrs/validated.runs.jsonl", kernel="triton")
    last = [r for r in found if r.mask_name == "step40"]
    assert [r.schedule.policy for r in last] == ["original", "svd+nnz", "lockstep", "resync"]
    for recording, simulated in zip(
        last, replay(last, Setup.make("h200", kernel="triton")), strict=True
    ):
        measured = recording.measured
        assert abs(simulated.l2_hit_frac - measured.l2_hit_frac) < 0.01
        assert simulated.time_ms == pytest.approx(measured.time_ms, rel=0.01)


@pytest.mark.parametrize("stem", CLIP)
def test_masks_of_the_clip_are_what_the_provenance_file_says(stem):
    name, method = f"clip/{stem}.npz", stem.partition("_")[0]
    mask = load_mask(DATA / name).mask
    assert mask.meta["method"] == method
    assert len(mask.meta["heads"]) == mask.H == CLIP[stem]
    assert "not a video model" in mask.meta["note"]
    total, _ = mask_stats(mask)
    row = next(r for r in (DATA / "README.md").read_text().splitlines() if f"`{name}`" in r)
    assert [f"{total.density:.3f}", f"{total.row_nnz_spread:.2f}"] == row.split(" | ")[3:5]
    assert f"{mask.H}, {mask.M}, {mask.N}" in row


@pytest.mark.parametrize("name", HEADS)
def test_masks_are_what_the_provenance_file_says(name):
    mask = load_mask(DATA / f"{name}.npz").mask
    shape, block, tokens = HEADS[name]
    assert mask.shape == shape
    assert (mask.block_q, mask.block_kv) == block
    assert (mask.tokens_q, mask.tokens_kv) == (tokens, tokens)
    assert mask.meta["provenance"] == "data/README.md"
    total, _ = mask_stats(mask)
    row = next(
        line for line in (DATA / "README.md").read_text().splitlines() if f"`{name}.npz`" in line
    )
    assert f"{total.density:.3f}" in row
    assert f"{total.row_nnz_spread:.2f}" in row


def test_simulated_runs_are_close_to_what_the_card_measured():
    """Runs of flash-attn-4 on an H200, orders as recorded (docs/fidelity.md)."""
    found = [recording for name in RECORDED for recording in load_recordings(DATA / name)]
    assert len(found) == 38 + 20 + 6
    for recording in found[::5]:
        recording.schedule.check(recording.mask)
    limits = {"full": (0.8, 1.5, 1.5), "fast": (3.0, 2.5, 3.0)}
    for model, (hit_points, read_percent, time_percent) in limits.items():
        results = replay(found, Setup.make("h200", model=model))
        errors = replay_errors(found, results)
        assert np.abs(errors.hit_points).mean() <= hit_points
        assert np.abs(errors.read_percent).mean() <= read_percent
        assert np.abs(errors.time_percent).mean() <= time_percent
        # A simulator that says the same of all orders could not have this.
        measured = [recording.measured.l2_hit_frac for recording in found]
        assert np.corrcoef(measured, [r.l2_hit_frac for r in results])[0, 1] > 0.95


def sample(path, tmp_path, kernel, step):
    """Every so many runs of a kernel, without those whose schedules take long to rebuild."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kept = [r for r in rows if r["kernel"] == kernel and "svd" not in r["policy"]][::step]
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, kept)), encoding="utf-8")
    return list(load_recordings(tmp_path / "runs.jsonl", path.parent, kernel))


@pytest.mark.parametrize("path", VALIDATED)
def test_what_validate_measured_later_is_predicted_too(path, tmp_path):
    """Runs that nothing about hits was fitted to; a sample, for time (docs/fidelity.md)."""
    found = sample(path, tmp_path, "fa4", 5)
    errors = replay_errors(found, replay(found, Setup.make("h200")))
    assert len(found) >= 5
    assert np.abs(errors.hit_points).mean() <= 2.0
    assert np.abs(errors.time_percent).mean() <= 3.0


@pytest.mark.parametrize(("kernel", "time_percent"), [("triton", 2.0), ("flex", 6.0)])
def test_other_kernels_ran_the_same_schedules(kernel, time_percent, tmp_path):
    found = sample(VALIDATED[1], tmp_path, kernel, 2)
    errors = replay_errors(found, replay(found, Setup.make("h200", kernel)))
    assert len(found) >= 3
    assert np.abs(errors.hit_points).mean() <= 2.0
    assert np.abs(errors.time_percent).mean() <= time_percent


def test_compared_orders_are_of_the_shipped_masks():
    """data/orders: each row is a run result, of a mask that ships, by a canonical policy name."""
    folders = {"": DATA, "clip/": DATA / "clip", "h200/": DATA / "h200", "paper/": DATA / "paper"}
    digests = {
        prefix + path.stem: load_mask(path).mask.digest
        for prefix, folder in folders.items()
        for path in folder.glob("*.npz")
    }
    del digests["clip/xattention_363600"]  # made after the comparison
    seen = set()
    with gzip.open(DATA / "orders" / "runs.jsonl.gz", "rt", encoding="utf-8") as stream:
        for line in stream:
            run = Result.from_json(line)
            assert digests[run.mask] == run.mask_digest
            assert parse_policy(run.policy).name == run.policy
            assert json.loads(line)["planning_ms"] >= json.loads(line)["rows_ms"] >= 0
            seen.add((run.device, run.mask, run.policy))
    policies = {policy for _, _, policy in seen}
    assert len(seen) == 2 * len(digests) * len(policies)
    assert {parse_policy(policy).base for policy in policies} == set(ROWS)
