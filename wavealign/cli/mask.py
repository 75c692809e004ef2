"""`wavealign mask`: make mask files, look at them, convert them."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from wavealign.cli import options
from wavealign.cli.failure import Command
from wavealign.cli.mask_convert import convert, described
from wavealign.cli.mask_make import make
from wavealign.cli.output import say, say_json
from wavealign.cli.paths import Input


@click.group()
def mask() -> None:
    """Make mask files, look at them, convert them."""


mask.add_command(make)
mask.add_command(convert)


@mask.command(cls=Command)
@click.argument("file")
@options.reading_options
@click.option("--per-head", is_flag=True, help="A row for every head.")
@click.option(
    "--qk", "qk_path", type=Input(),
    help="Q and K that the mask was made for: adds recall, the attention mass that it keeps.",
)  # fmt: skip
@click.option(
    "--compute", default="cpu", show_default=True, help="Where to compute recall: cpu or cuda."
)
@options.quiet_option
@options.device_options
@options.json_option
def info(
    file: str,
    per_head: bool,
    qk_path: str | None,
    compute: str,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """How FILE was understood, and what its mask looks like to the cache."""
    from wavealign.masks import mask_stats
    from wavealign.report.tables import print_table, stats_table

    setup = options.make_setup(given)
    loaded, head_ids = options.load_heads(file, given)
    mask = loaded.mask
    total, each = mask_stats(mask)
    each = [dataclasses.replace(s, head=head_ids[s.head or 0]) for s in each]
    rows = [total, *each] if per_head else [total]
    block_bytes = setup.kv_bytes(mask.block_kv)
    recalls: list[float] | None = None
    if qk_path is not None:
        from wavealign.cli.recall import recall_of

        found = recall_of(mask, qk_path, head_ids, compute, quiet)
        recalls = [sum(found) / len(found), *(found if per_head else [])]
    if as_json:
        for index, stats in enumerate(rows):
            row = {
                "schema": "wavealign.mask_info/1", "mask": loaded.name,
                **described(loaded), **dataclasses.asdict(stats),
                "working_set_bytes": stats.working_set_bytes(block_bytes),
                "l2_capacity_bytes": setup.l2_capacity_bytes,
                **({"recall_frac": recalls[index]} if recalls is not None else {}),
                "meta": dict(mask.meta),
            }  # fmt: skip
            say_json(row)
        return
    notes = [*loaded.understood_as, *(f"meta {name}: {value}" for name, value in mask.meta.items())]
    notes.append(f"digest: {mask.digest}")
    say(f"{file}, read as", *(f"  {note}" for note in notes), "")
    print_table(stats_table(rows, setup, mask.block_kv, recalls))
    say(
        "",
        f"L2: {setup.l2_capacity_bytes:,} bytes ({setup.l2_origin}). Spread: standard deviation "
        "/ mean of a row's NNZ. Overlap: Jaccard, of adjacent rows. K/V set: distinct K/V blocks "
        "that a head reads (largest head)."
        + (" Recall: attention mass that the mask keeps, mean over queries." if recalls else ""),
    )
    if total.empty_heads:
        say(f"{total.empty_heads} of {mask.H} heads keep no block at all.")
