"""What GSRS's searches cost on a GPU, with and without WaveAlign's schedule.

    python benchmarks/gsrs.py OUT.jsonl [--only check search ...] [--seconds 140] [--small]

118,800 tokens (HunyuanVideo at 720p: a grid of 33x45x80, generalized Hilbert order), 24 heads of
128, bf16. Q and K are synthetic: random Fourier features of the tokens' places, so that attention
falls off with distance in the video, at a width drawn per head, plus noise; each head's temperature
is set so that top-p .95 keeps a share of its blocks drawn from 3 to 70 %, some 30 % in all. The
candidates are what the full search selects.

- check: one head against the torch path, before anything is timed.
- search: the full search and the one among the candidates, phase by phase, under each policy.
- plain: block-sparse attention of the candidates without a search: the same kernel, and
  FlashAttention-4 where it is installed.
- steps: the masks of p = .9, .85, .8, selected with and without reduced search, and their time.
- diagnostics: entropy and distance, over the same kernel without them, for every query block and
  for every 4th, 8th and 16th.
- tiles: other tile shapes of phase 1.

Each by the Triton kernel, and on Hopper by the Gluon kernel, which without a search is the backend
`triton`. Times are medians of single launches, each with a cold L2, candidates in turn
(time_single). How overhead is defined stands beside each factor. `--seconds`: sections that would
begin later are left out. `--small` runs the same code on a few blocks on the CPU, Triton
interpreted, without meaning.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import Notes, interpret_triton, markdown, paired_ms, parser

if "--small" in sys.argv:
    interpret_triton()

import torch

from wavealign.gpu.importance.attend import SCRATCH_BYTES, attend_with_importance
from wavealign.gpu.importance.call import Call
from wavealign.gpu.importance.launch import Search, Tiles
from wavealign.methods.select import top_p
from wavealign.planning import Planner
from wavealign.qk.grid import TokenGrid
from wavealign.qk.orders import token_order

POLICIES = ("original", "lockstep", "resync")
TARGETS = (
    .03, .05, .07, .1, .12, .14, .17, .2, .22, .24, .26, .28,
    .3, .32, .34, .36, .38, .4, .43, .46, .5, .55, .62, .7,
)  # fmt: skip
STEPS = (0.9, 0.85, 0.8)
SAMPLED_BLOCKS = 8
DIAGNOSE_EVERY = (4, 8, 16)
PAPER_FACTOR = 13.75


@dataclass(frozen=True)
class Setting:
    """Sizes, and where it runs."""

    grid: TokenGrid
    heads: int
    head_dim: int
    block: int
    device: str
    repeats: int

    @property
    def blocks(self) -> int:
        """Query blocks, and K/V blocks."""
        return math.ceil(self.grid.tokens / self.block)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Of `attend_with_importance`, that run here."""
        hopper = self.device == "cuda" and torch.cuda.get_device_capability()[0] == 9
        return ("triton", "hopper") if hopper else ("triton",)

    @property
    def wave(self) -> int:
        """Rows in flight."""
        if self.device == "cpu":
            return 4
        return torch.cuda.get_device_properties().multi_processor_count

    def ms(self, launches: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Median of each, in turn."""
        return paired_ms(launches, self.repeats, self.device == "cuda")


class Bench:
    """Inputs, the candidates, and what was measured so far."""

    def __init__(self, setting: Setting, notes: Notes) -> None:
        self.setting, self.note = setting, notes.note
        self.ms: dict[str, float] = {}
        self.q, self.k, self.v, self.places = self._inputs()
        self._candidates: torch.Tensor | None = None
        self.full_weights: torch.Tensor | None = None

    def time(self, section: str, launches: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Time, note, and remember."""
        found = self.setting.ms(launches)
        self.ms |= found
        self.note(section, ms=found)
        return found

    def call(self, **options: Any) -> Any:
        """A checked call over all heads."""
        block = (self.setting.block, self.setting.block)
        return Call(self.q, self.k, self.v, block=block, **options)

    def search(self, kernel: str, lists: dict[str, Any], **options: Any) -> Search:
        """Both phases over lists (``{}`` for all blocks)."""
        return Search(self.call(**lists), hopper=kernel == "hopper", **options)

    def schedule(self, mask: torch.Tensor, policy: str) -> Any:
        """A schedule in buffers of its own."""
        planner = Planner(tuple(mask.shape), mask.device, wave=self.setting.wave)
        return planner(mask, policy)

    @property
    def candidates(self) -> torch.Tensor:
        """Bool ``[H, M, N]``: top-p .95 of the full search."""
        if self._candidates is None:
            found = Search(self.call()).run()
            self.full_weights = found.weights[0]
            self._candidates = top_p(found.weights[0], 0.95, "inclusive")
            counts = self._candidates.sum(-1).double()
            self.note(
                "candidates",
                density=float(self._candidates.double().mean()),
                head_densities=self._candidates.double().mean((1, 2)).tolist(),
                nnz_spread=float((counts.std(-1) / counts.mean(-1)).mean()),
                row_sum_error=float((found.weights.double().sum(-1) - 1).abs().max()),
            )
        return self._candidates

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        s = self.setting
        generator = torch.Generator(s.device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=s.device)

        order = torch.from_numpy(token_order("hilbert", s.grid)).to(s.device)
        _, height, width = s.grid.shape
        places = torch.stack(
            [order // (height * width), order // width % height, order % width], -1
        ).float()
        tokens, D = s.grid.tokens, s.head_dim
        q, k = torch.empty(2, 1, tokens, s.heads, D, device=s.device, dtype=torch.bfloat16)
        targets = torch.tensor(TARGETS)[torch.arange(s.heads) * len(TARGETS) // s.heads].tolist()
        for h in range(s.heads):
            reach = 3.0 + 12.0 * h / s.heads  # tokens
            phases = places @ (normal(3, D // 2) / reach)
            features = torch.cat([phases.cos(), phases.sin()], -1)
            # Some places look more sharply than others, so rows differ in length.
            sharpness = (0.4 * (places @ (normal(3) / 9.0)).sin()).exp()[:, None]
            queries = (features + 0.3 * normal(tokens, D)) * sharpness
            keys = features + 0.3 * normal(tokens, D)
            q[0, :, h] = queries * self._temperature(queries, keys, targets[h])
            k[0, :, h] = keys
        return q, k, normal(1, tokens, s.heads, D).to(q.dtype), places

    def _temperature(self, queries: torch.Tensor, keys: torch.Tensor, target: float) -> float:
        """The factor at which top-p .95 keeps a share of the blocks, on sampled query blocks."""
        s = self.setting
        picked = torch.linspace(0, s.blocks - 2, SAMPLED_BLOCKS, device=queries.device).long()
        rows = (picked[:, None] * s.block + torch.arange(s.block, device=queries.device)).flatten()
        whole = s.grid.tokens // s.block
        scores = queries[rows] @ keys[: whole * s.block].T / math.sqrt(s.head_dim)
        low, high = 0.0, 64.0
        for _ in range(10):
            middle = (low + high) / 2
            mass = (scores * middle).softmax(-1).view(SAMPLED_BLOCKS, s.block, whole, s.block)
            kept = top_p(mass.sum(-1).mean(1), 0.95, "inclusive").double().mean()
            low, high = (middle, high) if kept > target else (low, middle)
        return middle


def check(bench: Bench) -> None:
    """One head against the torch path, all blocks and candidates in a planned order."""
    s = bench.setting
    middle = slice(s.heads // 2, s.heads // 2 + 1)
    one = [t[:, :, middle].contiguous() for t in (bench.q, bench.k, bench.v)]
    kept = torch.rand(1, s.blocks, s.blocks, device=s.device) < 0.3
    inputs = {
        "all": ({}, {}),
        "candidates": ({"schedule": bench.schedule(kept, "lockstep")}, {"candidates": kept}),
    }
    options = {"block": (s.block, s.block), "diagnostics": True}
    for name, (lists, mask) in inputs.items():
        slow = attend_with_importance(*one, kernel="torch", **options, **mask)
        for kernel in s.kernels:
            fast = attend_with_importance(*one, kernel=kernel, **options, **lists)
            error = (fast.weights - slow.weights) / slow.weights
            chosen, right = (top_p(r.weights, 0.9, "inclusive") for r in (fast, slow))
            sums = fast.weights.double().sum(-1)
            out, wanted = fast.out.float(), slow.out.float()
            far = s.grid.tokens
            bench.note(
                "check", kernel=kernel, blocks=name,
                weights_frac=float(error[slow.weights > 1e-30].abs().max()),
                row_sum=float((sums - (slow.weights.sum(-1) > 0).double()).abs().max()),
                out_frac=float((out - wanted).norm() / wanted.norm()),
                lse=float((fast.lse - slow.lse).nan_to_num().abs().max()),
                entropy=float((fast.entropy - slow.entropy).abs().max()),
                distance_frac=float(((fast.distance - slow.distance) / far).abs().max()),
                top_p_differs=int((chosen != right).sum()), top_p_keeps=int(right.sum()),
            )  # fmt: skip


def phases(search: Search, name: str) -> dict[str, Callable[[], object]]:
    """Both phases, and the second one alone (over what the last round left)."""
    return {
        name: search.run,
        f"{name}: phase 1": lambda: [search.attend(*r) for r in search.rounds],
        f"{name}: phase 2": lambda: [search.weigh(*r) for r in search.rounds],
    }


def search(bench: Bench) -> None:
    """Full and reduced search."""
    mask = bench.candidates
    planner = Planner(tuple(mask.shape), mask.device, wave=bench.setting.wave)
    launches: dict[str, Callable[[], object]] = {
        "top-p .95 of all blocks": lambda: top_p(bench.full_weights, 0.95, "inclusive")
    }
    launches |= {f"plan {p}": (lambda p=p: planner(mask, p)) for p in POLICIES}
    bench.time("search", launches)
    for kernel in bench.setting.kernels:
        full = bench.search(kernel, {})
        bench.note("search", kernel=kernel, rounds=full.rounds, scratch_bytes=SCRATCH_BYTES)
        launches = phases(full, f"{kernel}: full search")
        del full
        for policy in POLICIES:
            bound = bench.search(kernel, {"schedule": bench.schedule(mask, policy)})
            launches |= phases(bound, f"{kernel}: reduced search, {policy}")
        bench.time("search", launches)
        launches.clear()


def plain(bench: Bench) -> None:
    """Without a search."""
    mask = bench.candidates
    launches: dict[str, Callable[[], object]] = {}
    for kernel in bench.setting.kernels:
        launches[f"{kernel}: plain, dense"] = bench.search(kernel, {}, sums=False).run
        for policy in POLICIES:
            lists = {"schedule": bench.schedule(mask, policy)}
            launches[f"{kernel}: plain, {policy}"] = bench.search(kernel, lists, sums=False).run
    bench.time("plain", launches)
    bench.time("plain", fa4_launches(bench, mask))


def fa4_launches(bench: Bench, mask: torch.Tensor) -> dict[str, Callable[[], object]]:
    """FlashAttention-4's kernel alone, its rows gathered beforehand."""
    from wavealign.attention.backends import choose_backend
    from wavealign.attention.inputs import mask_sizes
    from wavealign.gpu.execution import Execution
    from wavealign.gpu.inputs import Inputs

    s = bench.setting
    sizes = mask_sizes(mask.shape, 1, (s.block, s.block), (s.grid.tokens, s.grid.tokens))
    sizes = replace(sizes, head_dim=s.head_dim)
    kernel = choose_backend("fa4", sizes, s.device)
    inputs = Inputs(bench.q, bench.k, bench.v)
    dense = kernel.bind_dense(sizes, inputs)
    launches: dict[str, Callable[[], object]] = {"fa4: plain, dense": dense.launch}
    for policy in POLICIES:
        layout = kernel.capabilities.layout_for(sizes)
        planner = Planner(tuple(mask.shape), mask.device, wave=s.wave, layout=layout)
        launches[f"fa4: plain, {policy}"] = Execution(
            kernel, sizes, planner(mask, policy), inputs
        ).run
    return launches


def steps(bench: Bench) -> None:
    """The masks of the later searches: selected among the candidates, and among all blocks."""
    mask = bench.candidates
    lists = {"schedule": bench.schedule(mask, "lockstep")}
    within = bench.search("triton", lists).run().weights[0].clone()
    launches: dict[str, Callable[[], object]] = {
        "top-p .9 of the candidates": lambda: top_p(within, 0.9, "inclusive")
    }
    for p, (name, weights) in itertools.product(
        STEPS, (("reduced", within), ("full", bench.full_weights))
    ):
        kept = top_p(weights, p, "inclusive")
        if name == "reduced":
            kept &= mask
        bench.note("steps", p=p, search=name, density=float(kept.double().mean()))
        for policy in ("original", "lockstep"):
            lists = {"schedule": bench.schedule(kept, policy)}
            for kernel in bench.setting.kernels:
                bound = bench.search(kernel, lists, sums=False)
                launches[f"{kernel}: plain, p={p}, {name}, {policy}"] = bound.run
    bench.time("steps", launches)


def diagnostics(bench: Bench) -> None:
    """The same kernel with none, each and both of the accumulators."""
    kinds = {
        "none": {}, "entropy": {"entropy": True}, "distance": {"distance": True},
        "both": {"entropy": True, "distance": True},
    }  # fmt: skip
    reduced = {"schedule": bench.schedule(bench.candidates, "lockstep")}
    for kernel, (name, lists) in itertools.product(
        bench.setting.kernels, (("full", {}), ("reduced", reduced))
    ):
        label = f"{kernel}: {name} search, diagnostics: "
        launches = {
            label + kind: bench.search(kernel, lists, **wanted).run
            for kind, wanted in kinds.items()
        }
        for every in DIAGNOSE_EVERY:
            call = bench.call(**lists, diagnostics=True, diagnose_every=every)
            sampled = Search(call, hopper=kernel == "hopper")
            launches[f"{label}both, every {every}th query block"] = sampled.run
        if (kernel, name) == ("triton", "reduced"):
            call = bench.call(**lists, positions=bench.places, diagnostics=True)
            launches[label + "both, in 3 axes"] = Search(call).run
        found = bench.time("diagnostics", launches)
        base = found[label + "none"]
        bench.note("diagnostics", extra_frac={what: ms / base - 1 for what, ms in found.items()})


def tiles(bench: Bench) -> None:
    """Phase 1 of four heads over all blocks in other shapes."""
    s = bench.setting
    heads = min(4, s.heads)
    few = [t[:, :, :heads].contiguous() for t in (bench.q, bench.k, bench.v)]
    call = Call(*few, block=(s.block, s.block))
    warps = 8 if s.block == 128 else 4
    launches = {}
    for tile, stages, tma in ((128, 2, True), (128, 2, False), (64, 3, True), (64, 4, True)):
        shape = Tiles(min(tile, s.block), stages, warps, tma)
        try:
            bound = Search(call, tiles=shape)
            bound.run()
            launches[f"tiles {tile}, {stages} stages, {'TMA' if tma else 'pointers'}"] = bound.run
        except Exception as problem:
            bench.note("tiles", shape=str(shape), failed=f"{type(problem).__name__}: {problem}")
    bench.time("tiles", launches)


SECTIONS = {f.__name__: f for f in (check, search, plain, steps, diagnostics, tiles)}


def factors(ms: dict[str, float]) -> list[tuple[str, str]]:
    """Lines of (definition, value) of what the times can say."""
    lines = []

    def overhead(label: str, full: float, reduced: float, base: float) -> None:
        if reduced > base:
            factor = f"{(full - base) / (reduced - base):.2f}x"
        else:
            factor = "no overhead left to divide by"
        lines.append((label, f"{full - base:.1f} ms / {reduced - base:.1f} ms = {factor}"))

    kernels = dict.fromkeys(name.partition(":")[0] for name in ms if ": full search" in name)
    for kernel, policy in itertools.product(kernels, POLICIES):
        names = [f"{kernel}: {n}" for n in ("full search", f"reduced search, {policy}",
                                            f"plain, {policy}")]  # fmt: skip
        if all(name in ms for name in names):
            full, reduced, base = (ms[name] for name in names)
            overhead(
                f"{kernel}: one search step: time beyond plain attention of the candidates by the "
                f"same kernel, {policy}; full / reduced", full, reduced, base,
            )  # fmt: skip
    for kernel in kernels:
        plains = {n: [f"{kernel}: plain, p={p}, {n}, lockstep" for p in STEPS]
                  for n in ("full", "reduced")}  # fmt: skip
        searches = {"full": f"{kernel}: full search",
                    "reduced": f"{kernel}: reduced search, lockstep"}  # fmt: skip
        if not all(name in ms for name in itertools.chain(searches.values(), *plains.values())):
            continue
        # A run of 50 steps: searches at 20, 30 and 40, each mask used for nine steps more. Its
        # attention proper is that of the reduced masks at all thirty.
        run = {
            n: sum(ms[searches[n]] + 9 * ms[name] for name in names) for n, names in plains.items()
        }
        overhead(
            f"{kernel}: searches 2 to 4 of a run as in the paper: search + extra attention beyond "
            f"the reduced masks' own attention, lockstep; full / reduced (the paper: "
            f"{PAPER_FACTOR}x)",
            run["full"], run["reduced"], sum(10 * ms[name] for name in plains["reduced"]),
        )  # fmt: skip
    return lines


def table(bench: Bench) -> str:
    """Markdown."""
    times = [[name, f"{ms:.2f}"] for name, ms in bench.ms.items()]
    meant = ["overhead, and what is meant by it", ""]
    return f"{markdown(['what', 'ms'], times)}\n\n{markdown(meant, factors(bench.ms))}"


def compile_ahead(setting: Setting) -> None:
    """Compile every kernel in processes of their own, at once, by small launches."""
    flags = list(itertools.product((False, True), repeat=2))
    variants = [
        (kernel, dense, {"sums": True, "entropy": e, "distance": d})
        for kernel in setting.kernels for dense in (True, False) for e, d in flags
        if kernel == "triton" or dense
    ]  # fmt: skip
    if "hopper" in setting.kernels:
        variants.append(("hopper", True, {"sampled": True}))
    variants += [(kernel, dense, {"sums": False}) for kernel in setting.kernels
                 for dense in (True, False)]  # fmt: skip
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(8, mp_context=context) as pool:
        for done in [pool.submit(_compile, setting, *variant) for variant in variants]:
            done.result()


def _compile(setting: Setting, kernel: str, dense: bool, options: dict[str, bool]) -> None:
    tokens = 2 * setting.block + setting.grid.tokens % setting.block
    x = torch.zeros(1, tokens, 1, setting.head_dim, device="cuda", dtype=torch.bfloat16)
    kept = None if dense else torch.ones(1, 1, 3, 3, device="cuda", dtype=torch.bool)
    every = {"diagnostics": True, "diagnose_every": 2} if options.pop("sampled", False) else {}
    call = Call(x, x, x, block=(setting.block, setting.block), candidates=kept, **every)
    Search(call, hopper=kernel == "hopper", **options).run()
    torch.cuda.synchronize()


def device_note(device: str) -> dict[str, Any]:
    """What this runs on."""
    import triton

    note: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    if device == "cuda":
        from wavealign.gpu.telemetry import Telemetry

        try:
            with Telemetry() as telemetry:
                note |= vars(telemetry.read())
        except Exception as problem:
            note["telemetry"] = str(problem)
        note["sms"] = torch.cuda.get_device_properties().multi_processor_count
    return note


def main() -> None:
    options = parser(__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options.add_argument("--seconds", type=float, default=140.0)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--small", action="store_true")
    arguments = options.parse_args()
    notes = Notes(arguments.out, echo=True)
    if arguments.small:
        setting = Setting(TokenGrid(2, 10, 16), 2, 64, 64, "cpu", 1)
    elif torch.cuda.is_available():
        setting = Setting(TokenGrid(33, 45, 80), 24, 128, 128, "cuda", arguments.repeats)
    else:
        options.error("no CUDA device; --small runs the script on the CPU.")
    arguments.out.write_text("", encoding="utf-8")
    if setting.device == "cuda":
        try:
            compile_ahead(setting)
        except Exception:  # then they are compiled one by one
            traceback.print_exc()
    bench = Bench(setting, notes)
    bench.note("device", **device_note(setting.device))
    bench.note("setting", grid=str(setting.grid), heads=setting.heads, head_dim=setting.head_dim,
               blocks=setting.blocks, wave=setting.wave,
               seconds=notes.seconds)  # fmt: skip
    sections = {name: functools.partial(run, bench) for name, run in SECTIONS.items()}
    notes.run(sections, arguments.only, arguments.seconds)
    if setting.device == "cuda":
        bench.note("device", **device_note(setting.device))
    for label, value in factors(bench.ms):
        bench.note("factor", what=label, value=value)
    print(table(bench))


if __name__ == "__main__":
    main()
