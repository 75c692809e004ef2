"""`wavealign sweep`: search policies over masks and devices, on one machine or many."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from wavealign.cli.failure import Command, Failure
from wavealign.cli.options import cores, json_option, seed_option

if TYPE_CHECKING:
    from wavealign.runs.trial import TrialRecord
    from wavealign.sweep.space import Space
    from wavealign.sweep.store import Store

_LISTS = ("device", "kernel", "l2", "wave", "model", "regime")  # options with comma lists
_SHOWN_FAILURES = 5


@click.command(cls=Command)
@click.option(
    "--mask", "patterns", multiple=True, metavar="PATH", required=True,
    help="Mask file, folder of mask files, or glob in quotes; repeatable.",
)  # fmt: skip
@click.option("--block", metavar="QxKV", help="Tokens per query and K/V block, e.g. 128x64.")
@click.option("--key", help="The mask inside files that hold several: KEY/mask, ...")
@click.option("--space", "space_path", metavar="FILE", help="Space file (TOML, docs/sweep.md).")
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
@click.option(
    "--search", "kind", type=click.Choice(["grid", "random", "tpe"]), default="grid",
    show_default=True, help="All combinations, or draws by optuna (extra `sweep`).",
)  # fmt: skip
@click.option("--trials", type=click.IntRange(1), help="Draws of random and tpe, over all masks.")
@click.option(
    "--objective", type=click.Choice(["time", "reads", "energy"]), default="time",
    show_default=True, help="What is minimised.",
)  # fmt: skip
@click.option("--belady", is_flag=True, help="Also the least that any replacement could read.")
@click.option("--gpu", is_flag=True, help="Then measure the best on this machine's GPU.")
@click.option(
    "--finalists", type=click.IntRange(1), default=5, show_default=True,
    help="Policies per mask that --gpu measures, beside original.",
)  # fmt: skip
@click.option(
    "--executor", type=click.Choice(["local", "ray", "dask"]), default="local", show_default=True,
    help="What runs the trials (extras `ray`, `dask`).",
)  # fmt: skip
@click.option("--address", help="Of a running Ray or Dask cluster; default: start one here.")
@click.option("--jobs", type=click.IntRange(1), help="Workers on this machine; default: all cores.")
@click.option(
    "--out", metavar="DIR", required=True,
    help="The sweep's folder. Given again, finished trials are kept and not repeated.",
)  # fmt: skip
@click.option("--retry-failed", is_flag=True, help="Run trials again that failed before.")
@seed_option
@json_option
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def sweep(
    patterns: tuple[str, ...],
    space_path: str | None,
    kind: str,
    trials: int | None,
    objective: str,
    gpu: bool,
    executor: str,
    out: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Search policies over masks and devices for the best; simulated, then measured with --gpu.

    `original` always runs as the baseline. DIR keeps every trial as it ends: after Ctrl-C, a kill
    or a crash the same command continues. Exit code 1 where a trial failed; the others are kept.
    """
    from wavealign.sweep.conditions import OBJECTIVES, device_digests, resolve_conditions
    from wavealign.sweep.engines import make_engine
    from wavealign.sweep.masks import find_masks
    from wavealign.sweep.run import run_search
    from wavealign.sweep.search import make_search
    from wavealign.sweep.store import Store
    from wavealign.units import parse_block

    space = _space(space_path, options)
    if gpu:
        from wavealign.sweep.gpu_phase import measure_finalists, prepare, require_gpu

        require_gpu(executor)
    block = parse_block(options["block"]) if options["block"] else None
    masks = find_masks(patterns, block, options["key"], _say)
    baselines, inputs = resolve_conditions(space, masks, objective, _say)
    seed = options["seed"]
    store = Store(
        out,
        {
            "space": space.as_json(),
            "masks": [
                {"name": m.name, "digest": m.mask.digest, "shape": m.mask.shape} for m in masks
            ],
            "paths": {m.name: m.path for m in masks},
            "devices": device_digests(dict(inputs.devices)),
            "search": {"kind": kind, "seed": seed if kind != "grid" else None},
            "trials": trials,
            "objective": objective,
            "belady": options["belady"],
        },
        _say,
    )
    search = make_search(space, baselines, kind, trials, seed, objective, store.draws, _say)
    engine = make_engine(executor, inputs, options["jobs"] or cores(), options["address"])
    store.check()
    with ExitStack() as stack:
        stack.enter_context(engine)
        phase = prepare(engine, baselines, inputs) if gpu else None
        stack.enter_context(store)
        if options["retry_failed"]:
            store.forget_failed()
        shown = _Shown(OBJECTIVES[objective], options["quiet"])
        try:
            with shown.stage(search.total, "simulated"):
                run_search(search, store, engine, shown.take, options["belady"])
            if phase is not None:
                with ExitStack() as measuring:
                    measure_finalists(
                        phase,
                        engine,
                        inputs,
                        store,
                        objective,
                        options["finalists"],
                        lambda total: measuring.enter_context(shown.stage(total, "measured")),
                        shown.take,
                    )
        except KeyboardInterrupt:
            _export(store)
            raise Failure(
                f"interrupted; {len(store.records)} finished trials are kept in {out}. To go on: "
                f"{shlex.join(['wavealign', *sys.argv[1:]])}",
                1,
            ) from None
        _export(store)
        records = shown.records
    if kind != "grid":
        ran = sum(record.spec.source == "simulated" for record in records)
        _say(f"{len(baselines)} baselines and {trials} draws came to {ran} different trials.")
    _print(records, store, OBJECTIVES[objective], as_json)
    failures = [record for record in records if record.status == "failed"]
    if failures:
        for record in failures[:_SHOWN_FAILURES]:
            spec = record.spec
            _say(f"failed: {spec.policy} on {spec.mask}, {spec.device}: {record.error}")
        raise Failure(
            f"{len(failures)} of {len(records)} trials failed; {out}/trials has their errors, "
            "--retry-failed runs them again.",
            1,
        )


