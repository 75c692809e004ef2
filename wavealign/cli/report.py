"""`wavealign report`: one page to show a colleague."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from wavealign.cli.failure import Command
from wavealign.cli.options import cores, jobs_option, json_option, quiet_option
from wavealign.cli.output import say, say_json
from wavealign.cli.paths import Input, Output

if TYPE_CHECKING:
    from wavealign.masks import BlockMask
    from wavealign.report.page.gather import Unit
    from wavealign.runs.files import Loaded


@click.command(cls=Command)
@click.argument("sources", nargs=-1, required=True, type=Input(), metavar="DIR_OR_JSONL...")
@click.option("-o", "--out", default="report.html", show_default=True, type=Output(),
              help="The page (replaces FILE).")  # fmt: skip
@click.option(
    "--mask", "mask_paths", multiple=True, type=Input(),
    help="Mask file, or a folder of npz files, for miss-ratio curves; repeatable. A sweep's own "
    "are found by themselves.",
)  # fmt: skip
@click.option("--key", help="Of --mask: the mask inside a file that holds several.")
@click.option("--block", metavar="QxKV", help="Of --mask: tokens per block, e.g. 128x64.")
@click.option("--curves/--no-curves", default=True, show_default=True,
              help="Compute miss-ratio curves of the masks at hand.")  # fmt: skip
@click.option("--title", help="Of the page; default: the name of the first source.")
@jobs_option
@json_option
@quiet_option
def report(
    sources: tuple[str, ...],
    out: str,
    mask_paths: tuple[str, ...],
    key: str | None,
    block: str | None,
    curves: bool,
    title: str | None,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write one self-contained HTML page about runs: a sweep's folder, or files of results.

    The page needs no network and no other file. Its sections are explained in docs/report.md.
    """
    from wavealign._extras import require

    require("jinja2", "report", "wavealign report")
    from wavealign.outputs import check_writable
    from wavealign.report.page import answers
    from wavealign.report.page.curves import curve_sets
    from wavealign.report.page.gather import blocks
    from wavealign.report.page.html import render, write_page
    from wavealign.runs.files import load_rows
    from wavealign.units import parse_block

    loaded = load_rows(sources)
    masks = _masks(loaded, mask_paths, parse_block(block) if block else None, key)
    check_writable(out)  # nor is it a mask that a sweep names
    settings = blocks(loaded)
    drawn = curve_sets(settings, masks, jobs or cores(), quiet) if curves and masks else []
    name = title or f"Row and visit orders: {Path(sources[0]).resolve().stem}"
    size_bytes = write_page(out, render(loaded, masks, drawn, name))
    found = [answers.answer(block) for block in settings]
    if as_json:
        record = {
            "schema": "wavealign.report/1", "out": out, "bytes": size_bytes,
            "rows": len(loaded.rows), "failed": len(loaded.failed),
            "curves": sum(len(part.masks) for part in drawn),
            "answers": [
                {
                    "setting": a.label, "policy": a.policy,
                    "gain": a.gain if a.policy else None, "text": a.text,
                }
                for a in found
            ],
        }  # fmt: skip
        say_json(record)
        return
    for a in found:
        say(f"{a.label}: {a.text}")
    failed = f", {len(loaded.failed)} failed trials" if loaded.failed else ""
    say(f"{out}: {len(loaded.rows)} runs{failed}, {size_bytes / 1e6:.2f} MB")


def _masks(
    loaded: Loaded, mask_paths: tuple[str, ...], block: tuple[int, int] | None, key: str | None
) -> dict[Unit, BlockMask]:
    """The masks that ran, as far as their files are named."""
    from wavealign.report.page.curves import find_masks, paths_of
    from wavealign.report.page.gather import unit_of

    units = dict.fromkeys(unit_of(row.result) for row in loaded.rows)
    given = len(paths_of(mask_paths, {}))
    paths = paths_of(mask_paths, loaded.manifests)
    masks = find_masks(units, paths, given, loaded.notes, block, key)
    if mask_paths and not masks:
        loaded.notes.append("none of the masks given by --mask is one that ran.")
    return masks
