"""Block importance the slow and obvious way, and the cases that both kernels must get right.

Used by test_importance on the CPU (torch) and on a GPU, and by interpreted_importance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from wavealign.gpu.importance.attend import Importance, attend_with_importance
from wavealign.gpu.importance.call import Call
from wavealign.gpu.importance.launch import Search, Tiles
from wavealign.methods.select import top_p
from wavealign.planning import Planner

W_FRAC = 1e-3
OUT_FRAC = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 1e-5, torch.float64: 1e-6}


def reference_importance(
    q, k, v, block, candidates=None, reference_lse=None, positions=None
) -> Importance:
    """Float64, one block of one head at a time, every score in memory."""
    q, k, v = (t.detach().cpu().double() for t in (q, k, v))
    B, tokens_q, H, D = q.shape
    tokens_kv = k.shape[1]
    M, N = math.ceil(tokens_q / block[0]), math.ceil(tokens_kv / block[1])
    kept = torch.ones(1, H, M, N, dtype=torch.bool) if candidates is None else candidates.cpu()
    kept = kept.expand(B, H, M, N)
    zeros = {"dtype": torch.float64}
    out, lse = torch.zeros(B, tokens_q, H, D, **zeros), torch.zeros(B, H, tokens_q, **zeros)
    weights = torch.zeros(B, H, M, N, **zeros)
    entropy, distance = torch.zeros_like(lse), torch.zeros_like(lse)
    where = torch.arange(max(tokens_q, tokens_kv), **zeros)[:, None]
    if positions is not None:
        where = positions.cpu().double()
    for b in range(B):
        for h in range(H):
            keys, values = (t[b, :, h // (H // k.shape[2])] for t in (k, v))
            seen = kept[b, h].repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            for i in range(tokens_q):
                own = seen[i, :tokens_kv]
                scores = (keys @ q[b, i, h] / math.sqrt(D)).masked_fill(~own, -math.inf)
                lse[b, h, i] = scores.logsumexp(0) if own.any() else -math.inf
                if not own.any():
                    continue
                w = (scores - lse[b, h, i]).exp()
                out[b, i, h] = w @ values
                entropy[b, h, i] = lse[b, h, i] - w[own] @ scores[own]
                distance[b, h, i] = w @ (where[:tokens_kv] - where[i]).norm(dim=-1)
                norm = lse[b, h, i] if reference_lse is None else reference_lse[b, h, i].double()
                u = i // block[0]
                rows = min(block[0], tokens_q - u * block[0])
                for n in range(N):
                    part = scores[n * block[1] : (n + 1) * block[1]]
                    weights[b, h, u, n] += (part - norm.cpu()).exp().sum() / rows
    return Importance(out, lse, weights, entropy, distance)


def disagreement(found: Importance, wanted: Importance) -> str:
    """What is wrong with a result, in words; empty if nothing."""
    problems = []

    def compare(name: str, a: torch.Tensor, b: torch.Tensor, limit: float) -> None:
        a = a.detach().cpu().double()
        if not torch.equal(a.isnan(), b.isnan()):
            problems.append(f"{name}: NaN elsewhere")
        if not torch.equal(a.isinf(), b.isinf()):
            problems.append(f"{name}: inf elsewhere")
        error = (a - b).nan_to_num(0, 0, 0).abs().max()
        if error > limit:
            problems.append(f"{name}: off by {error:.2e}, more than {limit:.0e}")

    out, lse = found.out, found.lse
    scale = wanted.out.nan_to_num().abs().max().clamp_min(1e-6)
    compare("out", out.double() / scale.to(out.device), wanted.out / scale, OUT_FRAC[out.dtype])
    size = wanted.lse.abs().clamp(1.0).nan_to_num(posinf=1.0)
    compare("lse", lse.cpu() / size, wanted.lse / size, 1e-5)
    shares = wanted.weights.clamp_min(1e-30)
    compare("weights", found.weights.cpu() / shares, wanted.weights / shares, W_FRAC)
    if found.entropy is not None:
        compare("entropy", found.entropy, wanted.entropy, 1e-3)
        far = wanted.distance.nan_to_num().abs().max().clamp_min(1e-6)
        compare("distance", found.distance.cpu() / far, wanted.distance / far, 1e-3)
    return "; ".join(problems)


def differing_blocks(found: torch.Tensor, wanted: torch.Tensor, share: float) -> str:
    """Blocks that top-p selects by one and not by the other, but for ties within `W_FRAC`."""
    chosen, right = (top_p(weights, share, "inclusive") for weights in (found, wanted))
    return unexplained_blocks(chosen, right, wanted, share)


def unexplained_blocks(
    chosen: torch.Tensor, right: torch.Tensor, wanted: torch.Tensor, share: float
) -> str:
    """Blocks that are chosen wrongly by these weights, but for ties within `W_FRAC`."""
    differ = chosen != right
    # A block may differ where the row's sum before it is within the error of the share, or where
    # it ties with the last block that is kept.
    values, ranks = wanted.sort(dim=-1, descending=True, stable=True)
    before = torch.zeros_like(wanted).scatter(-1, ranks, values.cumsum(-1) - values)
    total = wanted.sum(-1, keepdim=True)
    close = (before - share * total).abs() <= 2 * W_FRAC * total
    last = torch.where(right, wanted, math.inf).amin(-1, keepdim=True)
    ties = (wanted - last).abs() <= 2 * W_FRAC * last
    unexplained = differ & ~close & ~ties
    return f"{int(unexplained.sum())} blocks of top-p {share}" if unexplained.any() else ""


@dataclass(frozen=True)
class Case:
    """Random inputs of some shape.

    Attributes:
        heads: query and K/V heads.
        density: of the candidates; None for all blocks.
        policy: plans the candidates' schedule; None for none.
        axes: of positions; 0 for none.
        reference: whether the importance is normalised by a drifted LSE.
        tiles: of phase 1; None for the default.
        scratch_bytes: little enough for several rounds of heads.
        sharp: factor of q: large for rows that look at one key.
        every: of the query blocks are diagnosed.
    """

    name: str
    tokens: tuple[int, int] = (150, 150)
    batch: int = 1
    heads: tuple[int, int] = (2, 2)
    head_dim: int = 64
    block: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    density: float | None = None
    policy: str | None = None
    axes: int = 0
    reference: bool = False
    tiles: dict[str, Any] | None = None
    scratch_bytes: int = 2**30
    sharp: float = 1.0
    diagnostics: bool = True
    every: int = 1
    nan: tuple[str, ...] = field(default=())

    def check(self, device: str, kernel: str) -> str:
        """What is wrong, in words."""
        generator = torch.Generator().manual_seed(len(self.name) + self.tokens[0])

        def draw(tokens: int, heads: int) -> torch.Tensor:
            return torch.randn(self.batch, tokens, heads, self.head_dim, generator=generator)

        q = draw(self.tokens[0], self.heads[0]) * self.sharp
        k, v = (draw(self.tokens[1], self.heads[1]) for _ in range(2))
        if "q" in self.nan:
            q[0, 70, 0] = math.nan
        if "k" in self.nan:
            k[0, 3, 1] = math.nan
        q, k, v = (t.to(self.dtype).to(device) for t in (q, k, v))
        M, N = (math.ceil(t / b) for t, b in zip(self.tokens, self.block, strict=True))
        candidates = positions = reference_lse = schedule = None
        if self.density is not None:
            shape = (self.batch, self.heads[0], M, N)
            candidates = torch.rand(shape, generator=generator) < self.density
            candidates[0, 0, 0] = False
            candidates[-1, -1, -1] = True
        if self.axes:
            positions = torch.randint(0, 20, (self.tokens[0], self.axes), generator=generator)
            positions = positions.float()
        options = {"candidates": candidates, "positions": positions}
        wanted = reference_importance(q, k, v, self.block, **options)
        if self.reference:
            reference_lse = wanted.lse + torch.randn(wanted.lse.shape, generator=generator)
            reference_lse = reference_lse.float()
            wanted = reference_importance(q, k, v, self.block, reference_lse=reference_lse,
                                          **options)  # fmt: skip
            reference_lse = reference_lse.to(device)
        options = {name: None if t is None else t.to(device) for name, t in options.items()}
        if self.policy is not None:
            folded = options.pop("candidates").flatten(0, 1)
            planner = Planner(tuple(folded.shape), device, wave=3)
            schedule = planner(folded, self.policy)
        options |= {"schedule": schedule, "reference_lse": reference_lse, "block": self.block}
        diagnosed = self.diagnostics and not (kernel == "hopper" and self.axes)
        options |= {"diagnostics": diagnosed, "diagnose_every": self.every if diagnosed else 1}
        found = self._attend(kernel, q, k, v, options)
        problems = []
        if diagnosed and self.every > 1:
            left_out = torch.arange(self.tokens[0]) // self.block[0] % self.every != 0
            whole = self._attend(kernel, q, k, v, options | {"diagnose_every": 1})
            for name in ("entropy", "distance"):
                part, full = (getattr(r, name)[..., ~left_out.to(device)] for r in (found, whole))
                if not torch.allclose(part, full, rtol=1e-6, atol=1e-6):
                    problems.append(f"{name} isn't that of the full run")
            wanted.entropy[..., left_out] = wanted.distance[..., left_out] = math.nan
        problems.append(disagreement(found, wanted))
        if not self.reference and not self.nan:
            sums = found.weights.double().sum(-1).cpu()
            any_key = wanted.weights.sum(-1) > 0.5
            if (sums - any_key.double()).abs().max() > 1e-3:
                problems.append("rows of W don't sum to 1")
            problems += [differing_blocks(found.weights.cpu().double(), wanted.weights, p)
                         for p in (0.5, 0.8, 0.95)]  # fmt: skip
        return "; ".join(filter(None, problems))

    def _attend(self, kernel: str, q, k, v, options: dict[str, Any]) -> Importance:
        if self.tiles is not None and kernel == "triton":
            call = Call(q, k, v, **options)
            return Search(call, self.scratch_bytes, tiles=Tiles(**self.tiles)).run()
        if kernel == "hopper" and not q.is_cuda:
            call = Call(q, k, v, **options)
            return Search(call, self.scratch_bytes, hopper=True).run()
        return attend_with_importance(
            q, k, v, kernel=kernel, scratch_bytes=self.scratch_bytes, **options
        )


NO_TMA = {"tile": 32, "stages": 2, "warps": 8, "tma": False}
TMA = {"tile": 64, "stages": 2, "warps": 4, "tma": True}
CASES = (
    Case("all blocks, ragged"),
    Case("fp16, queries and keys differ in number", tokens=(70, 200), dtype=torch.float16),
    Case("head_dim 128, blocks of 128", (130, 259), head_dim=128, block=(128, 128), heads=(1, 1)),
    Case("one block of few tokens", (5, 3), heads=(1, 1)),
    Case("candidates, GQA, two sequences", (129, 129), 2, (2, 1), density=0.6),
    Case("64 queries by 128 keys", (130, 300), heads=(2, 2), block=(64, 128), density=0.6),
    Case("128 queries by 64 keys", (200, 200), block=(128, 64), density=0.7),
    Case("tiles smaller than a block", (200, 200), block=(128, 64), density=0.7, tiles=NO_TMA),
    Case("descriptors", (150, 150), density=0.7, tiles=TMA),
    Case("a schedule", (260, 320), heads=(2, 1), density=0.6, policy="lockstep"),
    Case("a schedule a sequence, in rounds", (129, 140), 2, density=0.6, policy="resync",
         scratch_bytes=1),
    Case("candidates in rounds of three heads", (66, 66), heads=(7, 7), density=0.7,
         scratch_bytes=3 * 4 * 64 * 2 * 2, diagnostics=False),
    Case("every third block diagnosed", (300, 200), heads=(2, 1), every=3),
    Case("every second block of a schedule diagnosed, in rounds", (260, 200), 2, every=2,
         density=0.6, policy="resync", scratch_bytes=1),
    Case("fewer blocks than one in eight, in positions", density=0.7, axes=2, every=8),
    Case("drifted LSE", density=0.7, reference=True),
    Case("positions", axes=3),
    Case("one axis", (150, 150), density=0.7, axes=1),
    Case("sharp rows", sharp=20.0),
    Case("very sharp rows", (129, 129), sharp=300.0, dtype=torch.float16),
    Case("NaN in q", (129, 129), nan=("q",)),
    Case("NaN in k", (129, 129), nan=("k",), density=0.6),
)  # fmt: skip
