"""`wavealign sim`: compare policies on a mask."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from wavealign.cli import options
from wavealign.cli.failure import Command, Failure
from wavealign.cli.output import say, say_json
from wavealign.cli.paths import Input

if TYPE_CHECKING:
    from wavealign.masks import LoadedMask
    from wavealign.order import Schedule
    from wavealign.runs.result import Result
    from wavealign.sim.setup import Setup


@click.command(cls=Command)
@options.mask_options
@options.device_options
@options.model_options
@click.option(
    "--policy", "policies", multiple=True, metavar="P",
    help="ROWS[/VISITS], repeatable; default: the usual ten (see `wavealign policies`).",
)  # fmt: skip
@click.option("--schedule", "schedule_paths", multiple=True, type=Input(), metavar="S.npz",
              help="Also score this schedule file, repeatable.")  # fmt: skip
@click.option(
    "--belady/--no-belady", default=True, show_default=True,
    help="Replay each launch with the best possible replacement too: a bound on HBM reads.",
)  # fmt: skip
@click.option("--per-head", is_flag=True, help="Also launch every head on its own.")
@options.seed_option
@options.json_option
@options.rows_option
@options.plot_option
@options.jobs_option
@options.quiet_option
def sim(
    policies: tuple[str, ...],
    belady: bool,
    per_head: bool,
    seed: int,
    as_json: bool,
    out: str | None,
    plot: str | None,
    jobs: int | None,
    quiet: bool,
    **given: Any,
) -> None:
    """Compare policies on a mask: L2 hit ratio, HBM reads and time, simulated.

    All heads run as one launch, in order, as a kernel runs them.
    """
    from wavealign.order import DEFAULT_POLICIES, parse_policy
    from wavealign.report.progress import Progress
    from wavealign.runs.lines import ResultWriter
    from wavealign.sim.campaign import Campaign, Task

    setup = options.make_setup(given)
    names = list(policies or DEFAULT_POLICIES)
    for name in names:
        parse_policy(name)
    loaded, head_ids = options.load_heads(given["mask_path"], given)
    mask = loaded.mask
    setup.capacity_blocks(mask)
    recipes: list[str | Schedule] = [*names, *options.fitting_schedules(given, mask, head_ids)]
    options.check_picture(plot)
    scopes: list[int | None] = [None, *(range(mask.H) if per_head else ())]
    tasks = [Task(recipe, scope) for scope in scopes for recipe in recipes]
    # The table and the picture compare with `original`, also where nobody asked for its row.
    shown_only = [] if as_json or "original" in names else [Task("original", s) for s in scopes]

    results: list[Result] = []
    baselines: dict[int | None, Result] = {}
    with ExitStack() as stack:
        writer = stack.enter_context(ResultWriter(out)) if out is not None else None
        progress = stack.enter_context(Progress(len(tasks) + len(shown_only), "simulating", quiet))

        def take(result: Result) -> None:
            if result.policy == "original":
                baselines.setdefault(result.head, result)
            if len(results) < len(tasks):
                results.append(result)
                if writer is not None:
                    writer.write([result])
                if as_json:
                    say_json(result.to_json())
            progress.advance(result.policy)

        try:
            campaign = Campaign(mask, setup, head_ids, loaded.name, seed, belady)
            campaign.run([*tasks, *shown_only], jobs or options.cores(), take)
        except KeyboardInterrupt:
            kept = f" {out} holds them." if out else ""
            message = f"interrupted after {len(results)} of {len(tasks)} runs.{kept}"
            raise Failure(message, 1) from None
    if not as_json:
        _print_results(loaded, setup, results, baselines)
    if plot is not None:
        from wavealign.report.plots import plot_policies

        launch = [result for result in results if result.head is None]
        title = f"{loaded.name} on {setup.device.name}, {setup.kernel.name} (simulated)"
        plot_policies(launch, baselines.get(None), title, plot)


def _print_results(
    loaded: LoadedMask, setup: Setup, results: list[Result], baselines: dict[int | None, Result]
) -> None:
    from wavealign.report.tables import launch_lines, print_table, results_table, timing_line
    from wavealign.units import decimal_size, decimals

    launch = [result for result in results if result.head is None]
    lines = launch_lines(loaded.mask, loaded.name, launch[0].heads, setup)
    say(*lines, timing_line(setup), "")
    if all(result.policy != "original" for result in launch):
        launch.insert(0, baselines[None])
    print_table(results_table(launch, baselines))
    first = launch[0]
    joules = first.energy_j
    energy = "" if joules is None else f" {first.policy} takes {decimals(joules, 'J')(joules)}."
    requested, compulsory = (
        decimal_size(size)(size) for size in (first.l2_requested_bytes, first.compulsory_bytes)
    )
    say(
        "",
        f"Requested {requested} of K/V; compulsory reads {compulsory}.{energy} OPT: the least "
        "that any cache replacement could read in this order. limit: the same rows with all K/V in "
        "L2. gap: (1/density) / speedup over dense. "
        f"Simulated, {setup.model} model, {setup.regime} regime (docs/fidelity.md).",
    )
    separate = [result for result in results if result.head is not None]
    if separate:
        say("", "Each head launched on its own:", "")
        print_table(results_table(separate, baselines))
