"""All order families on all masks at hand, simulated: docs/results/orders.md is made from this.

    python benchmarks/orders.py run --out runs.jsonl [--device h200 --device a40] [MASK.npz ...]
    python benchmarks/orders.py search --out searches.jsonl
    python benchmarks/orders.py tables runs.jsonl searches.jsonl

`run` simulates every row order with four visit orders, all heads of a mask in one launch, full
model, and the Belady bound of a few; without MASK the shipped masks. A row is a `wavealign.run/1`
row with `rows_ms` and `planning_ms`, CPU time of one thread for the row orders alone and for the
whole schedule. `search` is the local search (`wavealign order --improve`) on single heads. Both
go on where they were interrupted: what --out holds is not repeated. Needs the
extra `orders`; some 25 minutes of CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from common import DATA, ROOT, Row, markdown, parser, read_rows

from wavealign.masks import BlockMask, load_mask
from wavealign.order import Schedule, parse_policy
from wavealign.order.context import OrderContext
from wavealign.order.policies import visiting_lists
from wavealign.report.progress import Progress
from wavealign.runs.result import FIELDS
from wavealign.sim import Setup, run_schedule
from wavealign.sim.local_search import improve
from wavealign.structures import json_text

DEVICES = ("h200", "a40")
FAMILIES = (
    "original", "random", "svd", "svd(sign=short)", "svd(rank=2)", "spectral", "nnz", "nnz-dealt",
    "nnz-bucket+svd", "nnz-bucket+svd(bucket=4)", "greedy", "wave-pack", "pd-bisect",
    "profile-bisect", "kmeans", "rcm", "graph-bisect", "metis",
)  # fmt: skip
ALONE = ("original", "random", "svd", "spectral", "nnz", "nnz-dealt", "nnz-bucket+svd")
SORTED_ALREADY = ("nnz", "nnz-dealt")
VISITS = ("", "/shuffled", "/shuffled+sawtooth", "/shuffled+phased")
BOUNDED = ("original", "svd+nnz", "nnz/shuffled+phased", "nnz-dealt/shuffled+phased")
NAMES = {"nnz/shuffled+phased": "lockstep", "nnz-dealt/shuffled+phased": "resync"}
SEARCHED = (
    # file, head, evaluations
    ("data/clip/xattention_75600.npz", 3, 1000),
    ("data/clip/spargeattn_75600.npz", 3, 1000),
    ("data/clip/xattention_363600.npz", 0, 600),
    ("data/h200/vslash_2841.npz", 0, 300),
    ("data/h200/video_cv1_2841.npz", 0, 300),
    ("data/paper/xattention_363600.npz", 0, 300),
)
SEARCH_FROM = {"time": "lockstep", "reads": "nnz/shuffled+sawtooth"}
MARGIN = 0.005  # of the time; what the simulator can't be trusted with (docs/fidelity.md)


def shipped_masks() -> list[Path]:
    """The masks of the repository."""
    return [path for folder in (".", "clip", "h200", "paper") for path in _npz(DATA / folder)]


def row_policies() -> list[str]:
    """Every family with +nnz where that changes anything, the first ones also without."""
    found = []
    for family in FAMILIES:
        if family in ALONE:
            found.append(family)
        if family not in SORTED_ALREADY:
            name, parenthesis, rest = family.partition("(")
            found.append(f"{name}+nnz{parenthesis}{rest}")
    return found


def _npz(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"))


def _name(path: Path) -> str:
    """Short and unique: the folder tells masks of one name apart."""
    return path.stem if path.parent.name == "data" else f"{path.parent.name}/{path.stem}"


@lru_cache(maxsize=2)
def _mask(path: Path) -> BlockMask:
    return load_mask(path).mask


@lru_cache(maxsize=1)
def _quiet_worker() -> None:
    """One BLAS thread, and every kernel compiled: planning times are CPU times of one thread."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)
    small = BlockMask.from_dense(np.random.default_rng(0).random((1, 40, 40)) < 0.5)
    for rows in row_policies():
        _plan(small, f"{rows}/shuffled+phased", Setup.make("h200", wave=8))


