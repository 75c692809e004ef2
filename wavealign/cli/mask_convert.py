"""`wavealign mask convert`: from any form that can be read to one that others read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from wavealign.cli import options
from wavealign.cli.failure import Command
from wavealign.cli.output import say, say_json

if TYPE_CHECKING:
    from wavealign.masks import BlockMask, LoadedMask


@click.command(cls=Command)
@click.argument("file")
@click.argument("out")
@click.option(
    "--to", "target", default="packed", show_default=True,
    help="packed or csr (native), flex (FlexAttention BlockMask fields), fa4 (block counts and "
    "lists) or scipy (csr, one head).",
)  # fmt: skip
@options.reading_options
@options.json_option
def convert(file: str, out: str, target: str, as_json: bool, **given: Any) -> None:
    """Read the mask in FILE, whatever its form, and write it to OUT (npz, safetensors)."""
    from wavealign.masks.export import check_target, export_mask

    check_target(out, target)
    loaded, chosen = options.load_heads(file, given)
    mask = loaded.mask
    made_of = mask.meta.get("heads")  # which heads of Q and K, by head of the file
    if given["heads"] is not None and isinstance(made_of, list) and max(chosen) < len(made_of):
        kept = {**mask.meta, "heads": [made_of[head] for head in chosen]}
        mask = dataclasses.replace(mask, meta=kept)
    export_mask(out, mask, target)
    if as_json:
        row = {"schema": "wavealign.mask_converted/1", "mask": out, "form": target}
        say_json({**row, **described(loaded)})
        return
    say(f"{file}, read as", *(f"  {note}" for note in loaded.understood_as))
    say(f"{out}: {target}, digest {mask.digest}")


def described(loaded: LoadedMask) -> dict[str, Any]:
    """How a file was understood, for rows about its mask."""
    read_as = list(loaded.understood_as)
    return {"mask_digest": loaded.mask.digest, "understood_as": read_as, **sizes(loaded.mask)}


def sizes(mask: BlockMask) -> dict[str, Any]:
    """Blocks and tokens, as rows about masks say them."""
    return {
        "shape": list(mask.shape), "block_size": [mask.block_q, mask.block_kv],
        "seq_len": [mask.tokens_q, mask.tokens_kv],
    }  # fmt: skip
