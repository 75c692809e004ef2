"""`wavealign sweep`: search policies over masks and devices, on one machine or many."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wavealign.cli.failure import Command, Failure
from wavealign.cli.options import cores, json_option, seed_option
from wavealign.cli.output import remark, say, say_json
from wavealign.cli.paths import Input, Output
from wavealign.runs.launch import OBJECTIVES
from wavealign.sweep import EXECUTORS, SEARCHES

if TYPE_CHECKING:
    from wavealign.report.progress import Progress
    from wavealign.runs.trial import TrialRecord
    from wavealign.sweep.space import Space

_LISTS = ("device", "kernel", "l2", "wave", "model", "regime")  # options with comma lists
_SWEEP = ("patterns", "key", "kind", "trials", "seed", "belady", "executor", "address")
_SHOWN_FAILURES = 5


@click.command(cls=Command)
@click.option("--mask", "patterns", multiple=True, metavar="PATH", required=True,
              help="Mask file, folder of mask files, or glob in quotes; repeatable.")  # fmt: skip
@click.option("--block", metavar="QxKV", help="Tokens per query and K/V block, e.g. 128x64.")
@click.option("--key", help="The mask inside files that hold several: KEY/mask, ...")
@click.option("--space", "space_path", type=Input(), help="Space file (TOML, docs/sweep.md).")
@click.option(
    "--policy", multiple=True, metavar="P",
    help="ROWS[/VISITS], repeatable, instead of a space's; default: the usual ten.",
)  # fmt: skip
@click.option("--device", metavar="LIST", help="Profiles, e.g. h100,a40; default: h100.")
@click.option("--kernel", metavar="LIST", help="Kernels; default: each device's first.")
@click.option("--l2", metavar="LIST", help="L2 sizes, e.g. 30MB,50MB; default: the device's.")
@click.option("--wave", metavar="LIST", help="Rows in flight; default: the device's.")
@click.option("--model", metavar="LIST", help="full, fast; default: full.")
@click.option("--regime", metavar="LIST", help="single, steady; default: single.")
@click.option(
    "--heads", multiple=True, metavar="LIST",
    help="Heads of one launch, e.g. 0,3-7, repeatable; or all (default), or each.",
)  # fmt: skip
@click.option("--head-dim", type=click.IntRange(1), help="Elements per head; default: 128.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), help="Of K and V; default: bf16.")
@click.option("--search", "kind", type=click.Choice(SEARCHES), default="grid", show_default=True,
              help="All combinations, or draws by optuna (extra `sweep`).")  # fmt: skip
@click.option("--trials", type=click.IntRange(1), help="Draws of random and tpe, over all masks.")
@click.option("--objective", type=click.Choice(list(OBJECTIVES)), default="time", show_default=True,
              help="What is minimised.")  # fmt: skip
@click.option("--belady", is_flag=True, help="Also the least that any replacement could read.")
@click.option("--gpu", is_flag=True, help="Then measure the best on this machine's GPU.")
@click.option("--finalists", type=click.IntRange(1), default=5, show_default=True,
              help="Policies per mask that --gpu measures, beside original.")  # fmt: skip
@click.option("--executor", type=click.Choice(EXECUTORS), default="local", show_default=True,
              help="What runs the trials (extras `ray`, `dask`).")  # fmt: skip
@click.option("--address", help="Of a running Ray or Dask cluster; default: start one here.")
@click.option("--jobs", type=click.IntRange(1), help="Workers on this machine; default: all cores.")
@click.option(
    "--out", type=Output(folder=True), required=True,
    help="The sweep's folder. Given again, finished trials are kept and not repeated.",
)  # fmt: skip
@click.option("--retry-failed", is_flag=True, help="Run trials again that failed before.")
@seed_option
@json_option
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def sweep(
    space_path: str | None,
    block: str | None,
    objective: str,
    gpu: bool,
    finalists: int,
    jobs: int | None,
    out: str,
    retry_failed: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Search policies over masks and devices for the best; simulated, then measured with --gpu.

    `original` always runs as the baseline. DIR keeps every trial as it ends: after Ctrl-C, a kill
    or a crash the same command continues. Exit code 1 where a trial failed; the others are kept.
    """
    space = _space(space_path, options)
    from wavealign.sweep.sweep import Sweep, SweepInterruptedError, run_sweep
    from wavealign.units import parse_block

    swept = Sweep(
        space, block=parse_block(block) if block else None, objective=objective,
        finalists=finalists if gpu else None, jobs=jobs or cores(),
        **{name: options[name] for name in _SWEEP},
    )  # fmt: skip
    shown = _Shown(OBJECTIVES[objective], quiet)
    try:
        records = run_sweep(
            swept, out,
            retry_failed=retry_failed, stages=shown.stage, on_trial=shown.take, note=remark,
        )  # fmt: skip
    except SweepInterruptedError as interrupted:
        raise Failure(
            f"interrupted; {interrupted} finished trials are kept in {out}. To go on: "
            f"{shlex.join(['wavealign', *sys.argv[1:]])}",
            1,
        ) from None
    _print(records, out, objective, as_json)
    if failures := [record for record in records if record.status == "failed"]:
        for record in failures[:_SHOWN_FAILURES]:
            spec = record.spec
            remark(f"failed: {spec.policy} on {spec.mask}, {spec.device}: {record.error}")
        raise Failure(
            f"{len(failures)} of {len(records)} trials failed; {out}/trials has their errors, "
            "--retry-failed runs them again.",
            1,
        )


