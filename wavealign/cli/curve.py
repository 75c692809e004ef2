"""`wavealign curve`: L2 hit ratio at every L2 size."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click

from wavealign._version import __version__
from wavealign.cli import options
from wavealign.cli.failure import Command
from wavealign.cli.output import say, say_json
from wavealign.cli.paths import Input

if TYPE_CHECKING:
    from wavealign.sim.curve import Curve

CURVE_SCHEMA = "wavealign.curve/1"
CURVE_POLICIES = ("original", "svd+nnz", "nnz", "lockstep")

_CAVEAT = (
    "One LRU over whole K/V blocks, a constant time per block. Near the size of a card's own L2 "
    "`wavealign sim` may answer otherwise: the full model has two L2 partitions."
)


@click.command(cls=Command)
@options.mask_options
@options.device_options
@click.option("--policy", "policies", multiple=True, metavar="P",
              help=f"ROWS[/VISITS], repeatable; default: {', '.join(CURVE_POLICIES)}.")  # fmt: skip
@click.option("--schedule", "schedule_paths", multiple=True, type=Input(), metavar="S.npz",
              help="Also a curve of this schedule file, repeatable.")  # fmt: skip
@click.option(
    "--sizes", metavar="LIST",
    help="L2 sizes, e.g. 8MiB,16MiB; default: from 1 MiB to beyond the K/V of a head. The "
    "device's own (or --l2) is always among them.",
)  # fmt: skip
@options.seed_option
@options.json_option
@options.rows_option
@options.plot_option
@options.quiet_option
def curve(
    policies: tuple[str, ...],
    sizes: str | None,
    seed: int,
    as_json: bool,
    out: str | None,
    plot: str | None,
    quiet: bool,
    **given: Any,
) -> None:
    """L2 hit ratio of policies at every L2 size, from one pass each."""
    from wavealign.order import Schedule, build_schedule, parse_policy
    from wavealign.outputs import whole_file
    from wavealign.report.progress import Progress
    from wavealign.sim.curve import curve_sizes, hit_curve
    from wavealign.structures import json_text
    from wavealign.units import format_heads, parse_size

    setup = options.make_setup(given, model="fast")
    names = list(policies or CURVE_POLICIES)
    for name in names:
        parse_policy(name)
    wanted = [parse_size(text) for text in sizes.split(",")] if sizes is not None else []
    loaded, head_ids = options.load_heads(given["mask_path"], given)
    mask = loaded.mask
    setup.capacity_blocks(mask)
    sizes_bytes = sorted({*wanted, setup.l2_capacity_bytes}) if wanted else curve_sizes(mask, setup)
    recipes: list[str | Schedule] = [*names, *options.fitting_schedules(given, mask, head_ids)]
    options.check_picture(plot)

    of_heads = format_heads(head_ids)
    terms = {
        "mask": loaded.name, "mask_digest": mask.digest, "heads": of_heads,
        "device": setup.device.name, "kernel": setup.kernel.name, "seed": seed,
        "wave": setup.wave,
    }  # fmt: skip
    curves: list[Curve] = []
    rows: list[dict[str, Any]] = []

    def one_curve(recipe: str | Schedule) -> Curve:
        if isinstance(recipe, str):
            recipe = build_schedule(mask, recipe, setup.wave, seed, options.cores())
        return hit_curve(mask, recipe, setup, sizes_bytes)

    # In a thread of its own: Ctrl-C inside a numba kernel can crash the interpreter.
    with Progress(len(recipes), "replaying", quiet) as progress, ThreadPoolExecutor(1) as thread:
        for recipe in recipes:
            curves.append(thread.submit(one_curve, recipe).result())
            rows.extend(_rows(curves[-1], terms))
            progress.advance(curves[-1].policy)
    if out is not None:
        with whole_file(out) as stream:
            stream.writelines(f"{json_text(row)}\n".encode() for row in rows)
    if as_json:
        for row in rows:
            say_json(row)
    else:
        from wavealign.report.tables import curves_table, launch_lines, print_table

        say(*launch_lines(mask, loaded.name, of_heads, setup), "")
        say("L2 hit ratio (%) at every L2 size; * is the one above.", "")
        print_table(curves_table(curves, setup.l2_capacity_bytes))
        say("", _CAVEAT)
    if plot is not None:
        from wavealign.report.curve_plot import plot_curves

        title = f"{loaded.name} at any L2 size, rows in flight as on {setup.device.name}"
        plot_curves(curves, setup.l2_capacity_bytes, title, plot)


def _rows(curve: Curve, terms: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row a size; the hit ratio is null where nothing was requested."""
    columns = (curve.sizes_bytes, curve.hit_frac, curve.hbm_read_bytes)
    for size_bytes, hit_frac, read_bytes in zip(*columns, strict=True):
        yield {
            "schema": CURVE_SCHEMA, "policy": curve.policy, **terms, "l2_bytes": int(size_bytes),
            "l2_hit_frac": float(hit_frac) if curve.requested_bytes else None,
            "hbm_read_bytes": int(read_bytes), "version": __version__,
        }  # fmt: skip
