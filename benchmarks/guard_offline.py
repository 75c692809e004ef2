"""The guard against the simulator: what it chooses, what that wins, what the best would have won.

    python benchmarks/guard_offline.py [--device h200] [--uses 1] [--out FILE.jsonl] [--measured]

Launches of all heads: the shipped masks, and synthetic ones where there is little or nothing to
win (dense, vertical-slash, short sequences, few rows) or much (random, content-like, 64-row
tiles). "best" is the best of six policies for the whole launch; planning times are the guard
profile's. Everything here is simulated, but with --measured: then the times of the runs that ship
with the repository (FlashAttention-4 on an H200) take the simulator's place, for masks that ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import DATA, parser

from wavealign.guard import CostModel, Decision, Guard
from wavealign.guard.model import RESYNC, SAWTOOTH
from wavealign.masks import BlockMask, load_mask
from wavealign.order import Schedule, build_schedule
from wavealign.sim.recordings import load_recordings
from wavealign.sim.simulate import run_schedule
from wavealign.structures import json_text

POLICIES = ("original", "nnz", "svd+nnz", SAWTOOTH, "lockstep", RESYNC)
_NOTHING = 0.003  # a win below this share of the time counts as none


def random_rows(H, M, N, density, spread, seed, block=(128, 128)) -> BlockMask:
    """Columns at random, row lengths lognormal."""
    rng = np.random.default_rng(seed)
    sigma = np.sqrt(np.log1p(spread**2))
    rows = density * np.exp(sigma * rng.standard_normal((H, M, 1)) - sigma**2 / 2)
    return BlockMask.from_dense(rng.random((H, M, N)) < np.clip(rows, 1 / N, 1), block)


def content(H, M, N, density, seed, block=(128, 128)) -> BlockMask:
    """Smooth scores, a diagonal and a sink, row lengths that vary slowly."""
    rng = np.random.default_rng(seed)
    kept = np.zeros((H, M, N), bool)
    for h in range(H):
        rows, columns = (
            np.stack(
                [
                    np.interp(np.linspace(0, 63, n), np.arange(64), line)
                    for line in rng.standard_normal((6, 64))
                ]
            )
            for n in (M, N)
        )
        scores = rows.T @ columns + 0.7 * rng.standard_normal((M, N))
        away = np.arange(M)[:, None] / M - np.arange(N) / N
        scores += 4 * np.exp(-((40 * away) ** 2))
        scores[:, 0] += 9
        bend = np.interp(np.arange(M), np.linspace(0, M, 40), rng.standard_normal(40))
        count = np.clip(N * density * np.exp(0.6 * bend), 1, N - 1).astype(int)
        limit = np.take_along_axis(-np.sort(-scores, axis=1), count[:, None], 1)
        kept[h] = scores >= limit
    return BlockMask.from_dense(kept, block)


def vertical_slash(H, M, N, seed, block=(128, 128)) -> BlockMask:
    """Some columns and some diagonals."""
    rng = np.random.default_rng(seed)
    kept = np.zeros((H, M, N), bool)
    offset = np.arange(M)[:, None] * N // M - np.arange(N)
    for h in range(H):
        kept[h][:, rng.choice(N, N // 12, replace=False)] = True
        for slash in rng.integers(-N, N, 14):
            kept[h] |= np.abs(offset - slash) < max(1, N // 240)
        kept[h] |= np.abs(offset) < 2
    return BlockMask.from_dense(kept, block)


def dense(H, M, N) -> BlockMask:
    return BlockMask.from_dense(np.ones((H, M, N), bool))


def masks() -> Iterator[tuple[str, BlockMask]]:
    for name in ("xattention_75600", "spargeattn_75600"):
        yield name, load_mask(DATA / f"{name}.npz").mask
    for name in ("xattention_363600", "spargeattn_363600"):
        mask = load_mask(DATA / f"{name}.npz").mask
        for h in range(mask.H):
            yield f"{name}[{h}]", mask.select_heads([h])
    for name in ("video_cv1_2841", "vslash_2841"):
        yield name, load_mask(DATA / "h200" / f"{name}.npz").mask
    yield "dense 2 x 591", dense(2, 591, 591)
    yield "dense 1422", dense(1, 1422, 1422)
    yield "vertical-slash 4 x 591", vertical_slash(4, 591, 591, 1)
    yield "64-row vertical-slash 1182x591", vertical_slash(1, 1182, 591, 12, (64, 128))
    yield "random 2 x 1182, .35, spread .4", random_rows(2, 1182, 1182, 0.35, 0.4, 2)
    yield "random 1182, .10, spread .2", random_rows(1, 1182, 1182, 0.1, 0.2, 3)
    yield "random 8 x 591, .20, spread .1", random_rows(8, 591, 591, 0.2, 0.1, 4)
    yield "random 2841, .35, spread .4", random_rows(1, 2841, 2841, 0.35, 0.4, 13)
    yield "content 2 x 1182, .25", content(2, 1182, 1182, 0.25, 5)
    yield "content 591, .30", content(1, 591, 591, 0.3, 6)
    yield "short: 12 x 128, .5", random_rows(12, 128, 128, 0.5, 0.4, 7)
    yield "short: 4 x 256, .3", content(4, 256, 256, 0.3, 8)
    yield "tiny: 2 x 40, .5", random_rows(2, 40, 40, 0.5, 0.5, 9)
    yield "64-row random 1182x591, .35", random_rows(1, 1182, 591, 0.35, 0.4, 10, (64, 128))
    yield "64-row content 2364x1182, .3", content(1, 2364, 1182, 0.3, 11, (64, 128))


def mixed(schedules: dict[str, Schedule], policies: tuple[str, ...]) -> Schedule:
    """Each head from the schedule of its policy."""
    first = schedules["original"]
    return Schedule(
        np.stack([schedules[p].row_order[h] for h, p in enumerate(policies)]),
        first.indptr,
        np.concatenate([schedules[p].head_lists(h).indices for h, p in enumerate(policies)]),
        first.shape,
        "guard",
    )


def evaluate(name: str, mask: BlockMask, model: CostModel, uses: float) -> dict[str, object]:
    setup, profile = model.setup, model.profile
    decision = Guard(model).decide_mask(mask, uses)
    policies = [p for p in POLICIES if p != "svd+nnz" or mask.M <= 1500]  # ARPACK takes minutes
    schedules = {p: build_schedule(mask, p, setup.wave) for p in policies}
    kernel = {p: run_schedule(mask, s, setup).time_ms for p, s in schedules.items()}
    plan = {p: profile.plan_ms([p], mask.H, mask.M, mask.N) / uses for p in policies}
    total = {p: kernel[p] + plan[p] for p in policies}
    chosen = run_schedule(mask, mixed(schedules, decision.policies), setup)
    guard_ms = chosen.time_ms + decision.plan_ms
    return summary(name, mask.H, total, guard_ms, decision)


def summary(
    name: str, heads: int, total: dict[str, float], guard_ms: float, decision: Decision
) -> dict[str, object]:
    """One row of the table: times with planning, what was chosen, what it won."""
    best = min(total, key=total.get)
    possible = total["original"] - total[best]
    return {
        "mask": name,
        "heads": heads,
        "original_ms": total["original"],
        "best": best,
        "best_ms": total[best],
        "guard_ms": guard_ms,
        "guard": {p: decision.policies.count(p) for p in dict.fromkeys(decision.policies)},
        "slower_frac": guard_ms / total["original"] - 1,
        "expected_frac": decision.win_frac,
        "possible_frac": possible / total["original"],
        "caught": (total["original"] - guard_ms) / possible
        if possible > _NOTHING * total["original"]
        else None,
    }


def measured(model: CostModel, uses: float) -> Iterator[dict[str, object]]:
    """The guard's choice on masks that ran, by the card's own times.

    Campaigns of one mask are put together by the ratio to their own `original`. A mask whose
    chosen policy never ran is left out, and said so.
    """
    original: dict[str, float] = {}
    ratios: dict[str, dict[str, list[float]]] = {}
    found: dict[str, BlockMask] = {}
    for where in (DATA, DATA / "h200"):
        for runs in ("validated.runs.jsonl", "resync.runs.jsonl"):
            campaign: dict[str, dict[str, float]] = {}
            for run in load_recordings(where / runs, where, "fa4"):
                policy = {"resync": RESYNC}.get(run.schedule.policy, run.schedule.policy)
                campaign.setdefault(run.mask_name, {})[policy] = run.measured.time_ms
                found[run.mask_name] = run.mask
            for name, kernel in campaign.items():
                original.setdefault(name, kernel["original"])
                for policy, ms in kernel.items():
                    of_policy = ratios.setdefault(name, {}).setdefault(policy, [])
                    of_policy.append(ms / kernel["original"])
    for name, policies in ratios.items():
        mask = found[name]
        decision = Guard(model).decide_mask(mask, uses)
        (chosen,) = set(decision.policies)
        if chosen not in policies:
            print(f"{name:32} guard: {chosen}, which never ran on this mask")
            continue
        total = {
            p: original[name] * float(np.mean(r))
            + model.profile.plan_ms([p], mask.H, mask.M, mask.N) / uses
            for p, r in policies.items()
        }
        yield summary(name, mask.H, total, total[chosen], decision)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="h200")
    arguments.add_argument("--uses", type=float, default=1.0)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--measured", action="store_true")
    options = arguments.parse_args()
    model = CostModel.make(options.device)
    rows = []
    simulated = (evaluate(name, mask, model, options.uses) for name, mask in masks())
    for row in measured(model, options.uses) if options.measured else simulated:
        rows.append(row)
        caught = "nothing" if row["caught"] is None else f"{row['caught']:7.1%}"
        print(
            f"{row['mask']:32} original {row['original_ms']:7.3f} ms, guard {row['guard_ms']:7.3f} "
            f"({row['slower_frac']:+6.2%}, expected {-row['expected_frac']:+6.2%}), best "
            f"{row['best_ms']:7.3f} ({row['best']}), caught {caught}  {row['guard']}",
            flush=True,
        )
    won = sum(row["original_ms"] - row["guard_ms"] for row in rows)
    possible = sum(row["original_ms"] - row["best_ms"] for row in rows)
    caught = [row["caught"] for row in rows if row["caught"] is not None]
    print(
        f"\n{options.device}, plans used {options.uses:g} times: caught {won / possible:.1%} of "
        f"what could be won over all masks, {min(caught):.1%} at worst on one; slower than "
        f"original by at most {max(row['slower_frac'] for row in rows):+.2%}. "
        f"{'Measured' if options.measured else 'Simulated'}."
    )
    if options.out is not None:
        options.out.write_text("".join(json_text(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
