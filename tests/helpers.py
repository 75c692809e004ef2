"""What several test modules need: small random masks, and paths."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from wavealign.masks import BlockMask
from wavealign.runs.launch import Launch
from wavealign.runs.result import Result
from wavealign.runs.trial import TrialRecord

ROOT = Path(__file__).parent.parent
DATA = ROOT / "data"
PROGRAM = (sys.executable, "-m", "wavealign.cli")


def run_interpreted(script):
    """What a script of tests/ prints that runs Triton's kernels on the CPU, by tools/interpreter.

    In a process of its own: the interpreter is chosen before anything imports triton.
    """
    paths = [str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests" / script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@contextmanager
def nothing_waits():
    """Inside, an operation that makes the host wait for the GPU is an error."""
    import torch

    def set_mode(mode):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode(mode)

    torch.cuda.synchronize()
    try:
        set_mode("error")
        yield
    finally:
        set_mode("default")


@st.composite
def dense_masks(draw, max_heads=3, max_rows=12, max_columns=12):
    """Bool arrays [H, M, N] of any density, with empty rows and heads among them."""
    shape = (
        draw(st.integers(1, max_heads)),
        draw(st.integers(1, max_rows)),
        draw(st.integers(1, max_columns)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row_density = rng.random(shape[:2]) * draw(st.sampled_from([0.0, 0.3, 1.0, 1.5]))
    return rng.random(shape) < row_density[:, :, None]


def random_mask(seed=0, shape=(2, 30, 24), density=0.4, block=(128, 128), tokens=None):
    """A BlockMask whose rows differ in length."""
    rng = np.random.default_rng(seed)
    row_density = density * (0.4 + 1.2 * rng.random(shape[:2]))
    return BlockMask.from_dense(rng.random(shape) < row_density[:, :, None], block, tokens)


def row_lists(schedule_or_mask):
    """Per head, per query block, the list of K/V blocks."""
    H, M, _ = schedule_or_mask.shape
    pointers, indices = schedule_or_mask.indptr, schedule_or_mask.indices
    return [
        [indices[pointers[h * M + i] : pointers[h * M + i + 1]].tolist() for i in range(M)]
        for h in range(H)
    ]


def dense_attention(q, k, v, mask):
    """Masked attention the textbook way, in float64; rows without keys give 0."""
    kept = np.stack([head.to_dense() for head in mask.heads()])
    kept = kept.repeat(mask.block_q, 1).repeat(mask.block_kv, 2)
    scores = np.einsum("mhd,nhd->hmn", q, k)[:, : mask.tokens_q, : mask.tokens_kv]
    weights = np.where(kept[:, : mask.tokens_q, : mask.tokens_kv], np.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True)
    out = weights / np.where(total == 0, 1, total) @ v.transpose(1, 0, 2)
    return out.transpose(1, 0, 2)


def run_result(**changes):
    """A simulated row; `changes` replace its fields."""
    fields = {
        "source": "simulated",
        "policy": "original",
        "mask": "m",
        "mask_digest": "d0",
        "heads": "0-1",
        "head": None,
        "device": "h200",
        "kernel": "fa4",
        "seed": 0,
        "wave": 132,
        "model": "full",
        "regime": "single",
        "l2_capacity_bytes": 60_964_209,  # what the profile says of an H200
        "kv_block_bytes": 65536,
        "time_ms": 10.0,
        "l2_hit_frac": 0.5,
        "lts_sector_hit_frac": None,
        "l2_requested_bytes": 4_000_000,
        "fabric_bytes": None,
        "hbm_read_bytes": 2_000_000,
        "compulsory_bytes": 1_000_000,
        "belady_bytes": None,
        "imbalance_frac": None,
        "clock_ghz": None,
        "energy_j": None,
        "limit_ms": None,
        "gap": None,
        "intensity_flop_per_byte": None,
        "roofline": None,
        "bound": None,
        "version": "0.1.0",
    }
    return Result.of(**{**fields, **changes})


def measured_result(**changes):
    """A measured row; `changes` replace its fields."""
    fields = {"source": "measured", "model": None, "l2_capacity_bytes": None, "repeats": 9}
    return run_result(**{**fields, "time_spread_frac": 0.01, "cache_control": "all", **changes})


def trial(result=None, error=None, planning_ms=5.0, **spec):
    """A trial that is done with `result`, or failed with `error`."""
    fields = {
        "source": "simulated",
        "mask": "m",
        "mask_digest": "d0",
        "heads": "0-1",
        "policy": "original",
        "device": "h200",
        "kernel": "fa4",
        "wave": 132,
        "l2_bytes": None,
        "head_dim": 128,
        "dtype": "bf16",
        "model": "full",
        "regime": "single",
        "seed": 0,
    }
    if result is not None:
        fields |= {name: getattr(result, name) for name in fields if hasattr(result, name)}
        fields |= {"head_dim": 128, "dtype": "bf16"}
    status = "failed" if error else "done"
    made = Launch(**{**fields, **spec})
    return TrialRecord(made, status, result, error, planning_ms if result else None, 1.0, "w")


def write_lines(path, records):
    """Records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(record.to_json() + "\n" for record in records))
    return path


def alive(*kinds):
    """The objects of these classes that somebody still refers to."""
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), kinds)]
