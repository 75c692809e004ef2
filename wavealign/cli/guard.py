"""`wavealign guard`: what the guard would do, head by head."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from wavealign.cli import options
from wavealign.cli.failure import Command
from wavealign.cli.output import say, say_json
from wavealign.cli.paths import Input

if TYPE_CHECKING:
    from wavealign.guard.decide import Decision
    from wavealign.guard.model import CostModel

GUARD_ROW_SCHEMA = "wavealign.guard.decision/1"


@click.command(cls=Command)
@options.mask_options
@options.device_option("h200")
@options.kernel_option
@click.option("--profile", type=Input(), help="Guard profile; default: the device's own.")
@options.head_dim_option
@options.dtype_option
@click.option("--regime", default="single", show_default=True,
              help="A single launch, or the steady state.")  # fmt: skip
@click.option("--objective", default="time", show_default=True, help="time or energy.")
@click.option("--uses", type=click.FloatRange(1), default=1.0, show_default=True,
              help="Launches that share a plan.")  # fmt: skip
@options.seed_option
@options.json_option
def guard(objective: str, uses: float, seed: int, as_json: bool, **given: Any) -> None:
    """Would another order pay? The guard's choice for each head, and what it expects to win.

    All heads run as one launch. Times are the guard's estimate, not the simulator's.
    """
    from wavealign.guard import CostModel, Guard

    names = ("device", "kernel", "profile", "head_dim", "dtype", "regime")
    model = CostModel.make(**{name: given[name] for name in names})
    decider = Guard(model, objective)
    loaded, head_ids = options.load_heads(given["mask_path"], given)
    decision = decider.decide_mask(loaded.mask, uses, seed)
    numbered = zip(decision.heads, head_ids, strict=True)
    heads = tuple(dataclasses.replace(head, head=number) for head, number in numbered)
    decision = dataclasses.replace(decision, heads=heads)
    if as_json:
        for row in _rows(decision, loaded.name, model):
            say_json(row)
        return
    say(*decision.explain().split("\n"))
    before = sum(head.original.time_ms for head in decision.heads)
    after = sum(head.chosen.time_ms for head in decision.heads)
    say(
        "",
        f"{loaded.name}: {before:.3g} ms -> {after:.3g} ms + {decision.plan_ms:.2g} ms of "
        f"planning ({0.0 - decision.win_frac:+.1%}). Estimates for {model.setup.device.name}, "
        f"{model.setup.kernel.name}, {given['regime']}; constants {model.profile.source}, "
        f"planning times: {model.profile.plan_source}.",
    )


def _rows(decision: Decision, name: str, model: CostModel) -> list[dict[str, object]]:
    whole = {
        "schema": GUARD_ROW_SCHEMA, "mask": name, "device": model.setup.device.name,
        "kernel": model.setup.kernel.name, "profile_source": model.profile.source,
    }  # fmt: skip
    rows = []
    for head in decision.heads:
        row = {
            **whole, "head": head.head, "policy": head.chosen.policy, "win_frac": head.win_frac,
            "launch_win_frac": decision.win_frac, "launch_plan_ms": decision.plan_ms,
        }  # fmt: skip
        for part in ("chosen", "original", "best", "statistics"):
            row[part] = dataclasses.asdict(getattr(head, part))
        rows.append(row)
    return rows