def _plan(mask: BlockMask, policy: str, setup: Setup, rows: Any = None) -> tuple[Schedule, float]:
    """The schedule and the CPU ms of its row orders; of given `rows` only the lists are made."""
    recipe = parse_policy(policy)
    begun = time.thread_time()
    if rows is None:
        rows = np.stack(
            [recipe.row_order(mask.head(h), OrderContext(setup.wave, 0, h)) for h in range(mask.H)]
        )
    rows_ms = 1e3 * (time.thread_time() - begun)
    lists = visiting_lists(mask, rows, recipe.visits, setup.wave)
    return Schedule(rows, mask.indptr, lists, mask.shape, recipe.name), rows_ms


def simulate(path: Path, device: str, rows: str, policies: list[str]) -> list[Row]:
    """One row order with several visit orders on one mask."""
    _quiet_worker()
    mask, setup = _mask(path), Setup.make(device)
    found: list[Row] = []
    order, rows_ms = None, 0.0
    for policy in policies:
        begun = time.thread_time()
        schedule, spent = _plan(mask, policy, setup, order)
        lists_ms = 1e3 * (time.thread_time() - begun)
        if order is None:
            order, rows_ms, lists_ms = schedule.row_order, spent, lists_ms - spent
        belady = policy in BOUNDED
        result = run_schedule(mask, schedule, setup, name=_name(path), belady=belady)
        result = result.replaced(density=mask.density)
        row = json.loads(result.to_json())
        found.append(
            {k: v for k, v in row.items() if v is not None or k in _NEEDED}
            | {"rows_ms": round(rows_ms, 3), "planning_ms": round(rows_ms + lists_ms, 3)}
        )
    return found


_NEEDED = FIELDS[: FIELDS.index("version") + 1]


def run(options: argparse.Namespace) -> None:
    masks = [Path(path) for path in options.masks] or shipped_masks()
    done = {(r["mask"], r["device"], r["policy"]) for r in read_rows([options.out])}
    masks.sort(key=lambda path: _mask(path).nnz)  # figures of small masks come first
    tasks = []
    for path in masks:
        for device in options.device or DEVICES:
            for rows in row_policies():
                policies = [parse_policy(rows + visits).name for visits in VISITS]
                left = [p for p in policies if (_name(path), device, p) not in done]
                if left:
                    tasks.append((path, device, rows, left))
    _collect(simulate, tasks, options, lambda t: f"{_name(t[0])} {t[1]} {t[2]}")


def search_one(path: str, head: int, device: str, policy: str, objective: str, n: int) -> list[Row]:
    """One local search on one head."""
    mask, setup = _mask(ROOT / path).select_heads([head]), Setup.make(device)
    begun = time.monotonic()
    found = improve(mask, policy, setup, n, objective=objective, seed=0)
    seconds = time.monotonic() - begun
    name = f"{_name(ROOT / path)}[{head}]"
    result = run_schedule(mask, found.schedule, setup, name=name, belady=True)
    plain = {
        p: run_schedule(mask, _plan(mask, p, setup)[0], setup)
        for p in dict.fromkeys(("original", "lockstep", "resync", found.start_policy))
    }
    balanced = mask.nnz + setup.kernel.row_start_blocks * mask.M
    return [
        {
            "mask": name, "device": device, "policy": policy, "objective": objective,
            "start_policy": found.start_policy, "evaluations": found.evaluations,
            "accepted": found.accepted, "start": found.start, "best": found.best,
            "seconds": round(seconds, 1), "time_ms": result.time_ms, "limit_ms": result.limit_ms,
            "hbm_read_bytes": result.hbm_read_bytes, "belady_bytes": result.belady_bytes,
            "compulsory_bytes": result.compulsory_bytes,
            "balanced_cycles": balanced * setup.step_cycles(mask) / setup.wave,
            "imbalance_frac": result.imbalance_frac,
            "others": {p: [r.time_ms, r.hbm_read_bytes] for p, r in plain.items()},
        }
    ]  # fmt: skip


