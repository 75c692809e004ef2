"""`wavealign order`: write the schedule that a policy makes."""

from __future__ import annotations

import json
from typing import Any

import click

from wavealign.cli.options import (
    cores,
    device_options,
    json_option,
    load_heads,
    make_setup,
    mask_options,
    seed_option,
)


@click.command()
@mask_options
@device_options
@click.option("--policy", required=True, metavar="P", help="ROWS[/VISITS].")
@seed_option
@click.option("--out", required=True, metavar="FILE", help="The schedule file to write.")
@click.option("--jobs", type=click.IntRange(1), help="Threads; default: all cores.")
@json_option
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

    setup = make_setup(**device_options)
    recipe = parse_policy(policy)
    loaded, _ = load_heads(mask_path, heads, block, key)
    check_writable(out)
    schedule = build_schedule(loaded.mask, recipe, setup.wave, seed, jobs or cores())
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
