"""`wavealign policies`, `wavealign methods` and `wavealign devices`: what there is."""

from __future__ import annotations

import dataclasses

import click

from wavealign.cli.failure import Command
from wavealign.cli.options import json_option
from wavealign.cli.output import say, say_json


@click.command(cls=Command)
@json_option
def policies(as_json: bool) -> None:
    """Row orders, visit orders and aliases, with formula, parameters, cost and source."""
    from wavealign.order.policies import registry

    if as_json:
        for entry in registry():
            say_json(dataclasses.asdict(entry))
        return
    from wavealign.report.tables import policies_table, policy_parameters_table, print_table

    say("A policy is ROWS[/VISITS], e.g. svd+nnz or nnz/shuffled+sawtooth.", "")
    print_table(policies_table(registry()))
    say(
        "",
        "Parameters stand in parentheses behind ROWS or VISITS (quote them in a shell): "
        "'svd+nnz(rank=4,wave=132)', 'nnz-dealt(span=0.06)/shuffled+phased(seed=3)'. Those of an "
        "alias go to its parts.",
        "",
    )
    print_table(policy_parameters_table(registry()))


@click.command(cls=Command)
@click.argument("name", required=False)
@json_option
def methods(name: str | None, as_json: bool) -> None:
    """Methods that make masks; with NAME, its parameters and their defaults."""
    import inspect

    from wavealign.methods.registry import METHODS, find_method

    chosen = [find_method(name)] if name is not None else list(METHODS.values())
    if as_json:
        for method in chosen:
            row = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
            row["params"] = dataclasses.asdict(method.params())
            del row["function"]
            say_json(row)
        return
    if name is not None:
        (method,) = chosen
        say(f"{method.name}: {method.formula}", f"source: {method.source}", "")
        say(*inspect.cleandoc(method.params.__doc__ or "").splitlines())
        say("", "Defaults:")
        for name, value in dataclasses.asdict(method.params()).items():
            text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
            say(f"  --set {name}={text.lower() if value in (True, False) else text}")
        return
    from wavealign.report.tables import methods_table, print_table

    print_table(methods_table(chosen))
    say("", "Parameters: `wavealign methods NAME`.")


@click.command(cls=Command)
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
            say_json(row)
        return
    from wavealign.report.tables import devices_table, print_table

    print_table(devices_table(profiles))