def _space(path: str | None, options: dict[str, Any]) -> Space:
    from wavealign.sweep.space import load_table, make_space

    given: dict[str, list[Any]] = {}
    for name in _LISTS:
        if options[name] is not None:
            values = [part.strip() for part in options[name].split(",") if part.strip()]
            given[name] = [_whole(v) for v in values] if name == "wave" else values
    for name in ("policy", "heads"):
        if options[name]:
            given[name] = list(options[name])
    for name in ("head_dim", "dtype"):
        if options[name] is not None:
            given[name] = [options[name]]
    table = load_table(path) if path is not None else {}
    if "seed" not in table:
        given["seed"] = [options["seed"]]
    return make_space(table, given, path or "the options")


def _whole(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


class _Shown:
    """Progress on stderr, and every trial of this sweep, each once."""

    def __init__(self, field: str, quiet: bool) -> None:
        self._field, self._quiet = field, quiet
        self.records: list[TrialRecord] = []

    def stage(self, total: int, what: str) -> Any:
        from wavealign.report.progress import Progress
        from wavealign.report.sweep_tables import Pace

        self._pace = Pace(self._field)
        self._progress = Progress(total, what, self._quiet)
        return self._progress

    def take(self, record: TrialRecord, ran: bool) -> None:
        self.records.append(record)
        self._progress.advance(self._pace.line(record, ran))


def _export(store: Store) -> None:
    if not store.export():
        _say("no results.parquet: it needs pyarrow (pip install 'wavealign[sweep]').")


def _print(records: list[TrialRecord], store: Store, field: str, as_json: bool) -> None:
    from wavealign.report.sweep_tables import best_table
    from wavealign.report.tables import print_table
    from wavealign.sweep.export import sorted_done

    done = sorted_done(records)
    if as_json:
        for record in done:
            assert record.result is not None
            click.echo(record.result.to_json())
        return
    for source in ("simulated", "measured"):
        part = [record for record in done if record.spec.source == source]
        if part:
            click.echo(f"{source}, {len(part)} trials, the best by {field}:\n")
            print_table(best_table(part, field))
            click.echo()
    click.echo(
        "speedup and changes: against original. over limit: time / time with all K/V in L2. "
        f"{store.folder}/results.jsonl holds every row."
    )


def _say(text: str) -> None:
    click.echo(text, err=True)
