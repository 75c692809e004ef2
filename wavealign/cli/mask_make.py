"""`wavealign mask make`: run a mask method on Q and K, write a mask file."""

from __future__ import annotations

import dataclasses
import json
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from wavealign.cli.failure import Command, Failure
from wavealign.cli.options import json_option, seed_option
from wavealign.cli.qk import choose_grid, open_source, qk_options, text_tokens

if TYPE_CHECKING:
    from wavealign.masks import BlockMask


@click.command(cls=Command)
@click.option(
    "--method", required=True, metavar="M",
    help="How blocks are chosen (see `wavealign methods`).",
)  # fmt: skip
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE",
    help="A parameter of the method, repeatable (see `wavealign methods M`).",
)  # fmt: skip
@qk_options
@click.option(
    "--num-heads", type=click.IntRange(1), default=1, show_default=True,
    help="Heads to make without Q and K.",
)  # fmt: skip
@click.option("--heads", metavar="LIST", help="Only these heads, e.g. 0,3-7.")
@click.option("--out", required=True, metavar="FILE", help="The mask file to write (npz).")
@click.option("--plot", metavar="FILE", help="Write a picture (png, svg, pdf; extra `report`).")
@seed_option
@json_option
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
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
    from wavealign.npz import check_writable

    chosen = find_method(method)
    params = parse_settings(chosen.params, settings)
    check_writable(out)
    if plot is not None:
        from wavealign.report.plots import check_plot

        check_plot(plot)
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
        done: list[int] = []

        def on_head(head: int) -> None:
            done.append(head)
            progress.advance(f"head {head}")

        started = time.monotonic()
        try:
            mask = make_mask(
                method, source, params, heads=head_ids, grid=grid, order=qk["order"],
                text_tokens=text_tokens(qk, source), seed=seed, device=qk["device"],
                on_head=on_head,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise Failure(
                f"interrupted after {len(done)} of {len(head_ids)} heads; nothing was written.", 1
            ) from None
        seconds = time.monotonic() - started
    save_mask(out, mask)
    if plot is not None:
        from wavealign.report.mask_plot import plot_masks

        plot_masks(mask, head_ids, _title(method, mask), plot)
    total, each = mask_stats(mask)
    if as_json:
        row = {
            "schema": "wavealign.mask_made/1", "mask": out, "mask_digest": mask.digest,
            "shape": list(mask.shape), "block_size": [mask.block_q, mask.block_kv],
            "seq_len": [mask.tokens_q, mask.tokens_kv], "density": total.density,
            "row_nnz_spread": total.row_nnz_spread,
            "head_density": [stats.density for stats in each],
            "head_row_nnz_spread": [stats.row_nnz_spread for stats in each],
            "seconds": round(seconds, 3), "meta": dict(mask.meta),
        }  # fmt: skip
        click.echo(json.dumps(row))
        return
    from wavealign.report.tables import made_table, print_table

    note = mask.meta.get("note")
    if note:
        click.echo(f"{note}\n")
    each = [
        dataclasses.replace(stats, head=head) for stats, head in zip(each, head_ids, strict=True)
    ]
    print_table(made_table([*each, total] if len(each) > 1 else each))
    click.echo(
        f"\n{out}: {method}, {mask.H} heads of {mask.M} x {mask.N} blocks of {mask.block_q} x "
        f"{mask.block_kv} tokens, {seconds:.1f} s"
    )


def _title(method: str, mask: BlockMask) -> str:
    return f"{method}, {mask.tokens_q:,} tokens, density {mask.density:.3f}"