def _space(path: str | None, options: dict[str, Any]) -> Space:
    from wavealign.sweep.space import load_table, make_space

    table = load_table(path) if path is not None else {}
    given: dict[str, list[Any]] = {
        name: [part.strip() for part in options[name].split(",") if part.strip()]
        for name in _LISTS
        if options[name] is not None
    }
    if "wave" in given:
        given["wave"] = [int(text) if text.isdecimal() else text for text in given["wave"]]
    given |= {name: list(options[name]) for name in ("policy", "heads") if options[name]}
    source = click.get_current_context().get_parameter_source("seed")
    asked = source is not ParameterSource.DEFAULT and options["kind"] == "grid"  # not of draws
    single = ("head_dim", "dtype", *(("seed",) if asked or "seed" not in table else ()))
    given |= {name: [options[name]] for name in single if options[name] is not None}
    return make_space(table, given, path or "the options")


class _Shown:
    """Progress on stderr."""

    def __init__(self, field: str, quiet: bool) -> None:
        self._field, self._quiet = field, quiet

    def stage(self, total: int, what: str) -> Progress:
        from wavealign.report.progress import Progress
        from wavealign.report.sweep_tables import Pace

        self._pace = Pace(self._field)
        self._progress = Progress(total, what, self._quiet)
        return self._progress

    def take(self, record: TrialRecord, ran: bool) -> None:
        self._progress.advance(self._pace.line(record, ran))


def _print(records: list[TrialRecord], out: str, objective: str, as_json: bool) -> None:
    from wavealign.report.sweep_tables import best_table
    from wavealign.report.tables import print_table
    from wavealign.sweep.export import sorted_done

    field = OBJECTIVES[objective]
    done = sorted_done(records)
    for record in done if as_json else ():
        assert record.result is not None
        say_json(record.result.to_json())
    known = {r.spec.baseline for r in done if getattr(r.result, field) is not None}
    every = list(dict.fromkeys(record.spec.baseline for record in done))
    if unranked := [condition for condition in every if condition not in known]:
        told = (
            f"no trial knows its {objective} under {len(unranked)} of {len(every)} conditions, the "
            f"first of them {unranked[0].mask} on {unranked[0].device}, {unranked[0].source}: none "
            "is simulated where HBM's bandwidth sets the time. Their rows are kept."
        )
        if not known:
            raise Failure(told, 1)
        remark(told)
    if as_json:
        return
    for source in ("simulated", "measured"):
        part = [record for record in done if record.spec.source == source]
        if known.intersection(record.spec.baseline for record in part):
            say(f"{source}, {len(part)} trials, the best by {field}:", "")
            print_table(best_table(part, field))
            say("")
    say(
        "speedup and changes: against original. over limit: time / time with all K/V in L2. "
        f"{Path(out)}/results.jsonl holds every row."
    )
