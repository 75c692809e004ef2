"""`wavealign guard`: what the guard would do, head by head."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from wavealign.cli.failure import Command
from wavealign.cli.options import json_option, load_heads, mask_options, seed_option

if TYPE_CHECKING:
    from wavealign.guard.decide import Decision
    from wavealign.guard.model import CostModel

GUARD_ROW_SCHEMA = "wavealign.guard.decision/1"


@click.command(cls=Command)
@mask_options
@click.option(
    "--device", default="h200", show_default=True,
    help="Device profile (see `wavealign devices`) or path to a TOML of your own.",
)  # fmt: skip
@click.option("--kernel", help="Kernel of the device; default: its first.")
@click.option("--profile", metavar="FILE", help="Guard profile; default: the device's own.")
@click.option(
    "--head-dim", type=click.IntRange(1), default=128, show_default=True, help="Elements per head."
)
@click.option("--dtype", default="bf16", show_default=True, help="Of K and V: bf16, fp16.")
@click.option(
    "--regime", default="single", show_default=True, help="A single launch, or the steady state."
)
@click.option("--objective", default="time", show_default=True, help="time or energy.")
@click.option(
    "--uses", type=click.FloatRange(1), default=1.0, show_default=True,
    help="Launches that share a plan.",
)  # fmt: skip
@seed_option
@json_option
def guard(
    mask_path: str,
    heads: str | None,
    block: str | None,
    key: str | None,
    device: str,
    kernel: str | None,
    profile: str | None,
    head_dim: int,
    dtype: str,
    regime: str,
    objective: str,
    uses: float,
    seed: int,
    as_json: bool,
) -> None:
    """Would another order pay? The guard's choice for each head, and what it expects to win.

    All heads run as one launch. Times are the guard's estimate, not the simulator's.
    """
    from wavealign.guard import CostModel, Guard

    model = CostModel.make(
        device, kernel, profile=profile, head_dim=head_dim, dtype=dtype, regime=regime
    )
    decider = Guard(model, objective)
    loaded, head_ids = load_heads(mask_path, heads, block, key)
    decision = decider.decide_mask(loaded.mask, uses, seed)
    decision = dataclasses.replace(
        decision,
        heads=tuple(
            dataclasses.replace(head, head=h)
            for head, h in zip(decision.heads, head_ids, strict=True)
        ),
    )
    if as_json:
        for row in _rows(decision, loaded.name, model):
            click.echo(json.dumps(row))
        return
    click.echo(decision.explain())
    before = sum(head.original.time_ms for head in decision.heads)
    after = sum(head.chosen.time_ms for head in decision.heads)
    click.echo(
        f"\n{loaded.name}: {before:.3g} ms -> {after:.3g} ms + {decision.plan_ms:.2g} ms of "
        f"planning ({0.0 - decision.win_frac:+.1%}). Estimates for {model.setup.device.name}, "
        f"{model.setup.kernel.name}, {regime}; constants {model.profile.source}, planning times: "
        f"{model.profile.plan_source}."
    )


def _rows(decision: Decision, name: str, model: CostModel) -> list[dict[str, object]]:
    return [
        {
            "schema": GUARD_ROW_SCHEMA,
            "mask": name,
            "device": model.setup.device.name,
            "kernel": model.setup.kernel.name,
            "profile_source": model.profile.source,
            "head": head.head,
            "policy": head.chosen.policy,
            "win_frac": head.win_frac,
            "launch_win_frac": decision.win_frac,
            "launch_plan_ms": decision.plan_ms,
            "chosen": dataclasses.asdict(head.chosen),
            "original": dataclasses.asdict(head.original),
            "best": dataclasses.asdict(head.best),
            "statistics": dataclasses.asdict(head.statistics),
        }
        for head in decision.heads
    ]