def search(options: argparse.Namespace) -> None:
    done = {(r["mask"], r["device"], r["policy"], r["objective"]) for r in read_rows([options.out])}
    tasks = []
    for path, head, evaluations in SEARCHED:
        for device in options.device or DEVICES:
            for objective, policy in SEARCH_FROM.items():
                name = f"{_name(ROOT / path)}[{head}]"
                if (name, device, policy, objective) not in done:
                    tasks.append((path, head, device, policy, objective, evaluations))
    _collect(search_one, tasks, options, lambda t: f"{t[0]} {t[2]} {t[3]} {t[4]}")


def _collect(
    do: Callable[..., list[Row]],
    tasks: list[tuple[Any, ...]],
    options: argparse.Namespace,
    label: Callable[[tuple[Any, ...]], str],
) -> None:
    """Run tasks in worker processes and append their rows as they come."""
    futures: dict[Future[list[Row]], tuple[Any, ...]] = {}
    with (
        ProcessPoolExecutor(options.jobs) as pool,
        Progress(len(tasks), "running") as progress,
        options.out.open("a", encoding="utf-8") as stream,
    ):
        try:
            futures = {pool.submit(do, *task): task for task in tasks}
            for future in as_completed(futures):
                stream.writelines(json_text(row) + "\n" for row in future.result())
                stream.flush()
                progress.advance(label(futures[future]))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            sys.exit("interrupted; the same command goes on from here")


# Tables


def tables(options: argparse.Namespace) -> None:
    rows = read_rows(options.files)
    launches: dict[tuple[str, str], dict[str, Row]] = {}
    compared = {parse_policy(r + visits).name for r in row_policies() for visits in VISITS}
    for row in rows:
        if "objective" not in row and row["policy"] in compared:
            launches.setdefault((row["device"], row["mask"]), {})[row["policy"]] = row
    order = [_name(path) for path in shipped_masks()]
    whole = len(compared)
    launches = dict(
        sorted(
            ((key, found) for key, found in launches.items() if len(found) >= whole),
            key=lambda item: (item[0][0] != "h200", _at(order, item[0][1])),
        )
    )
    for device in dict.fromkeys(device for device, _ in launches):
        own = {mask: found for (d, mask), found in launches.items() if d == device}
        print(f"## {device}\n")
        _print_masks(own)
        _print_ranking(own)
        _print_families(own)
        _print_grid(own)
    _print_winners(launches)
    _print_searches([row for row in rows if "objective" in row])


