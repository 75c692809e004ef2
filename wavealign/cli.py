"""The command line: parse, call, print. stdout is data, stderr is progress.

Exit codes: 0 done; 1 the work failed or was interrupted; 2 bad usage or input; 3 a missing
capability. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wavealign._version import __version__
from wavealign.errors import InputError, MissingCapabilityError, WaveAlignError

if TYPE_CHECKING:
    from wavealign.masks import LoadedMask
    from wavealign.results import RunResult
    from wavealign.sim.simulate import Setup

Command = TypeVar("Command", bound=Callable[..., Any])


class _Failure(click.ClickException):
    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance


class _Group(click.Group):
    """Turns the package's errors into exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as problem:
            raise _Failure(str(problem), 2) from problem
        except MissingCapabilityError as problem:
            raise _Failure(str(problem), 3) from problem
        except WaveAlignError as problem:
            raise _Failure(str(problem), 1) from problem


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="wavealign")
def main() -> None:
    """Order the rows of block-sparse attention so that what runs together reads together."""


def _mask_options(command: Command) -> Command:
    for option in (
        click.option("--key", help="The mask inside a file that holds several: KEY/mask, ..."),
        click.option(
            "--block", metavar="QxKV", help="Tokens per query and K/V block, e.g. 128x64."
        ),
        click.option("--heads", metavar="LIST", help="Only these heads, e.g. 0,3-7."),
        click.option(
            "--mask", "mask_path", metavar="FILE", required=True, help="Mask file (npz, npy)."
        ),
    ):
        command = option(command)
    return command


