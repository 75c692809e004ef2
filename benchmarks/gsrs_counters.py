"""The sections `counters` and `predict` of benchmarks/gsrs_sessions.py: masks of the searches."""

from __future__ import annotations

import json
import subprocess
import time

import numpy as np
from common import PROGRAM
from gsrs_bench import Bench

from wavealign.masks import BlockMask, load_mask, save_mask
from wavealign.masks.export import packed
from wavealign.sessions import Session

COUNTED = ("original", "svd+nnz", "lockstep", "resync")
MASKS, COUNTERS = "masks.npz", "measured.runs.jsonl"
_MASK_BYTES = 3 * 2**20


def to_mask(bench: Bench, session: Session, step: int) -> BlockMask:
    """The blocks in use."""
    tokens = (bench.grid.tokens, bench.grid.tokens)
    keep = session.mask(0)[0].cpu().numpy()
    return BlockMask.from_dense(keep, (bench.block, bench.block), tokens, {"step": step})


def save_masks(bench: Bench, masks: dict[str, BlockMask]) -> None:
    """All in OUT's one file, of as many heads, evenly spread, as fit."""
    every = 3 if bench.heads >= 6 else 1
    while True:
        heads = list(range(0, bench.heads, every))
        parts = {
            f"{key}/{name}": array
            for key, mask in masks.items()
            for name, array in packed(mask.select_heads(heads)).items()
        }
        np.savez_compressed(bench.out / MASKS, **parts)
        size = (bench.out / MASKS).stat().st_size
        if size <= _MASK_BYTES or len(heads) < 3:
            break
        every += 1
    bench.note("masks", file=MASKS, heads=heads, bytes=size, keys=list(masks))
    bench.say(f"{MASKS}: heads {heads}, {size / 1e6:.1f} MB")


def counters(bench: Bench, seconds: float) -> None:
    """`wavealign validate` on the masks of the searches, all in one process.

    Without a profiler that can read counters, times alone.
    """
    file = bench.out / MASKS
    if not file.is_file():
        bench.note("counters", skipped=f"no {file.name}; run the section session first")
        return
    with np.load(file) as held:
        keys = list(dict.fromkeys(name.partition("/")[0] for name in held.files))
    rows = bench.work / "counters.jsonl"
    command = [*PROGRAM, "validate", "--gpu", "--no-predict",
               "--backend", "fa4" if bench.backend == "fa4" else "triton", "--no-limit",
               "--no-check", "--repeats", "5", "--regime", "single", "--regime", "steady",
               "--seconds", str(seconds), "--out", str(rows)]  # fmt: skip
    for key in keys:
        save_mask(bench.work / f"{key}.npz", load_mask(file, key=key).mask)
        command += ["--mask", str(bench.work / f"{key}.npz")]
    for policy in COUNTED:
        command += ["--policy", policy]
    for extra in (["--counters"], []):
        rows.unlink(missing_ok=True)
        begun = time.perf_counter()
        done = subprocess.run(
            [*command, *extra], stdout=subprocess.PIPE, text=True, timeout=500, check=False
        )
        took = time.perf_counter() - begun
        bench.note("counters", returncode=done.returncode, seconds=took, options=extra,
                   said=done.stdout)  # fmt: skip
        bench.say(f"validate {' '.join(extra)}: exit {done.returncode}, {took:.0f} s")
        if rows.is_file() and rows.stat().st_size:
            with (bench.out / COUNTERS).open("a", encoding="utf-8") as kept:
                kept.write(rows.read_text("utf-8"))
        if done.returncode == 0:
            print(done.stdout, flush=True)
            return


def predict(bench: Bench) -> None:
    """A table of what was measured beside what the simulator says of the same masks."""
    from wavealign.sim import simulate

    print(
        "| search | density | policy | regime | L2 hits, measured / simulated | HBM reads | time |"
    )
    print("|---|---|---|---|---|---|---|")
    for line in (bench.out / COUNTERS).read_text("utf-8").splitlines():
        row = json.loads(line)
        mask = load_mask(bench.out / MASKS, key=row["mask"]).mask
        guess = simulate(mask, row["policy"], "h200", row["kernel"], wave=row["wave"],
                         regime=row["regime"], seed=row["seed"])  # fmt: skip
        bench.note("predict", mask=row["mask"], policy=row["policy"], regime=row["regime"],
                   l2_hit_frac=guess.l2_hit_frac, hbm_read_bytes=guess.hbm_read_bytes,
                   time_ms=guess.time_ms)  # fmt: skip
        hits = [f"{100 * x:.1f}" if x is not None else "–"
                for x in (row["l2_hit_frac"], guess.l2_hit_frac)]  # fmt: skip
        read = [f"{x / 1e9:.2f}" if x is not None else "–"
                for x in (row["hbm_read_bytes"], guess.hbm_read_bytes)]  # fmt: skip
        print(f"| {row['mask']} | {mask.density:.3f} | {row['policy']} | {row['regime']} | "
              f"{hits[0]} / {hits[1]} % | {read[0]} / {read[1]} GB | "
              f"{row['time_ms']:.2f} / {guess.time_ms:.2f} ms |")  # fmt: skip
