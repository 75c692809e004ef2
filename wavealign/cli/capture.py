"""`wavealign capture`: run a script of the user's and record Q and K of its video transformer."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import click

from wavealign.cli.failure import Command, Failure
from wavealign.cli.options import json_option
from wavealign.cli.output import say, say_json
from wavealign.cli.paths import Output
from wavealign.errors import InputError


@click.command(
    cls=Command, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("--layers", required=True, metavar="LIST", help="Transformer blocks, e.g. 0,20-22.")
@click.option("--heads", metavar="LIST", help="Heads, e.g. 0,3-7; default: all.")
@click.option("--steps", metavar="LIST", help="Denoising steps from 0, e.g. 10,40; default: all.")
@click.option("--out", required=True, type=Output(folder=True),
              help="An existing folder to write to.")  # fmt: skip
@click.option("--method", metavar="M", help="Write this method's masks instead of Q and K.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Of --method.")
@json_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def capture(
    layers: str,
    heads: str | None,
    steps: str | None,
    out: str,
    method: str | None,
    settings: tuple[str, ...],
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with its ARGUMENTS, record Q and K of the diffusers transformer that it calls.

    One safetensors file a layer and step, for `wavealign mask make --qk`. Extra `diffusers`.
    """
    from wavealign._extras import require

    if not Path(script).is_file():
        raise InputError(f"{script}: no such script.")
    if not Path(out).is_dir():
        raise InputError(f"--out {out}: no such folder.")
    require("torch", "diffusers", "wavealign capture")
    require("diffusers", "diffusers", "wavealign capture")
    from wavealign.integrations.capture import Wanted, capture_first
    from wavealign.methods.registry import find_method
    from wavealign.methods.settings import parse_settings
    from wavealign.outputs import inputs_kept
    from wavealign.units import parse_heads

    many = 1 << 20
    if settings and method is None:
        raise InputError("--set is of --method; give one.")
    params = parse_settings(find_method(method).params, settings) if method is not None else None
    wanted = Wanted(
        parse_heads(layers, many, "layer"),
        parse_heads(heads, many) if heads is not None else None,
        parse_heads(steps, many, "step") if steps is not None else None,
        method, params,
    )  # fmt: skip
    before = sys.argv, sys.path
    sys.argv, sys.path = [script, *arguments], [str(Path(script).parent), *sys.path]
    try:
        with inputs_kept(False), capture_first(out, wanted) as recorded:  # it is the script's own
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise Failure(f"{script} ended with {end.code}.", 1) from end
    finally:
        sys.argv, sys.path = before
    if not recorded.files:
        why = "it called no diffusers transformer at these steps"
        raise Failure(f"{script} ended and nothing was recorded: {why}.", 1)
    for file in recorded.files:
        say_json({"file": str(file)}) if as_json else say(file)
    if recorded.missing:
        step, layer = recorded.missing[0]
        raise Failure(
            f"{script} ended, and {len(recorded.missing)} of what was asked for wasn't recorded, "
            f"first step {step} of layer {layer}: the run had fewer steps, or a cache skipped the "
            "layer.",
            1,
        )
