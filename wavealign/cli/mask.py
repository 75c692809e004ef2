"""`wavealign mask`: make mask files, look at them, convert them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from wavealign.cli.failure import Command
from wavealign.cli.mask_convert import convert
from wavealign.cli.mask_make import make
from wavealign.cli.options import (
    device_options,
    json_option,
    load_heads,
    make_setup,
    reading_options,
)


@click.group()
def mask() -> None:
    """Make mask files, look at them, convert them."""


mask.add_command(make)
mask.add_command(convert)


@mask.command(cls=Command)
@click.argument("file")
@reading_options
@click.option("--per-head", is_flag=True, help="A row for every head.")
@click.option(
    "--qk", "qk_path", metavar="FILE",
    help="Q and K that the mask was made for: adds recall, the attention mass that it keeps.",
)  # fmt: skip
@click.option(
    "--compute", default="cpu", show_default=True, help="Where to compute recall: cpu or cuda."
)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@device_options
@json_option
def info(
    file: str,
    key: str | None,
    block: str | None,
    heads: str | None,
    form: str | None,
    seq_len: str | None,
    per_head: bool,
    qk_path: str | None,
    compute: str,
    quiet: bool,
    as_json: bool,
    **device_options: Any,
) -> None:
    """How FILE was understood, and what its mask looks like to the cache."""
    from wavealign.masks import mask_stats
    from wavealign.report.tables import print_table, stats_table

    setup = make_setup(**device_options)
    loaded, head_ids = load_heads(file, heads, block, key, form, seq_len)
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
            click.echo(
                json.dumps({
                    "schema": "wavealign.mask_info/1",
                    "mask": loaded.name,
                    "mask_digest": mask.digest,
                    "understood_as": list(loaded.understood_as),
                    "shape": list(mask.shape),
                    "block_size": [mask.block_q, mask.block_kv],
                    "seq_len": [mask.tokens_q, mask.tokens_kv],
                    **dataclasses.asdict(stats),
                    "working_set_bytes": stats.working_set_bytes(block_bytes),
                    "l2_capacity_bytes": setup.l2_capacity_bytes,
                    **({"recall_frac": recalls[index]} if recalls is not None else {}),
                    "meta": dict(mask.meta),
                })
            )  # fmt: skip
        return
    click.echo(f"{file}, read as")
    for note in loaded.understood_as:
        click.echo(f"  {note}")
    for name, value in mask.meta.items():
        click.echo(f"  meta {name}: {value}")
    click.echo(f"  digest: {mask.digest}\n")
    print_table(stats_table(rows, setup, mask.block_kv, recalls))
    click.echo(
        f"\nL2: {setup.l2_capacity_bytes:,} bytes ({setup.l2_origin}). Spread: standard deviation "
        "/ mean of a row's NNZ. Overlap: Jaccard, of adjacent rows. K/V set: distinct K/V blocks "
        "that a head reads (largest head)."
        + (" Recall: attention mass that the mask keeps, mean over queries." if recalls else "")
    )
    if total.empty_heads:
        click.echo(f"{total.empty_heads} of {mask.H} heads keep no block at all.")
