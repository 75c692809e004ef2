"""What planning, the guard and `attend` cost and win on a GPU, one JSON file a section.

    python benchmarks/production.py OUT [--only planning guard attend calls ...] [--small]

- planning: 40 heads of 2841x2841 (those of xattention_363600, rolled): time of each policy's plan,
  eager and as a CUDA graph, of the guard's statistics, of gather and scatter, and of the kernel;
  and the constants of a guard profile that these times give.
- guard: every mask of benchmarks/guard_offline.py: kernel time of each policy, what the guard
  chose, with its planning time.
- attend: the host's time in a call, and the device's beyond the kernel's.
- calls: an `Attention` and the same plan made beforehand, in turns: what following a mask costs.
- memory: 1,000 calls of one `Attention` under masks that change.
- wan: layers of Wan2.1-14B's widths with random weights, 75,600 and 363,600 tokens: steps, dense
  and sparse, and what of them is attention, planning and finding masks.

--small runs the same code on small masks anywhere, without meaning.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import DATA, gpu_name, paired_ms, parser
from guard_offline import masks as offline_masks
from production_bench import Bench
from production_wan import wan

import wavealign
from wavealign.attention.inputs import mask_sizes
from wavealign.attention.plans import prepare
from wavealign.attention.terms import Terms
from wavealign.guard.model import RESYNC, SAWTOOTH
from wavealign.guard.on_device import device_lengths
from wavealign.masks import BlockMask, load_mask
from wavealign.planning import Planner
from wavealign.structures import json_text

POLICIES = ("original", "nnz", SAWTOOTH, "lockstep", RESYNC, "svd+nnz")


def planning(bench: Bench) -> dict[str, Any]:
    source = bench.cut(load_mask(DATA / "xattention_363600.npz").mask)
    heads = bench.dense(source)
    count = 4 if bench.small else 40
    rolled = [heads.roll(97 * i, 1) for i in range(-(-count // len(heads)))]
    heads = torch.cat(rolled)[:count].contiguous()
    mask = BlockMask.from_csr([0] * (count * source.M + 1), [], (count, source.M, source.N),
                              (128, 128), (source.tokens_q, source.tokens_kv))  # fmt: skip
    qkv = bench.sequences(mask)
    rows: dict[str, Any] = {}
    for policy in POLICIES:
        plan = bench.plan(heads, mask, policy)
        rows[policy] = {"kernel_ms": bench.ms(lambda p=plan: bench.attend(qkv, p), 3)}
        del plan
    sizes = [(count, source.M), (1, source.M), (8, min(591, source.M)), (count, source.M // 2)]
    fitted = [times_of_planning(bench, heads[:h, :m, :m].contiguous()) for h, m in sizes]
    for policy in POLICIES:
        rows[policy] |= fitted[0][policy]
        for form in ("plan_ms", "graph_ms"):
            if rows[policy].get(form):
                rows[policy][form.replace("ms", "frac")] = (
                    rows[policy][form] / rows[policy]["kernel_ms"]
                )
    result = {"heads": count, "rows": source.M, "columns": source.N, "policies": rows}
    result["guard_statistics_ms"] = fitted[0]["statistics_ms"]
    result["apply"] = apply_times(bench, heads, mask, qkv)
    result["sizes"] = [
        {"heads": h, "rows": m, **f} for (h, m), f in zip(sizes, fitted, strict=True)
    ]
    result["constants"] = constants(sizes, fitted)
    return result


def times_of_planning(bench: Bench, heads: torch.Tensor) -> dict[str, Any]:
    sizes = mask_sizes(heads.shape, 1, (128, 128), None)
    prepared = prepare(Terms("auto", bench.profile, bench.backend), sizes, heads.device)
    planner = prepared.planner()
    found: dict[str, Any] = {}
    for policy in POLICIES:
        found[policy] = {"plan_ms": bench.ms(lambda p=policy: planner(heads, p))}
        found[policy]["graph_ms"] = graph_ms(bench, planner, heads, policy) if bench.cuda else None
    found["statistics_ms"] = bench.ms(lambda: prepared.decide(heads, planner))
    lengths = bench.ms(lambda: device_lengths(heads, planner.wave))
    found["lengths_ms"] = lengths
    return found


def graph_ms(
    bench: Bench, plan: Callable[[torch.Tensor, Any], object], heads: torch.Tensor, policy: Any,
    count: int = 1,
) -> float:  # fmt: skip
    """Time on the device alone of one of `count` plans in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan(heads, policy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            plan(heads, policy)
    return bench.ms(graph.replay) / count


def apply_times(
    bench: Bench, heads: torch.Tensor, mask: BlockMask, qkv: tuple[torch.Tensor, ...]
) -> dict[str, float]:
    """Gather and scatter, for a kernel without a row table."""
    from wavealign.gpu.move import gather_blocks, scatter_blocks

    table = Planner(tuple(heads.shape), heads.device, wave=132)(heads, "nnz").table
    q = qkv[0]
    B, _, H, D = q.shape
    moved = torch.zeros(B, mask.M * mask.block_q, H, D, dtype=q.dtype, device=q.device)
    out = torch.empty_like(q)
    return {
        "gather_ms": bench.ms(lambda: gather_blocks(q, table, mask.block_q, moved)),
        "scatter_ms": bench.ms(lambda: scatter_blocks(moved, table, mask.block_q, out)),
    }


def constants(
    sizes: list[tuple[int, int]], times: list[dict[str, Any]], form: str = "plan_ms"
) -> dict[str, float]:
    """The planning constants of a guard profile, by least squares over the sizes."""
    extra = {
        policy: np.array([t[policy][form] - t["original"][form] for t in times])
        for policy in (SAWTOOTH, RESYNC)
    }
    cells = np.array([h * m * m * 1e-6 for h, m in sizes])
    once, *_ = np.linalg.lstsq(np.stack([np.ones(len(sizes)), cells], 1), extra[SAWTOOTH])
    launch, cell = np.maximum(once, 0.0)
    rest = extra[RESYNC] - 2 * (launch + cell * cells)
    per_row = np.array([[h * m * 1e-6, m * 1e-6] for h, m in sizes])
    phases, *_ = np.linalg.lstsq(per_row, rest)
    row, slot = np.maximum(phases, 0.0)
    names = ("plan_launch_ms", "plan_cell_ns", "phase_row_ns", "phase_slot_ns")
    return dict(zip(names, map(float, (launch, cell, row, slot)), strict=True))


def guard(bench: Bench) -> dict[str, Any]:
    rows = []
    for name, mask in offline_masks():
        rows.append(guard_row(bench, name, bench.cut(mask)))
        print(json_text({k: rows[-1][k] for k in ("mask", "slower_frac", "best", "caught")}))
    won = sum(r["total_ms"]["original"] - r["total_ms"]["guard"] for r in rows)
    possible = sum(r["total_ms"]["original"] - r["total_ms"][r["best"]] for r in rows)
    return {
        "masks": rows,
        "slower_worst_frac": max(r["slower_frac"] for r in rows),
        "slower_deciding_worst_frac": max(r["slower_deciding_frac"] for r in rows),
        "caught_frac": won / possible if possible > 0 else None,
    }


def guard_row(bench: Bench, name: str, mask: BlockMask) -> dict[str, Any]:
    heads, qkv = bench.dense(mask), bench.sequences(mask)
    names = list(POLICIES)
    plans = {policy: bench.plan(heads, mask, policy) for policy in names}
    terms = Terms("auto", bench.profile, bench.backend)
    prepared = prepare(terms, plans["original"].sizes, heads.device)
    planner = prepared.planner()
    # As `Attention` asks it.
    calls = wavealign.Reuse().calls
    decision = prepared.decide(heads, planner, calls=calls)
    served = max(calls, decision.least_calls)
    chosen = plans["guard"] = prepared.decided(heads, planner, decision)
    launches = {p: (lambda p=p: bench.attend(qkv, plans[p])) for p in plans}
    kernels = paired_ms(launches, bench.repeats, bench.cuda)
    decide_ms = bench.ms(lambda: prepared.decide(heads, planner, calls=calls))
    planner = prepared.planner()
    plan_ms = {p: bench.ms(lambda p=p: planner(heads, p)) for p in names}
    plan_ms["guard"] = bench.ms(lambda: planner(heads, chosen.policies))
    # Lists in natural order have to be made whatever happens.
    total = {p: kernels[p] + plan_ms[p] - plan_ms["original"] for p in kernels}
    best = min(names, key=total.__getitem__)
    possible = total["original"] - total[best]
    return {
        "mask": name,
        "heads": mask.H,
        "kernel_ms": kernels,
        "plan_ms": plan_ms,
        "decide_ms": decide_ms,
        "total_ms": total,
        "policies": list(chosen.policies),
        "explain": chosen.explain(),
        "slower_frac": total["guard"] / total["original"] - 1,
        # With the guard's look at the mask too, shared by as many calls as `Attention` shares it.
        "slower_deciding_frac": (total["guard"] + decide_ms / served) / total["original"] - 1,
        "best": best,
        "caught": (total["original"] - total["guard"]) / possible if possible > 0 else None,
        "backend": chosen.backend.name,
    }


def attend(bench: Bench) -> dict[str, Any]:
    mask = bench.cut(load_mask(DATA / "xattention_75600.npz").mask)
    heads, qkv = bench.dense(mask), bench.sequences(mask)
    plan = bench.plan(heads, mask, SAWTOOTH)
    options = {"backend": bench.backend, "layout": "bshd"}
    site = wavealign.Attention(bench.profile, **options)
    fixed = wavealign.Attention(bench.profile, policy=SAWTOOTH, **options)
    calls: dict[str, Callable[[], object]] = {
        "kernel with a plan": lambda: bench.attend(qkv, plan),
        "attend, planning by name": lambda: wavealign.attend(
            *qkv, heads, policy=SAWTOOTH, device_profile=bench.profile, **options
        ),
        "attend, asking the guard": lambda: wavealign.attend(
            *qkv, heads, device_profile=bench.profile, **options
        ),
        "Attention, the same mask": lambda: site(*qkv, heads, same_mask=True),
        "Attention, a new mask": lambda: site(*qkv, heads.clone()),
        "Attention, a new mask, no guard": lambda: fixed(*qkv, heads.clone()),
    }
    found = {}
    for name, call in calls.items():
        device_ms = bench.ms(call)
        if bench.cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        found[name] = {"device_ms": device_ms, "host_ms": 1e3 * (time.perf_counter() - started)}
    return {"calls": found, "policies": list(plan.policies)}


def calls(bench: Bench) -> dict[str, Any]:
    found = {}
    for name, count in (("xattention_75600", 8), ("xattention_363600", 4)):
        source = bench.cut(load_mask(DATA / f"{name}.npz").mask)
        heads = bench.dense(source)[:count]
        heads = heads.repeat(-(-8 // len(heads)), 1, 1)[:8].contiguous()
        rows = np.ones((8, source.M), dtype=np.int64)
        mask = BlockMask.from_csr(np.r_[0, rows.cumsum()], np.zeros(rows.size, np.int32),
                                  (8, source.M, source.N), (source.block_q, source.block_kv),
                                  (source.tokens_q, source.tokens_kv))  # fmt: skip
        qkv = bench.sequences(mask)
        other = heads.clone()
        other[:, ::7, ::5].logical_not_()
        for policy in (RESYNC, "svd+nnz", "auto"):
            options = {"policy": policy, "backend": bench.backend, "layout": "bshd"}
            same, said, changing = (wavealign.Attention(bench.profile, **options) for _ in range(3))
            plan = bench.plan(heads, mask, policy)
            turn = iter(range(1 << 30))
            modes: dict[str, Callable[[], object]] = {
                "a plan made beforehand": lambda qkv=qkv, p=plan: bench.attend(qkv, p),
                "the same content": lambda qkv=qkv, m=heads, s=same: s(*qkv, m),
                "same_mask=True": lambda qkv=qkv, m=heads, s=said: s(*qkv, m, same_mask=True),
                "another content": lambda qkv=qkv, m=(heads, other), s=changing, t=turn: s(
                    *qkv, m[next(t) % 2]
                ),
            }
            planner, policies = Planner(heads.shape, heads.device, wave=264), plan.policies
            found[f"{source.tokens_q} {policy}"] = {
                "calls_ms": in_turns(bench, modes, 4 if source.tokens_q < 100_000 else 1),
                "following_ms": graph_ms(bench, planner.follow, heads, policies, 20)
                if bench.cuda
                else None,
                "policies": list(policies),
            }
    return {"heads": 8, "calls": found}


def in_turns(bench: Bench, modes: dict[str, Callable[[], object]], row: int) -> dict[str, float]:
    """Median time of a call of each, `row` calls at once: the host runs ahead, as in a model."""
    for call in modes.values():
        for _ in range(3):
            call()
    rows: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(bench.repeats):
        for name, call in modes.items():
            rows[name].append(bench.ms(lambda c=call: [c() for _ in range(row)], 1) / row)
    return {name: float(np.median(times)) for name, times in rows.items()}


def memory(bench: Bench) -> dict[str, Any]:
    mask = bench.cut(load_mask(DATA / "xattention_75600.npz").mask)
    heads, qkv = bench.dense(mask), bench.sequences(mask)
    site = wavealign.Attention(bench.profile, backend=bench.backend, layout="bshd")
    turns = 20 if bench.small else 1000
    marks = []
    before = torch.cuda.memory_allocated() if bench.cuda else 0
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    for turn in range(turns):
        site(*qkv, heads.roll(turn % 50, 1))
        if turn in (9, turns // 2, turns - 1) and bench.cuda:
            torch.cuda.synchronize()
            marks.append((turn + 1, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    H, M, N = heads.shape
    out_bytes = qkv[0].numel() * qkv[0].element_size() + 4 * H * mask.tokens_q
    return {
        "calls": turns,
        "allocated_before_bytes": before,
        "marks": [dict(zip(("call", "allocated", "reserved"), m, strict=True)) for m in marks],
        "grown_bytes": marks[-1][1] - marks[0][1] if marks else None,
        "peak_extra_bytes": torch.cuda.max_memory_allocated() - before if bench.cuda else None,
        "lists_bytes": 4 * H * M * (N + 5),
        "output_bytes": out_bytes,
        "mask_bytes": H * M * N,
        "statistics": vars(site.statistics),
    }


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "planning": planning,
    "guard": guard,
    "attend": attend,
    "calls": calls,
    "memory": memory,
    "wan": wan,
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    arguments.add_argument("--small", action="store_true")
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.small, options.repeats)
    for name in options.only:
        started = time.perf_counter()
        try:
            result = SECTIONS[name](bench)
        except Exception:  # the other sections are still worth having
            result = {"error": traceback.format_exc()}
        result |= {
            "section": name,
            "gpu": gpu_name(),
            "small": bench.small,
            "seconds": time.perf_counter() - started,
            "wavealign": wavealign.__version__,
            "torch": torch.__version__,
        }
        (options.out / f"{name}.json").write_text(json_text(result, indent=1) + "\n")
        print(name, "failed" if "error" in result else "done", f"{result['seconds']:.1f} s")
        if bench.cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
