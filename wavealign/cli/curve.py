"""`wavealign curve`: L2 hit ratio at every L2 size."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click

from wavealign.cli.failure import Command
from wavealign.cli.options import (
    cores,
    device_options,
    json_option,
    load_heads,
    make_setup,
    mask_options,
    seed_option,
)

if TYPE_CHECKING:
    from wavealign.sim.curve import Curve

CURVE_SCHEMA = "wavealign.curve/1"
CURVE_POLICIES = ("original", "svd+nnz", "nnz", "lockstep")

_CAVEAT = (
    "One LRU over whole K/V blocks, a constant time per block. Near the size of a card's own L2 "
    "`wavealign sim` may answer otherwise: the full model has two L2 partitions."
)


@click.command(cls=Command)
@mask_options
@device_options
@click.option(
    "--policy", "policies", multiple=True, metavar="P",
    help=f"ROWS[/VISITS], repeatable; default: {', '.join(CURVE_POLICIES)}.",
)  # fmt: skip
@click.option(
    "--schedule", "schedule_paths", multiple=True, metavar="S.npz",
    help="Also a curve of this schedule file, repeatable.",
)  # fmt: skip
@click.option(
    "--sizes", metavar="LIST",
    help="L2 sizes, e.g. 8MiB,16MiB; default: from 1 MiB to beyond the K/V of a head. The "
    "device's own (or --l2) is always among them.",
)  # fmt: skip
@seed_option
@json_option
@click.option("--out", metavar="FILE", help="Write the rows as JSON lines (replaces FILE).")
@click.option("--plot", metavar="FILE", help="Write a picture (png, svg, pdf; extra `report`).")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def curve(
    mask_path: str,
    heads: str | None,
    block: str | None,
    key: str | None,
    policies: tuple[str, ...],
    schedule_paths: tuple[str, ...],
    sizes: str | None,
    seed: int,
    as_json: bool,
    out: str | None,
    plot: str | None,
    quiet: bool,
    **device_options: Any,
) -> None:
    """L2 hit ratio of policies at every L2 size, from one pass each."""
    from wavealign._version import __version__
    from wavealign.npz import check_writable, whole_file
    from wavealign.order import Schedule, build_schedule, parse_policy
    from wavealign.report.progress import Progress
    from wavealign.sim.curve import curve_sizes, hit_curve
    from wavealign.units import format_heads, parse_size

    setup = make_setup(**device_options, model="fast")
    names = list(policies or CURVE_POLICIES)
    for name in names:
        parse_policy(name)
    wanted = [parse_size(text) for text in sizes.split(",")] if sizes is not None else []
    loaded, head_ids = load_heads(mask_path, heads, block, key)
    mask = loaded.mask
    setup.capacity_blocks(mask)
    sizes_bytes = sorted({*wanted, setup.l2_capacity_bytes}) if wanted else curve_sizes(mask, setup)
    chosen = None if heads is None else head_ids
    recipes: list[str | Schedule] = [
        *names,
        *(Schedule.fitting(path, mask, chosen) for path in schedule_paths),
    ]
    if out:
        check_writable(out)
    if plot:
        from wavealign.report.plots import check_plot

        check_plot(plot)

    terms = {
        "mask": loaded.name, "mask_digest": mask.digest, "heads": format_heads(head_ids),
        "device": setup.device.name, "kernel": setup.kernel.name, "seed": seed,
        "wave": setup.wave,
    }  # fmt: skip
    curves: list[Curve] = []
    lines: list[str] = []

    def one_curve(recipe: str | Schedule) -> Curve:
        schedule = (
            build_schedule(mask, recipe, setup.wave, seed, cores())
            if isinstance(recipe, str)
            else recipe
        )
        return hit_curve(mask, schedule, setup, sizes_bytes)

    # In a thread of its own: Ctrl-C inside a numba kernel can crash the interpreter.
    with Progress(len(recipes), "replaying", quiet) as progress, ThreadPoolExecutor(1) as thread:
        for recipe in recipes:
            curves.append(thread.submit(one_curve, recipe).result())
            lines.extend(_json_lines(curves[-1], terms, __version__))
            progress.advance(curves[-1].policy)
    if out:
        with whole_file(out) as stream:
            stream.write("".join(line + "\n" for line in lines).encode())
    if as_json:
        click.echo("\n".join(lines))
    else:
        from wavealign.report.tables import curves_table, launch_lines, print_table

        for line in launch_lines(mask, loaded.name, format_heads(head_ids), setup):
            click.echo(line)
        click.echo("\nL2 hit ratio (%) at every L2 size; * is the one above.\n")
        print_table(curves_table(curves, setup.l2_capacity_bytes))
        click.echo(f"\n{_CAVEAT}")
    if plot:
        from wavealign.report.curve_plot import plot_curves

        title = f"{loaded.name} at any L2 size, rows in flight as on {setup.device.name}"
        plot_curves(curves, setup.l2_capacity_bytes, title, plot)


def _json_lines(curve: Curve, terms: dict[str, Any], version: str) -> list[str]:
    """One line a size; the hit ratio is null where nothing was requested."""
    return [
        json.dumps(
            {
                "schema": CURVE_SCHEMA,
                "policy": curve.policy,
                **terms,
                "l2_bytes": int(curve.sizes_bytes[i]),
                "l2_hit_frac": float(curve.hit_frac[i]) if curve.requested_bytes else None,
                "hbm_read_bytes": int(curve.hbm_read_bytes[i]),
                "version": version,
            },
            allow_nan=False,
        )
        for i in range(len(curve.sizes_bytes))
    ]
