"""`wavealign mask make`: run a mask method on Q and K, write a mask file."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from typing import Any

import click

from wavealign.cli import options
from wavealign.cli.failure import Command, Failure
from wavealign.cli.mask_convert import sizes
from wavealign.cli.output import say, say_json
from wavealign.cli.paths import NPZ, Output
from wavealign.cli.qk import choose_grid, open_source, qk_options, text_tokens


@click.command(cls=Command)
@click.option("--method", required=True, metavar="M",
              help="How blocks are chosen (see `wavealign methods`).")  # fmt: skip
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE",
    help="A parameter of the method, repeatable (see `wavealign methods M`).",
)  # fmt: skip
@qk_options
@click.option("--num-heads", type=click.IntRange(1), default=1, show_default=True,
              help="Heads to make without Q and K.")  # fmt: skip
@options.heads_option
@click.option("--out", required=True, type=Output(*NPZ), help="The mask file to write (npz).")
@options.plot_option
@options.seed_option
@options.json_option
@options.quiet_option
def make(
    method: str,
    settings: tuple[str, ...],
    heads: str | None,
    out: str,
    plot: str | None,
    seed: int,
    as_json: bool,
    quiet: bool,
    **qk: Any,
) -> None:
    """Make the mask that a method chooses from queries and keys."""
    from wavealign._extras import require
    from wavealign.methods.registry import find_method
    from wavealign.methods.settings import parse_settings
    from wavealign.qk.grid import find_model

    chosen = find_method(method)
    names = [setting.partition("=")[0].strip() for setting in settings]
    if "model" not in names and any(f.name == "model" for f in dataclasses.fields(chosen.params)):
        settings = (*settings, f"model={find_model(qk['model']).family}")
    params = parse_settings(chosen.params, settings)
    options.check_picture(plot)
    require("torch", "methods", "wavealign mask make")
    from wavealign.masks import mask_stats, save_mask
    from wavealign.methods import make_mask
    from wavealign.report.progress import Progress
    from wavealign.units import parse_heads

    with ExitStack() as stack:
        try:
            source = open_source(qk, stack, needed=chosen.needs_qk, quiet=quiet)
        except KeyboardInterrupt:
            raise Failure("interrupted while Q and K were made; nothing was written.", 1) from None
        grid = choose_grid(qk, source)
        count = source.heads if source is not None else qk["num_heads"]
        head_ids = parse_heads(heads, count) if heads is not None else list(range(count))
        progress = stack.enter_context(Progress(len(head_ids), method, quiet))
        started = time.monotonic()
        try:
            mask = make_mask(
                method, source, params, heads=head_ids, grid=grid, order=qk["order"],
                text_tokens=text_tokens(qk, source), seed=seed, device=qk["device"],
                on_head=lambda head: progress.advance(f"head {head}"),
            )  # fmt: skip
        except KeyboardInterrupt:
            told = f"interrupted after {progress.done} of {len(head_ids)} heads"
            raise Failure(f"{told}; nothing was written.", 1) from None
        seconds = time.monotonic() - started
    save_mask(out, mask)
    if plot is not None:
        from wavealign.report.mask_plot import plot_masks

        title = f"{method}, {mask.tokens_q:,} tokens, density {mask.density:.3f}"
        plot_masks(mask, head_ids, title, plot)
    total, each = mask_stats(mask)
    if as_json:
        row = {
            "schema": "wavealign.mask_made/1", "mask": out, "mask_digest": mask.digest,
            **sizes(mask), "density": total.density, "row_nnz_spread": total.row_nnz_spread,
            "head_density": [stats.density for stats in each],
            "head_row_nnz_spread": [stats.row_nnz_spread for stats in each],
            "seconds": round(seconds, 3), "meta": dict(mask.meta),
        }  # fmt: skip
        say_json(row)
        return
    from wavealign.report.tables import made_table, print_table

    if note := mask.meta.get("note"):
        say(note, "")
    numbered = zip(each, head_ids, strict=True)
    each = [dataclasses.replace(stats, head=head) for stats, head in numbered]
    print_table(made_table([*each, total] if len(each) > 1 else each))
    say(
        "",
        f"{out}: {method}, {mask.H} heads of {mask.M} x {mask.N} blocks of {mask.block_q} x "
        f"{mask.block_kv} tokens, {seconds:.1f} s",
    )
