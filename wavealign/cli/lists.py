"""`wavealign policies` and `wavealign devices`: what there is."""

from __future__ import annotations

import dataclasses
import json

import click

from wavealign.cli.options import json_option


@click.command()
@json_option
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


@click.command()
@json_option
def devices(as_json: bool) -> None:
    """Device profiles, and where their figures come from (--json)."""
    from wavealign.sim.devices import device_names, load_device

    profiles = [load_device(name) for name in device_names()]
    if as_json:
        for profile in profiles:
            row = dataclasses.asdict(profile)
            for kernel in row["kernels"].values():
                kernel["block_cycles"] = [
                    {"block_q": q, "block_kv": kv, "cycles": cycles}
                    for (q, kv), cycles in kernel["block_cycles"].items()
                ]
            click.echo(json.dumps(row))
        return
    from wavealign.report.tables import devices_table, print_table

    print_table(devices_table(profiles))
