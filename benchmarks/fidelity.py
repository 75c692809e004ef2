"""Simulated against measured, run by run: how far the simulator can be trusted.

    python benchmarks/fidelity.py [RUNS ...] [--device h200] [--model full] [--plot FILE]

RUNS is a JSON lines file of measured runs (data/README.md), or a folder that holds
``runs.jsonl``; their masks lie beside it as NAME.npz. By default everything in `data`.
docs/fidelity.md explains the table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import DATA, parser

from wavealign.runs.launch import BASELINE
from wavealign.runs.ranking import rank
from wavealign.runs.result import Result
from wavealign.sim.calibrate import replay, replay_errors
from wavealign.sim.recordings import Recording, load_recordings
from wavealign.sim.setup import Setup

RECORDED = [
    DATA / "h200" / "runs-first.jsonl",
    DATA / "h200" / "runs.jsonl",
    DATA / "xattention_363600.runs.jsonl",
    DATA / "spargeattn_363600.runs.jsonl",
]
VALIDATED = [
    *(
        DATA / folder / f"{campaign}.runs.jsonl"
        for campaign in ("validated", "resync")
        for folder in ("", "h200")
    ),
    DATA / "paper" / "runs.jsonl",
]
SHIPPED = RECORDED + VALIDATED


def main() -> None:
    options = parser(__doc__)
    options.add_argument("runs", nargs="*", type=Path, default=SHIPPED)
    options.add_argument("--device", default="h200")
    options.add_argument("--model", default="full", choices=["full", "fast"])
    options.add_argument("--plot", type=Path, help="also a picture, simulated against measured")
    options.add_argument("--quiet", action="store_true", help="only the summary")
    arguments = options.parse_args()
    setup = Setup.make(arguments.device, model=arguments.model)
    found = [recording for path in arguments.runs for recording in load_recordings(path)]
    print(f"{len(found)} runs, rebuilt", file=sys.stderr)
    results = replay(found, setup)
    if not arguments.quiet:
        _table(found, results)
    for tile in sorted({_tile(recording) for recording in found}):
        kept = [i for i, recording in enumerate(found) if _tile(recording) == tile]
        _summary([found[i] for i in kept], [results[i] for i in kept])
    print("\nall tiles")
    _ranking(found, results)
    if arguments.plot is not None:
        _plot(found, results, arguments.plot)


def _table(found: list[Recording], results: list[Result]) -> None:
    print(f"{'run':64} {'hit':>6} {'sim':>6} {'diff':>6} {'ms':>7} {'sim':>7} {'diff':>6}")
    for recording, result in zip(found, results, strict=True):
        hit, ms = recording.measured.l2_hit_frac, recording.measured.time_ms
        print(
            f"{recording.label:64} {hit:6.3f} {result.l2_hit_frac:6.3f} "
            f"{100 * (result.l2_hit_frac - hit):+6.1f} {ms:7.2f} {result.time_ms:7.2f} "
            f"{100 * (result.time_ms / ms - 1):+5.1f}%"
        )


def _tile(recording: Recording) -> tuple[int, int]:
    return recording.mask.block_q, recording.mask.block_kv


def _summary(found: list[Recording], results: list[Result]) -> None:
    errors = replay_errors(found, results)
    tile = _tile(found[0])
    print(f"\n{tile[0]}x{tile[1]}, {len(found)} runs")
    _line("hit ratio, points", errors.hit_points)
    _line("profiler's hit rate, points", errors.sector_points)
    _line("HBM reads, % of requested", errors.read_percent)
    _line("time, %", errors.time_percent)
    _line("speedup over original, %", 100 * np.array(list(_speedup_errors(found, results))))


def _line(what: str, errors: np.ndarray) -> None:
    if len(errors):
        print(
            f"  {what:28} mean {np.abs(errors).mean():5.2f}   worst {np.abs(errors).max():5.1f}   "
            f"bias {errors.mean():+5.2f}"
        )


def _groups(found: list[Recording]) -> dict[tuple[str, str], list[int]]:
    """Runs of one mask (and head) in one campaign: what may be compared with each other."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i, recording in enumerate(found):
        groups.setdefault((recording.mask_name, recording.campaign), []).append(i)
    return groups


def _speedup_errors(found: list[Recording], results: list[Result]) -> Iterator[float]:
    for members in _groups(found).values():
        base = [i for i in members if found[i].schedule.policy == BASELINE]
        for i in members:
            if base and i != base[0]:
                measured = found[base[0]].measured.time_ms / found[i].measured.time_ms
                yield results[base[0]].time_ms / results[i].time_ms / measured - 1


def _ranking(found: list[Recording], results: list[Result]) -> None:
    """Does the simulator choose well? Pairs whose measured times differ by more than 1 %."""
    rankings = [
        rank([results[i].time_ms for i in members], [found[i].measured.time_ms for i in members])
        for members in _groups(found).values()
        if len(members) > 1
    ]
    agree, disagree = sum(r.agree for r in rankings), sum(r.disagree for r in rankings)
    regrets = [100 * r.regret_frac for r in rankings]
    print(
        f"  ranking: Kendall tau {(agree - disagree) / max(1, agree + disagree):.3f} over "
        f"{agree + disagree} pairs that differ by more than 1 %; the chosen order is slower than "
        f"the best measured one by {np.mean(regrets):.2f} % on average, {max(regrets):.2f} % at "
        f"worst ({len(regrets)} sets of runs)"
    )


def _plot(found: list[Recording], results: list[Result], path: Path) -> None:
    """Simulated against measured: hit ratio, and time of the policies of a mask."""
    from matplotlib.figure import Figure

    from wavealign.report.plots import BLUE, INK, ORANGE, save

    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    hits, times = figure.subplots(1, 2)
    tiles = sorted({_tile(recording) for recording in found})
    for tile, colour in zip(tiles, (ORANGE, BLUE), strict=False):
        kept = [i for i, recording in enumerate(found) if _tile(recording) == tile]
        measured = [found[i].measured for i in kept]
        label = f"{tile[0]}x{tile[1]} ({len(kept)} runs)"
        style = {"s": 16, "color": colour, "alpha": 0.7, "linewidths": 0, "label": label}
        hits.scatter(
            [100 * m.l2_hit_frac for m in measured],
            [100 * results[i].l2_hit_frac for i in kept],
            **style,
        )
        times.scatter([m.time_ms for m in measured], [results[i].time_ms for i in kept], **style)
    for axis, what in ((hits, "L2 hit ratio (%)"), (times, "kernel time (ms)")):
        low, high = (0.0, 100.0) if axis is hits else (5.0, 220.0)
        axis.plot([low, high], [low, high], color=INK, linewidth=0.8)
        axis.set_xlabel(f"measured {what}")
        axis.set_ylabel(f"simulated {what}")
        axis.spines[["top", "right"]].set_visible(False)
    times.set_xscale("log")
    times.set_yscale("log")
    hits.legend(frameon=False, loc="upper left")
    save(figure, path)


if __name__ == "__main__":
    main()