def _at(order: list[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _best(found: dict[str, Row]) -> str:
    return min(found, key=lambda p: found[p]["time_ms"])


def _table(header: Iterable[str], lines: list[list[str]]) -> None:
    print(markdown(header, lines) + "\n")


def _percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:+.{digits}f} %"


def _show(policy: str) -> str:
    return f"`{NAMES.get(policy, policy)}`"


def _print_masks(own: dict[str, dict[str, Row]]) -> None:
    print("### The best order of each mask\n")
    lines = []
    for number, (mask, found) in enumerate(own.items(), 1):
        base, lock = found["original"], found["nnz/shuffled+phased"]
        sync, paper = found["nnz-dealt/shuffled+phased"], found["svd+nnz"]
        best = found[_best(found)]
        least = min(found.values(), key=lambda row: row["hbm_read_bytes"])
        lines.append(
            [
                str(number),
                mask,
                f"{base['time_ms']:.3f}",
                *(_percent(r["time_ms"] / base["time_ms"] - 1) for r in (paper, lock, sync)),
                _show(best["policy"]),
                _percent(best["time_ms"] / base["time_ms"] - 1),
                _percent(best["time_ms"] / best["limit_ms"] - 1),
                f"{100 * base['l2_hit_frac']:.1f} / {100 * lock['l2_hit_frac']:.1f} / "
                f"{100 * best['l2_hit_frac']:.1f}",
                _show(least["policy"]),
                _percent(least["hbm_read_bytes"] / lock["hbm_read_bytes"] - 1, 0),
                f"{lock['hbm_read_bytes'] / lock['belady_bytes']:.2f}"
                if lock.get("belady_bytes")
                else "-",
            ]
        )
    _table(
        (
            "#", "mask", "`original`, ms", "`svd+nnz`", "`lockstep`", "`resync`", "best policy",
            "best", "best over its limit", "L2 hit %: original / lockstep / best",
            "fewest reads", "against lockstep's", "reads / Belady, lockstep",
        ),
        lines,
    )  # fmt: skip


def _print_ranking(own: dict[str, dict[str, Row]]) -> None:
    print("### The ten best policies over all masks\n")
    names = [parse_policy(rows + visits).name for rows in row_policies() for visits in VISITS]
    ratios = {p: [f[p]["time_ms"] / f["original"]["time_ms"] for f in own.values()] for p in names}
    lines = []
    for policy in sorted(names, key=lambda p: statistics.geometric_mean(ratios[p]))[:10]:
        runs = [(f[policy], f["nnz/shuffled+phased"]) for f in own.values()]
        worst = max(run["time_ms"] / lock["time_ms"] for run, lock in runs)
        best = min(run["time_ms"] / lock["time_ms"] for run, lock in runs)
        reads = [run["hbm_read_bytes"] / lock["hbm_read_bytes"] for run, lock in runs]
        planning = [run["planning_ms"] / len(_heads(run)) for run, _ in runs]
        lines.append(
            [
                _show(policy),
                _percent(statistics.geometric_mean(ratios[policy]) - 1),
                f"{_percent(best - 1)} to {_percent(worst - 1)}",
                _percent(statistics.geometric_mean(reads) - 1, 0),
                f"{100 * statistics.fmean(run['l2_hit_frac'] for run, _ in runs):.1f}",
                f"{max(planning):.0f}",
            ]
        )
    _table(
        (
            "policy", "time against `original`", "against `lockstep`", "reads against `lockstep`",
            "hit %", "planning, ms per head at most",
        ),
        lines,
    )  # fmt: skip


def _print_families(own: dict[str, dict[str, Row]]) -> None:
    print("### Families over all masks\n")
    header = ["rows"]
    for visits in VISITS:
        header += [f"time, {visits[1:] or 'ascending'}", "hit %"]
    lines = []
    for rows in row_policies():
        line = [f"`{rows}`"]
        for visits in VISITS:
            policy = parse_policy(rows + visits).name
            runs = [(f[policy], f["original"]) for f in own.values() if policy in f]
            ratio = [r["time_ms"] / base["time_ms"] for r, base in runs]
            line.append(_percent(statistics.geometric_mean(ratio) - 1))
            line.append(f"{100 * statistics.fmean(r['l2_hit_frac'] for r, _ in runs):.1f}")
        lines.append(line)
    _table(header, lines)


def _print_grid(own: dict[str, dict[str, Row]]) -> None:
    print("### Each family at its best visit order, against `lockstep`, % of the time\n")
    lines = []
    for family in FAMILIES:
        name, parenthesis, rest = family.partition("(")
        line = [f"`{family}`"]
        for found in own.values():
            variants = [
                found[p]["time_ms"]
                for rows in (family, f"{name}+nnz{parenthesis}{rest}")
                for visits in VISITS
                if (p := parse_policy(rows + visits).name) in found
            ]
            lock = found.get("nnz/shuffled+phased")
            line.append(
                _percent(min(variants) / lock["time_ms"] - 1, 1)[:-2] if variants and lock else "-"
            )
        rows = family if family in ALONE else f"{name}+nnz{parenthesis}{rest}"
        planning = [
            found[rows]["rows_ms"] / len(_heads(found[rows]))
            for found in own.values()
            if rows in found
        ]
        if planning:
            line += [f"{statistics.median(planning):.1f}", f"{max(planning):.0f}"]
        lines.append(line)
    numbers = [str(n) for n, _ in enumerate(own, 1)]
    _table(["family", *numbers, "rows, ms per head: median", "largest"], lines)


def _heads(row: Row) -> list[int]:
    from wavealign.units import parse_heads

    return parse_heads(row["heads"], 10_000)


def _print_winners(launches: dict[tuple[str, str], dict[str, Row]]) -> None:
    print(f"## Faster than both `lockstep` and `resync` by more than {100 * MARGIN:g} %\n")
    lines = []
    closest = (0.0, "")
    for (device, mask), found in launches.items():
        known = min(found[p]["time_ms"] for p in NAMES)
        ranked = sorted(found, key=lambda p: found[p]["time_ms"])
        for policy in ranked[:3]:
            run = found[policy]
            gain = run["time_ms"] / known - 1
            closest = min(closest, (gain, f"{_show(policy)} on {mask}, {device}"))
            if gain < -MARGIN:
                lines.append(
                    [
                        device, mask, _show(policy), _percent(gain),
                        _percent(run["time_ms"] / found["original"]["time_ms"] - 1),
                        f"{100 * run['imbalance_frac']:.1f} / "
                        f"{100 * found['nnz/shuffled+phased']['imbalance_frac']:.1f}",
                        f"{100 * run['l2_hit_frac']:.1f} / "
                        f"{100 * found['nnz/shuffled+phased']['l2_hit_frac']:.1f}",
                        f"{run['planning_ms']:.0f}",
                    ]
                )  # fmt: skip
    if not lines:
        print(f"None. The largest margin is {_percent(closest[0])}: {closest[1]}.\n")
        return
    _table(
        (
            "device", "mask", "policy", "against the faster of the two", "against `original`",
            "idle %, it / lockstep", "hit %, it / lockstep", "planning, CPU ms",
        ),
        lines,
    )  # fmt: skip


def _print_searches(rows: list[Row]) -> None:
    for objective, unit, scale in (("time", "ms", 1.0), ("reads", "GB", 1e-9)):
        print(f"## Local search, objective {objective}\n")
        best: dict[tuple[str, str], Row] = {}
        for row in rows:
            key = row["device"], row["mask"]
            if row["objective"] == objective and (
                key not in best or row["best"] < best[key]["best"]
            ):
                best[key] = row
        which = 0 if objective == "time" else 1
        lines = []
        for (device, mask), row in sorted(best.items()):
            floor = row["limit_ms"] if objective == "time" else row["compulsory_bytes"]
            lines.append(
                [
                    device,
                    mask,
                    *(
                        f"{row['others'][p][which] * scale:.3f}"
                        for p in ("original", "lockstep", "resync")
                    ),
                    f"`{row['start_policy']}`",
                    f"{row['start'] * scale:.3f}",
                    f"{row['best'] * scale:.3f}",
                    _percent(row["best"] / row["start"] - 1),
                    _percent(row["best"] / row["others"]["lockstep"][which] - 1),
                    f"{floor * scale:.3f}",
                    f"{row['evaluations']}",
                ]
            )
        floor = "its limit" if objective == "time" else "compulsory"
        _table(
            (
                "device", "head", f"`original`, {unit}", "`lockstep`", "`resync`",
                "start: best cheap order", "start", "local optimum", "against the start",
                "against `lockstep`", floor, "evaluations",
            ),
            lines,
        )  # fmt: skip


def main() -> None:
    whole = parser(__doc__)
    commands = whole.add_subparsers(dest="command", required=True)
    for name, do in (("run", run), ("search", search)):
        command = commands.add_parser(name)
        command.set_defaults(do=do)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--device", action="append")
        command.add_argument("--jobs", type=int, default=2, help="worker processes")
        if name == "run":
            command.add_argument("masks", nargs="*")
    command = commands.add_parser("tables")
    command.set_defaults(do=tables)
    command.add_argument("files", nargs="+", type=Path)
    options = whole.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
