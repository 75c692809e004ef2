"""`wavealign order`: write the schedule that a policy makes, or a search finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from wavealign.cli import options
from wavealign.cli.failure import Command, Failure
from wavealign.cli.output import say, say_json
from wavealign.cli.paths import NPZ, Output

if TYPE_CHECKING:
    from wavealign.sim.local_search import Improved


@click.command(cls=Command)
@options.mask_options
@options.device_options
@options.model_options
@click.option("--policy", required=True, metavar="P",
              help="ROWS[(...)][/VISITS[(...)]]; see `wavealign policies`.")  # fmt: skip
@click.option(
    "--improve", type=click.IntRange(1), metavar="EVALUATIONS",
    help="Search better row orders for the policy's visit order: this many simulations.",
)  # fmt: skip
@click.option(
    "--objective", type=click.Choice(["time", "reads"]),
    help="What --improve makes smaller: simulated time (default), or bytes read from HBM.",
)  # fmt: skip
@options.seed_option
@click.option("--out", required=True, type=Output(*NPZ), help="The schedule file to write.")
@options.jobs_option
@options.json_option
@options.quiet_option
def order(
    policy: str,
    improve: int | None,
    objective: str | None,
    seed: int,
    out: str,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Write the schedule that a policy makes of a mask.

    With --improve, a local search with the simulator in the loop starts from the best of the
    policy and the cheap row orders; it ends early, with the best so far, on Ctrl-C. --model
    and --regime are the simulator's.
    """
    from wavealign.order import build_schedule, parse_policy

    if objective is not None and improve is None:
        raise click.UsageError("--objective needs --improve EVALUATIONS.")
    setup = options.make_setup(given)
    recipe = parse_policy(policy)
    loaded, _ = options.load_heads(given["mask_path"], given)
    threads = jobs or options.cores()
    found: Improved | None = None
    if improve is None:
        schedule = build_schedule(loaded.mask, recipe, setup.wave, seed, threads)
    else:
        from wavealign.report.progress import Progress
        from wavealign.sim import local_search

        setup.capacity_blocks(loaded.mask)
        aim = objective or "time"
        with Progress(improve, "searching", quiet) as bar:
            found = local_search.improve(
                loaded.mask, recipe, setup, improve, objective=aim, seed=seed,
                jobs=threads,
                progress=lambda done, best: bar.advance_to(done, _value(aim, best)),
            )  # fmt: skip
        schedule = found.schedule
    schedule.save(out)
    H, M, N = schedule.shape
    row = {
        "schedule": out, "policy": schedule.policy, "mask": loaded.name,
        "mask_digest": loaded.mask.digest, "shape": [H, M, N], "wave": setup.wave, "seed": seed,
    }  # fmt: skip
    if found is not None:
        row["search"] = {
            "start_policy": found.start_policy, "objective": found.objective,
            "device": setup.device.name, "kernel": setup.kernel.name, "model": setup.model,
            "regime": setup.regime, "start": found.start, "best": found.best,
            "evaluations": found.evaluations, "accepted": found.accepted,
            "interrupted": found.interrupted,
        }  # fmt: skip
    if as_json:
        say_json(row)
    else:
        what = f"{schedule.policy} for {H} heads of {M} x {N} blocks"
        say(f"{out}: {what}, {setup.wave} rows in flight")
        if found is not None:
            start, best = (_value(found.objective, v) for v in (found.start, found.best))
            say(
                f"{found.start_policy}: {start}; improved: {best} "
                f"({_change(found.start, found.best)}), simulated on {setup.device.name}, "
                f"{setup.model} model"
            )
    if found is not None and found.interrupted:
        told = f"interrupted after {found.evaluations} of {improve} evaluations"
        raise Failure(f"{told}; {out} holds the best schedule so far.", 1)


def _value(objective: str, value: float) -> str:
    return f"{value:.3f} ms" if objective == "time" else f"{value / 1e9:.3f} GB"


def _change(start: float, best: float) -> str:
    return f"{100 * (best / start - 1):+.2f} %" if start else "no change"
