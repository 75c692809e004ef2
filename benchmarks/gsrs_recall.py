r"""GSRS, AdaSpa, LiteAttention, top-k, and what their masks mean for L2: docs/results/gsrs.md.

    python benchmarks/gsrs_recall.py [--qk FILE] [--large FILE] [--plot FILE] [--seed 0]

--qk and --large are Q and K of a clip, made once (docs/methods.md says what they are):

    wavealign mask make --clip FILE.mp4 --grid 9x30x52 --profile hunyuan --method random \
        --out r.npz --save-qk small.safetensors
    wavealign mask make --clip FILE.mp4 --size 441x720x1280 --clip-step 1 --layers 5 \
        --method random --out r.npz --save-qk large.safetensors

Without them synthetic Q and K stand in. Steps are made by noise that falls
(wavealign.qk.trajectory): everything here is on that trajectory. Recall is computed, exactly;
hit ratios, HBM reads and times are simulated; planning times are the guard profile's. On the CPU.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import parser, step_plot
from torch import Tensor

from wavealign.gpu.importance.attend import Importance
from wavealign.guard.profile import load_guard_profile
from wavealign.masks import BlockMask, mask_stats
from wavealign.methods.exact import recall
from wavealign.methods.select import select_top_k, select_top_p
from wavealign.qk import TokenGrid, token_order
from wavealign.qk.sources import FileSource, QKSource, TensorSource
from wavealign.qk.trajectory import NoisyTrajectory, synthetic_qk
from wavealign.sessions import adaspa, gsrs
from wavealign.sessions.adaspa import AdaSpa
from wavealign.sessions.gsrs import Gsrs
from wavealign.sessions.liteattention import still_needed
from wavealign.sessions.rule import Found, Memory, Rule, StepCall
from wavealign.sim import simulate

STEPS = 50
BLOCK = 64  # of the small clip: rows of some hundred blocks, at exact cost
SHOWN = (11, 19, 21, 29, 31, 39, 41, 49)  # the first and the last step of each mask of GSRS
POLICIES = ("original", "svd+nnz", "lockstep", "resync")


class Run:
    """The trajectory of some heads in Hilbert order: its scores, looked at once a step.

    A pass over all scores leaves each row's log-sum-exp (float32 ``[H, L, N]``) and largest score
    of each block; block weights over any candidates and by any log-sum-exp follow from the former.
    """

    def __init__(self, source: QKSource, grid: TokenGrid, heads: Sequence[int], seed: int) -> None:
        self.trajectory = NoisyTrajectory(source, STEPS, seed)
        self.places = [self.trajectory.places[h] for h in heads]
        self.order = torch.from_numpy(token_order("hilbert", grid))
        self.tokens = grid.tokens
        self._sums: dict[int, Tensor] = {}
        self._maxima: dict[int, Tensor] = {}

    def head(self, step: int, place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Queries and keys ``(L, D)``."""
        q, k = self.trajectory.read(step, place)
        return q[self.order], k[self.order]

    def sums(self, step: int) -> Tensor:
        """Log-sum-exp of each row and block, ``[H, L, N]``."""
        self._look(step)
        return self._sums[step]

    def maxima(self, step: int) -> Tensor:
        """Largest score of each row and block, ``[H, M, rows, N]``, -inf beyond the sequence."""
        self._look(step)
        rows = torch.nn.functional.pad(
            self._maxima[step], (0, 0, 0, -self.tokens % BLOCK), value=-math.inf
        )
        return rows.reshape(len(rows), -1, BLOCK, rows.shape[-1])

    def importance(
        self, step: int, candidates: Tensor | None = None, reference_lse: Tensor | None = None
    ) -> Importance:
        """What `attend_with_importance` gives, but for the output."""
        sums = self.sums(step)
        if candidates is not None:
            rows = candidates[0].repeat_interleave(BLOCK, 1)[:, : self.tokens]
            sums = sums.masked_fill(~rows, -math.inf)
        lse = sums.logsumexp(-1)
        by = lse if reference_lse is None else reference_lse[0]
        shares = torch.nn.functional.pad(
            (sums - by[..., None]).exp(), (0, 0, 0, -self.tokens % BLOCK)
        )
        weights = shares.reshape(len(sums), -1, BLOCK, sums.shape[-1]).sum(2)
        weights /= BLOCK
        weights[:, -1] *= BLOCK / (BLOCK - -self.tokens % BLOCK)
        return Importance(lse[None], lse[None], weights[None])

    def mass(self, step: int) -> Tensor:
        """``[H, M, N]``."""
        return self.importance(step).weights[0]

    def recall(self, step: int, keep: Tensor) -> float:
        """Mass kept, mean over heads."""
        pairs = zip(self.mass(step), keep, strict=True)
        return statistics.fmean(recall(m, k, self.tokens, BLOCK) for m, k in pairs)

    def search(self, rule: Rule, step: int, memory: Memory) -> Found:
        """A rule's search, over the scores that were looked at already."""

        def looked_up(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Importance:
            return self.importance(step, named.get("candidates"), named.get("reference_lse"))

        nothing = torch.empty(1, self.tokens, len(self.places), 1)
        call = StepCall(step, nothing, nothing, nothing, (BLOCK, BLOCK))
        with (
            patch.object(gsrs, "attend_with_importance", looked_up),
            patch.object(adaspa, "attend_with_importance", looked_up),
        ):
            return rule.search(call, memory, lambda: nothing)

    def _look(self, step: int) -> None:
        if step in self._sums:
            return
        L, ragged = self.tokens, -self.tokens % BLOCK
        shape = (len(self.places), L, (L + ragged) // BLOCK)
        self._sums[step], self._maxima[step] = torch.empty(shape), torch.empty(shape)
        for h, place in enumerate(self.places):
            q, k = self.head(step, place)
            q = q / math.sqrt(q.shape[1])
            keys = k.T.contiguous()
            for rows in torch.arange(L).split(1024):
                scores = torch.nn.functional.pad(q[rows] @ keys, (0, ragged), value=-math.inf)
                scores = scores.view(len(rows), -1, BLOCK)
                top = scores.amax(-1)
                self._maxima[step][h, rows] = top
                sums = scores.sub_(top[..., None]).exp_().sum(-1)
                self._sums[step][h, rows] = sums.log_().add_(top)


def masks_over_steps(rule: Rule, run: Run) -> dict[int, Tensor]:
    """Step → the mask that is in use there, bool ``[H, M, N]``, after the first search."""
    memory, keep, masks = Memory(), None, {}
    for step in range(STEPS):
        if keep is not None:
            masks[step] = keep
        if rule.action(step) == "search":
            found = run.search(rule, step, memory)
            keep, memory = found.keep[0], found.memory
    return masks


def lite_masks(run: Run, threshold: float) -> dict[int, Tensor]:
    """As `masks_over_steps`, by the rule of LiteAttention."""
    keep, masks = None, {}
    for step in range(10, STEPS - 1):
        rows = run.maxima(step)
        if keep is None:
            keep = torch.ones_like(rows[:, :, 0], dtype=torch.bool)
        else:
            masks[step] = keep
        keep = still_needed(rows, keep[:, :, None], threshold)
    assert keep is not None
    masks[STEPS - 1] = keep
    return masks


def mean_density(masks: dict[int, Tensor]) -> float:
    return statistics.fmean(float(m.float().mean()) for m in masks.values())


def lite_at_density(run: Run, wanted: float) -> tuple[float, dict[int, Tensor]]:
    """The threshold whose mean density is the wanted one, by bisection."""
    low, high = -12.0, 0.5
    for _ in range(9):
        middle = (low + high) / 2
        if mean_density(lite_masks(run, middle)) > wanted:
            low = middle
        else:
            high = middle
    return high, lite_masks(run, high)


def report_recall(run: Run, plot: str | None) -> None:
    """Recall of all methods at the mean density of GSRS."""
    grown = masks_over_steps(Gsrs(), run)
    density = mean_density(grown)
    blocks = grown[SHOWN[0]].shape[-1]
    keep = round(density * blocks) / blocks
    threshold, lite = lite_at_density(run, density)
    ada = {"steps": STEPS, "sparsity": 1 - density}
    rows: dict[str, dict[int, Tensor]] = {
        "gsrs": grown,
        "gsrs, every search over all blocks": masks_over_steps(Gsrs(reduced=False), run),
        "adaspa": masks_over_steps(AdaSpa(**ada), run),
        "adaspa, exact log-sum-exp": masks_over_steps(AdaSpa(**ada, cached_lse=False), run),
        "adaspa, heads alike": masks_over_steps(AdaSpa(**ada, head_adaptive=False), run),
        f"liteattention, threshold {threshold:.2f}": lite,
        f"top-k {keep:.1%}, searched as gsrs": masks_over_steps(_topk(density), run),
        "top-k 20 %, searched as gsrs": masks_over_steps(_topk(0.2), run),
        "the best blocks of the step, as many (ceiling)": {
            t: _best(run.mass(t), density) for t in SHOWN
        },
        "the best blocks of the step, as many as gsrs then": {
            t: _best(run.mass(t), float(grown[t].float().mean())) for t in SHOWN
        },
    }
    print(f"Recall (%) at the step, mean over heads; GSRS's mean density is {density:.3f}.\n")
    print("| method | mean density | " + " | ".join(f"step {t}" for t in SHOWN) + " | mean |")
    print("|---|---|" + "---|" * (len(SHOWN) + 1))
    curves = {}
    for name, masks in rows.items():
        values = [100 * run.recall(t, masks[t]) for t in SHOWN]
        curves[name] = values
        shown = mean_density(masks) if len(masks) > len(SHOWN) else density
        cells = " | ".join(f"{value:.1f}" for value in values)
        print(f"| {name} | {shown:.3f} | {cells} | {statistics.fmean(values):.1f} |")
    print("\n| density at the step | " + " | ".join(f"step {t}" for t in SHOWN) + " |")
    print("|---|" + "---|" * len(SHOWN))
    for name in ("gsrs", f"liteattention, threshold {threshold:.2f}"):
        cells = " | ".join(f"{float(rows[name][t].float().mean()):.3f}" for t in SHOWN)
        print(f"| {name} | {cells} |")
    back = (grown[41] & ~grown[39]).sum() / grown[41].sum()
    print(
        f"\nOf the blocks that GSRS's last search keeps, {float(back):.2%} had been dropped by the"
    )
    print("search before it and came back from the candidates.\n")
    if plot is not None:
        _plot_recall(curves, density, plot)


def _best(mass: Tensor, density: float) -> Tensor:
    """The share of all heads' blocks that holds most: no mask of that density holds more."""
    flat = mass.flatten()
    keep = torch.zeros_like(flat, dtype=torch.bool)
    keep[flat.topk(round(density * flat.numel())).indices] = True
    return keep.view(mass.shape)


def _topk(keep: float) -> Gsrs:
    return Gsrs(select="top-k", keep=keep, reduced=False, name="topk")


def _plot_recall(curves: dict[str, list[float]], density: float, path: str) -> None:
    from wavealign.report.plots import INK, MUTED, check_plot, save

    target = check_plot(path)
    figure, axis = step_plot((8.5, 4.8))
    colours = (
        "#3b6fb6", "#2f8fa3", "#d9822b", "#8a6d3b", "#b5475d", "#3f8f6b", "#8a5fb0", "#c9a227",
        MUTED, INK,
    )  # fmt: skip
    for colour, (name, values) in zip(colours, curves.items(), strict=True):
        axis.plot(
            SHOWN, values, color=colour, marker="o", markersize=3.5, linewidth=1.6, label=name,
            linestyle="--" if "best blocks" in name else "-",
        )  # fmt: skip
    for step in (20, 30, 40):
        axis.axvline(step, color="#c9ced6", linewidth=0.8)
    axis.set_xlabel("step (lines: searches of gsrs)", fontsize=9.5, color=INK)
    axis.set_ylabel("attention mass kept (%)", fontsize=9.5, color=INK)
    axis.legend(frameon=False, fontsize=8, labelcolor=INK)
    title = f"Recall over steps at mean density {density:.3f} (20 % where it says so)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    save(figure, target)


def report_cached(run: Run) -> None:
    """AdaSpa's scores by a cached log-sum-exp, beside the exact ones."""
    print("| step | row sum, mean of a head, least to most | 5 % to 95 % of all rows | blocks "
          "chosen otherwise, top-k 20 % | recall cached / exact | top-p .9, cached: density, "
          "recall | exact |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    cached = run.importance(10).lse
    for step in (11, 15, 20, 30, 40):
        exact, old = run.importance(step), run.importance(step, reference_lse=cached)
        sums = (exact.lse - cached)[0].exp()
        count = round(0.2 * exact.weights.shape[-1])
        chosen = [select_top_k(x.weights[0], count) for x in (old, exact)]
        other = 1 - float((chosen[0] & chosen[1]).sum() / chosen[1].sum())
        recalls = [run.recall(step, keep) for keep in chosen]
        by_sum = [_until(old.weights[0], 0.9), select_top_p(exact.weights[0], 0.9)]
        told = [f"{float(k.float().mean()):.3f}, {run.recall(step, k):.3f}" for k in by_sum]
        means, q = sums.mean(-1), torch.tensor([0.05, 0.95])
        ends = sums.flatten().quantile(q)
        print(f"| {step} | {float(means.min()):.2f} to {float(means.max()):.2f} | "
              f"{float(ends[0]):.2f} to {float(ends[1]):.2f} | {other:.2%} | "
              f"{recalls[0]:.4f} / {recalls[1]:.4f} | {told[0]} | {told[1]} |")  # fmt: skip
    print()


def _until(scores: Tensor, share: float) -> Tensor:
    """Top-p as it acts on scores that are taken to sum to 1: the sum itself is compared to p."""
    values, ranks = scores.sort(dim=-1, descending=True, stable=True)
    before = values.double().cumsum(-1) - values
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ranks, before < share)


def sampled_sums(q: Tensor, k: Tensor, block: int, every: tuple[int, int]) -> Tensor:
    """Softmax sums of some rows over blocks, from some keys: ``[M, rows a block, N]``.

    A clip of 118,800 tokens on the CPU: every 8th query and every 4th key of each block.
    """
    tokens = len(q)
    whole = tokens // block * block
    rows = q[every[0] // 2 : whole : every[0]].float() / math.sqrt(q.shape[1])
    keys = k[every[1] // 2 : whole : every[1]].float().T.contiguous()
    per_q, per_k = block // every[0], block // every[1]
    found = []
    for part in torch.split(rows, 64 * per_q):
        scores = part @ keys
        scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        found.append(scores.view(-1, per_q, scores.shape[-1] // per_k, per_k).sum(-1))
    return torch.cat(found)


def report_locality(source: QKSource, grid: TokenGrid, heads: Sequence[int], seed: int) -> None:
    """Hit ratio, HBM reads and time of each search's mask, by policy (simulated)."""
    run = Run(source, grid, heads, seed)
    rule = Gsrs()
    found: dict[int, list[Tensor]] = {step: [] for step in rule.search_steps}
    for place in run.places:
        candidates = None
        for step, share in zip(rule.search_steps, rule.p, strict=True):
            sums = sampled_sums(*run.head(step, place), 128, (8, 4))
            if candidates is not None:
                sums = sums * candidates[:, None]
            weights = (sums / sums.sum(-1, keepdim=True)).mean(1)
            keep = select_top_p(weights, share, candidates)
            candidates = keep if candidates is None else candidates
            found[step].append(keep)
    profile = load_guard_profile("h200")
    print("| search | density | NNZ spread | policy | L2 hits | HBM reads | time a launch | "
          "speedup | planning, a use |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for step in rule.search_steps:
        keep = torch.stack(found[step])
        mask = BlockMask.from_dense(keep.numpy(), (128, 128))
        spread, base = mask_stats(mask)[0].row_nnz_spread, None
        for policy in POLICIES:
            result = simulate(mask, policy, "h200", regime="steady", seed=seed)
            assert result.time_ms is not None
            base = base or result.time_ms
            uses = rule.uses(step)
            plan_ms = profile.plan_ms([policy] * mask.H, mask.H, mask.M, mask.N) / uses
            first = (
                f"{step} | {mask.density:.3f} | {spread:.2f}" if policy == "original" else " | | "
            )
            print(f"| {first} | `{policy}` | {100 * (result.l2_hit_frac or 0):.1f} % | "
                  f"{(result.hbm_read_bytes or 0) / 1e9:.1f} GB | {result.time_ms:.2f} ms | "
                  f"{base / result.time_ms:.3f}x | {plan_ms:.2f} ms |")  # fmt: skip
    print()


def _source(path: str | None, grid: TokenGrid, heads: int, seed: int) -> tuple[QKSource, TokenGrid]:
    """Q and K of a file, cut to the frames of the grid, or synthetic ones."""
    if path is None:
        return synthetic_qk(grid, heads, 64, seed), grid
    with FileSource(path) as file:
        held = TokenGrid.parse(file.about["grid"])
        cut = dataclasses.replace(held, frames=min(held.frames, grid.frames))
        pairs = [file.read(h) for h in range(file.heads)]
        q, k = (torch.stack([p[i][: cut.tokens] for p in pairs]) for i in range(2))
        return TensorSource(q, k, Path(path).name), cut


def main() -> None:
    arguments = parser(__doc__, whole=True)
    arguments.add_argument("--qk", help="of a clip, for recall (safetensors)")
    arguments.add_argument("--heads", default="1,7,14,21", help="of --qk")
    arguments.add_argument("--frames", type=int, default=5, help="of --qk")
    arguments.add_argument("--large", help="of a clip, for locality (safetensors)")
    arguments.add_argument("--plot", help="write the recall as a picture")
    arguments.add_argument(
        "--parts", default="recall,cached,locality", help="which, comma-separated"
    )
    arguments.add_argument("--seed", type=int, default=0, help="of the noise")
    options = arguments.parse_args()
    parts = options.parts.split(",")
    with torch.inference_mode():
        source, grid = _source(options.qk, TokenGrid(options.frames, 30, 52), 4, options.seed)
        heads = [int(h) for h in options.heads.split(",")] if options.qk else range(4)
        run = Run(source, grid, heads, options.seed)
        name = source.describe()["qk"]
        print(f"{name}: {grid}, {grid.tokens:,} tokens, {len(run.places)} heads, blocks of "
              f"{BLOCK}x{BLOCK}, {STEPS} steps.\n", flush=True)  # fmt: skip
        if "recall" in parts:
            print("## Recall\n", flush=True)
            report_recall(run, options.plot)
        if "cached" in parts:
            print("## Scores by a cached log-sum-exp\n", flush=True)
            report_cached(run)
        if "locality" in parts:
            source, grid = _source(options.large, TokenGrid(33, 45, 80), 2, options.seed)
            name = source.describe()["qk"]
            print(f"## Locality (simulated)\n\n{name}: {grid}, {grid.tokens:,} tokens, "
                  f"{source.heads} heads, K and V of 128 elements, h200.\n")  # fmt: skip
            report_locality(source, grid, range(source.heads), options.seed)


if __name__ == "__main__":
    main()