def _device_options(command: Command) -> Command:
    for option in (
        click.option("--dtype", default="bf16", show_default=True, help="Of K and V: bf16, fp16."),
        click.option(
            "--head-dim", type=click.IntRange(1), default=128, show_default=True,
            help="Elements per head.",
        ),
        click.option(
            "--wave", type=click.IntRange(1), metavar="W",
            help="Rows in flight; default: SMs x CTAs per SM of the device.",
        ),
        click.option(
            "--l2", metavar="SIZE",
            help="L2 capacity, all of it usable, e.g. 50MB or 48MiB; default: the device's "
            "effective capacity.",
        ),
        click.option("--kernel", help="Kernel of the device; default: its first."),
        click.option(
            "--device", default="h100", show_default=True,
            help="Device profile (see `wavealign devices`) or path to a TOML of your own.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


_json_option = click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout.")
_seed_option = click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of every random choice.",
)


def _setup(
    device: str, kernel: str | None, l2: str | None, wave: int | None, head_dim: int, dtype: str
) -> Setup:
    from wavealign.sim.simulate import Setup
    from wavealign.units import parse_size

    l2_bytes = parse_size(l2) if l2 is not None else None
    return Setup.make(device, kernel, l2_bytes=l2_bytes, wave=wave, head_dim=head_dim, dtype=dtype)


def _load(
    path: str, heads: str | None, block: str | None, key: str | None
) -> tuple[LoadedMask, list[int]]:
    """The mask, reduced to the chosen heads, and their indices in the file."""
    from wavealign.masks import load_mask
    from wavealign.units import parse_block, parse_heads

    loaded = load_mask(path, parse_block(block) if block else None, key)
    if heads is None:
        return loaded, list(range(loaded.mask.H))
    chosen = parse_heads(heads, loaded.mask.H)
    return dataclasses.replace(loaded, mask=loaded.mask.select_heads(chosen)), chosen


@main.command()
@_mask_options
@_device_options
@click.option(
    "--policy", "policies", multiple=True, metavar="P",
    help="ROWS[/VISITS], repeatable; default: the usual nine (see `wavealign policies`).",
)  # fmt: skip
@click.option(
    "--schedule", "schedule_paths", multiple=True, metavar="S.npz",
    help="Also score this schedule file, repeatable.",
)  # fmt: skip
@click.option("--per-head", is_flag=True, help="Also launch every head on its own.")
@_seed_option
@_json_option
@click.option("--out", metavar="FILE", help="Write the rows as JSON lines (replaces FILE).")
@click.option("--plot", metavar="FILE", help="Write a picture (png, svg, pdf; extra `report`).")
@click.option("--jobs", type=click.IntRange(1), help="Threads; default: all cores.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def sim(
    mask_path: str,
    heads: str | None,
    block: str | None,
    key: str | None,
    policies: tuple[str, ...],
    schedule_paths: tuple[str, ...],
    per_head: bool,
    seed: int,
    as_json: bool,
    out: str | None,
    plot: str | None,
    jobs: int | None,
    quiet: bool,
    **device_options: Any,
) -> None:
    """Compare policies on a mask: L2 hit ratio, HBM reads and time, simulated.

    All heads run as one launch, in order, as a kernel runs them.
    """
    from wavealign.order import DEFAULT_POLICIES, Schedule, parse_policy
    from wavealign.report.progress import Progress
    from wavealign.results import ResultWriter
    from wavealign.sim.campaign import Campaign, Task

    setup = _setup(**device_options)
    names = list(policies or DEFAULT_POLICIES)
    for name in names:
        parse_policy(name)
    loaded, head_ids = _load(mask_path, heads, block, key)
    mask = loaded.mask
    setup.capacity_blocks(mask)
    chosen = None if heads is None else head_ids
    recipes: list[str | Schedule] = [
        *names,
        *(_fitting_schedule(path, mask, chosen) for path in schedule_paths),
    ]
    if plot:
        from wavealign.report.plots import check_plot

        check_plot(plot)
    scopes: list[int | None] = [None, *(range(mask.H) if per_head else ())]
    tasks = [Task(recipe, scope) for scope in scopes for recipe in recipes]
    # The table and the picture compare with `original`, also where nobody asked for its row.
    shown_only = [] if as_json or "original" in names else [Task("original", s) for s in scopes]

    results: list[RunResult] = []
    baselines: dict[int | None, RunResult] = {}
    with ExitStack() as stack:
        writer = stack.enter_context(ResultWriter(out)) if out else None
        progress = stack.enter_context(Progress(len(tasks) + len(shown_only), "simulating", quiet))

        def take(result: RunResult) -> None:
            if result.policy == "original":
                baselines.setdefault(result.head, result)
            if len(results) < len(tasks):
                results.append(result)
                if writer is not None:
                    writer.write([result])
                if as_json:
                    click.echo(result.to_json())
            progress.advance(result.policy)

        try:
            campaign = Campaign(mask, setup, head_ids, loaded.name, seed)
            campaign.run([*tasks, *shown_only], jobs or _cores(), take)
        except KeyboardInterrupt:
            kept = f" {out} holds them." if out else ""
            raise _Failure(
                f"interrupted after {len(results)} of {len(tasks)} runs.{kept}", 1
            ) from None
    if not as_json:
        _print_results(loaded, setup, results, baselines)
    if plot:
        from wavealign.report.plots import plot_policies

        launch = [result for result in results if result.head is None]
        title = f"{loaded.name} on {setup.device.name}, {setup.kernel.name} (simulated)"
        plot_policies(launch, baselines.get(None), title, plot)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fitting_schedule(path: str, mask: Any, heads: list[int] | None) -> Any:
    """A schedule file as a row of the table, checked against the mask."""
    from wavealign.order import Schedule

    schedule = Schedule.load(path)
    try:
        if heads is not None and max(heads) < schedule.shape[0]:
            schedule = schedule.select_heads(heads)
        schedule.check(mask)
    except InputError as problem:
        raise InputError(f"{path}: {problem}") from problem
    return dataclasses.replace(schedule, policy=f"{Path(path).name} ({schedule.policy})")


def _print_results(
    loaded: LoadedMask,
    setup: Setup,
    results: list[RunResult],
    baselines: dict[int | None, RunResult],
) -> None:
    from wavealign.report.tables import launch_lines, print_table, results_table

    launch = [result for result in results if result.head is None]
    for line in launch_lines(loaded.mask, loaded.name, launch[0].heads, setup):
        click.echo(line)
    click.echo()
    if all(result.policy != "original" for result in launch):
        launch.insert(0, baselines[None])
    print_table(results_table(launch, baselines))
    click.echo(
        f"\nRequested {launch[0].l2_requested_bytes / 1e9:.2f} GB of K/V; compulsory reads "
        f"{launch[0].compulsory_bytes / 1e9:.2f} GB. Simulated, first model (docs/fidelity.md)."
    )
    separate = [result for result in results if result.head is not None]
    if separate:
        click.echo("\nEach head launched on its own:\n")
        print_table(results_table(separate, baselines))


@main.command()
@_mask_options
@_device_options
@click.option("--policy", required=True, metavar="P", help="ROWS[/VISITS].")
@_seed_option
@click.option("--out", required=True, metavar="FILE", help="The schedule file to write.")
@click.option("--jobs", type=click.IntRange(1), help="Threads; default: all cores.")
@_json_option
def order(
    mask_path: str,
    heads: str | None,
    block: str | None,
    key: str | None,
    policy: str,
    seed: int,
    out: str,
    jobs: int | None,
    as_json: bool,
    **device_options: Any,
) -> None:
    """Write the schedule that a policy makes of a mask."""
    from wavealign.npz import check_writable
    from wavealign.order import build_schedule, parse_policy

    setup = _setup(**device_options)
    recipe = parse_policy(policy)
    loaded, _ = _load(mask_path, heads, block, key)
    check_writable(out)
    schedule = build_schedule(loaded.mask, recipe, setup.wave, seed, jobs or _cores())
    schedule.save(out)
    H, M, N = schedule.shape
    row = {
        "schedule": out, "policy": policy, "mask": loaded.name, "mask_digest": loaded.mask.digest,
        "shape": [H, M, N], "wave": setup.wave, "seed": seed,
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps(row))
    else:
        click.echo(
            f"{out}: {policy} for {H} heads of {M} x {N} blocks, {setup.wave} rows in flight"
        )


@main.group()
def mask() -> None:
    """Look at mask files."""


@mask.command()
@click.argument("file")
@click.option("--key", help="The mask inside a file that holds several: KEY/mask, ...")
@click.option("--block", metavar="QxKV", help="Tokens per query and K/V block, e.g. 128x64.")
@click.option("--heads", metavar="LIST", help="Only these heads, e.g. 0,3-7.")
@click.option("--per-head", is_flag=True, help="A row for every head.")
@_device_options
@_json_option
def info(
    file: str,
    key: str | None,
    block: str | None,
    heads: str | None,
    per_head: bool,
    as_json: bool,
    **device_options: Any,
) -> None:
    """How FILE was understood, and what its mask looks like to the cache."""
    from wavealign.masks import mask_stats
    from wavealign.report.tables import print_table, stats_table

    setup = _setup(**device_options)
    loaded, head_ids = _load(file, heads, block, key)
    mask = loaded.mask
    total, each = mask_stats(mask)
    each = [dataclasses.replace(s, head=head_ids[s.head or 0]) for s in each]
    rows = [total, *each] if per_head else [total]
    block_bytes = setup.kv_bytes(mask.block_kv)
    if as_json:
        for stats in rows:
            click.echo(
                json.dumps({
                    "schema": "wavealign.mask_info/1",
                    "mask": loaded.name,
                    "mask_digest": mask.digest,
                    "understood_as": list(loaded.understood_as),
                    "shape": list(mask.shape),
                    "block_size": [mask.block_q, mask.block_kv],
                    "seq_len": [mask.tokens_q, mask.tokens_kv],
                    **dataclasses.asdict(stats),
                    "working_set_bytes": stats.working_set_bytes(block_bytes),
                    "l2_capacity_bytes": setup.l2_capacity_bytes,
                    "meta": dict(mask.meta),
                })
            )  # fmt: skip
        return
    click.echo(f"{file}, read as")
    for note in loaded.understood_as:
        click.echo(f"  {note}")
    for name, value in mask.meta.items():
        click.echo(f"  meta {name}: {value}")
    click.echo(f"  digest: {mask.digest}\n")
    print_table(stats_table(rows, setup, mask.block_kv))
    click.echo(
        f"\nL2: {setup.l2_capacity_bytes:,} bytes ({setup.l2_origin}). Spread: standard deviation "
        "/ mean of a row's NNZ. Overlap: Jaccard, of adjacent rows. K/V set: distinct K/V blocks "
        "that a head reads (largest head)."
    )
    if total.empty_heads:
        click.echo(f"{total.empty_heads} of {mask.H} heads keep no block at all.")


@main.command()
@_json_option
def policies(as_json: bool) -> None:
    """Row orders, visit orders and aliases, with formula, cost and source."""
    from wavealign.order.policies import registry

    if as_json:
        for entry in registry():
            click.echo(json.dumps(dataclasses.asdict(entry), ensure_ascii=False))
        return
    from wavealign.report.tables import policies_table, print_table

    click.echo("A policy is ROWS[/VISITS], e.g. svd+nnz or nnz/shuffled+sawtooth.\n")
    print_table(policies_table(registry()))


@main.command()
@_json_option
def devices(as_json: bool) -> None:
    """Device profiles, and where their figures come from (--json)."""
    from wavealign.sim.devices import device_names, load_device

    profiles = [load_device(name) for name in device_names()]
    if as_json:
        for profile in profiles:
            row = dataclasses.asdict(profile)
            for kernel in row["kernels"].values():
                kernel["block_ns"] = [
                    {"block_q": q, "block_kv": kv, "ns": ns}
                    for (q, kv), ns in kernel["block_ns"].items()
                ]
            click.echo(json.dumps(row))
        return
    from wavealign.report.tables import devices_table, print_table

    print_table(devices_table(profiles))


if __name__ == "__main__":
    main()
