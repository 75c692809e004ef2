"""`wavealign diagnose`: attention entropy and distance by layer, head and step."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wavealign.cli import options
from wavealign.cli.failure import Command, Failure
from wavealign.cli.output import say, say_json
from wavealign.cli.qk import check_device, choose_grid, open_source, qk_options, text_tokens
from wavealign.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from wavealign.methods.context import HeadContext
    from wavealign.qk.trajectory import Place, Trajectory

_MADE_STEPS = 50
_SHOWN = 6


@click.command(cls=Command)
@qk_options
@click.option(
    "--trajectory", "length", type=click.IntRange(2), metavar="N",
    help="Make N steps from the one Q and K that is given, by noise that falls (a stand-in, see "
    "docs/gsrs.md); default: 50 with --clip, else the steps that --qk holds.",
)  # fmt: skip
@click.option(
    "--steps", metavar="LIST",
    help="Only these steps, from 0, e.g. 10,20-29; default: all that --qk holds, six of a made "
    "trajectory.",
)  # fmt: skip
@click.option("--heads", metavar="LIST", help="Only these heads, in the order they are found in.")
@click.option("--rows", type=click.IntRange(1), metavar="N",
              help="So many queries a head, evenly spread; default: all of them.")  # fmt: skip
@click.option(
    "--distance", default="tokens", show_default=True,
    help="tokens (|i - j| in the token order) or grid (Euclidean on the token grid).",
)  # fmt: skip
@click.option("--per-head", is_flag=True, help="A row for each head, not one for each layer.")
@options.plot_option
@options.seed_option
@options.json_option
@options.quiet_option
def diagnose(
    length: int | None,
    steps: str | None,
    heads: str | None,
    rows: int | None,
    distance: str,
    per_head: bool,
    plot: str | None,
    seed: int,
    as_json: bool,
    quiet: bool,
    **qk: Any,
) -> None:
    """Attention entropy and mean attention distance, over steps.

    --qk takes a file of Q and K or a folder of `wavealign capture`; --layers then says which of
    the model's layers (default: all).
    """
    from wavealign._extras import require

    if distance not in ("tokens", "grid"):
        raise InputError(f"--distance {distance}; expected tokens or grid.")
    options.check_picture(plot)
    require("torch", "methods", "wavealign diagnose")
    if qk["clip"] is not None:
        length = length or _MADE_STEPS
    from wavealign.gpu.importance.diagnostics import diagnose_head
    from wavealign.methods.make import place_tokens
    from wavealign.report.progress import Progress

    with ExitStack() as stack:
        try:
            trajectory, context = _open(qk, length, seed, stack, quiet)
        except KeyboardInterrupt:
            raise Failure("interrupted while Q and K were made.", 1) from None
        work = _work(trajectory, steps, heads, _layers(qk), length is not None)
        positions = _positions(distance, context, qk["device"])
        progress = stack.enter_context(Progress(len(work), "diagnose", quiet))
        found, interrupted = [], False
        try:
            for step, place in work:
                told = f"layer {place[0]}, head {place[1]}"
                pair = trajectory.read(step, place)
                q, k = place_tokens(pair, context, qk["device"], f"{told} at step {step}")
                one = diagnose_head(q, k, rows=rows, positions=positions, where=(step, *place))
                found.append(one)
                if as_json:
                    say_json(one.to_row())
                progress.advance(f"step {step}, {told}")
        except KeyboardInterrupt:
            interrupted = True
    if found and not as_json:
        from wavealign.report.tables import diagnosis_table, print_table

        print_table(diagnosis_table(found, per_head))
        unit = "tokens" if distance == "tokens" else "steps of the grid"
        say("", f"entropy in nats, distance in {unit}; uniform attention: 1.000")
    if found and plot is not None:
        from wavealign.report.diagnosis_plot import plot_diagnosis

        title = f"{Path(qk['clip'] or qk['qk_path']).name}, {trajectory.tokens:,} tokens"
        if length is not None:
            title += f", {length} steps made by noise that falls"
        plot_diagnosis(found, title, plot)
    if interrupted:
        raise Failure(f"interrupted after {len(found)} of {len(work)} heads and steps.", 1)


def _layers(qk: dict[str, Any]) -> str | None:
    """Layers of the model that are asked for; those of the ViT are chosen with --clip."""
    source = click.get_current_context().get_parameter_source("layers")
    given = source not in (ParameterSource.DEFAULT, None)
    return qk["layers"] if given and qk["clip"] is None else None


def _open(
    qk: dict[str, Any], length: int | None, seed: int, stack: ExitStack, quiet: bool
) -> tuple[Trajectory, HeadContext]:
    """The trajectory, and how its tokens lie."""
    from wavealign.methods.context import HeadContext
    from wavealign.qk.trajectory import CapturedTrajectory, NoisyTrajectory

    if length is not None:
        if qk["clip"] is None and qk["qk_path"] is not None and Path(qk["qk_path"]).is_dir():
            raise InputError(
                f"--trajectory makes steps from one Q and K; --qk {qk['qk_path']} is a folder."
            )
        source = open_source(qk, stack, needed=True, quiet=quiet)
        assert source is not None
        made = NoisyTrajectory(source, length, seed)
        grid, text = choose_grid(qk, source), text_tokens(qk, source)
        return made, HeadContext.make(made.tokens, grid, qk["order"], text)
    if qk["qk_path"] is None:
        raise InputError("diagnose needs Q and K; give --qk FILE, --qk FOLDER or --clip FILE.")
    if qk["save_qk"] is not None:
        raise InputError("--save-qk keeps the Q and K of --clip; give one.")
    check_device(qk["device"])
    captured = stack.enter_context(CapturedTrajectory.open(qk["qk_path"]))
    grid = choose_grid(qk) or captured.grid
    given = qk["text_tokens"]
    text = captured.text_tokens if given is None and grid is captured.grid else int(given or 0)
    return captured, HeadContext.make(captured.tokens, grid, qk["order"], text)


def _work(
    trajectory: Trajectory, steps: str | None, heads: str | None, layers: str | None, made: bool
) -> list[tuple[int, Place]]:
    from wavealign.qk.trajectory import CapturedTrajectory
    from wavealign.units import format_heads, parse_heads

    there = trajectory.steps
    if steps is not None:
        chosen = parse_heads(steps, 1 << 20, "step")
        if missing := [step for step in chosen if step not in there]:
            known = f"there are {len(there)}, {there[0]} to {there[-1]}"
            raise InputError(f"--steps {steps}: no step {missing[0]}; {known}.")
    elif made and len(there) > _SHOWN:
        chosen = sorted({round(i * there[-1] / (_SHOWN - 1)) for i in range(_SHOWN)})
    else:
        chosen = list(there)
    places = trajectory.places
    if layers is not None:
        wanted = set(parse_heads(layers, 1 << 20, "layer"))
        held = {layer for layer, _ in places}
        if missing := sorted(wanted - held):
            some = f"expected some of {format_heads(sorted(held))}"
            raise InputError(f"--layers {layers}: no layer {missing[0]}; {some}.")
        places = tuple(place for place in places if place[0] in wanted)
    if heads is not None:
        places = tuple(places[i] for i in parse_heads(heads, len(places)))
    work = [(step, place) for step in chosen for place in places]
    if isinstance(trajectory, CapturedTrajectory):
        work = [pair for pair in work if trajectory.holds(*pair)]
        if not work:
            raise InputError("none of these heads was captured at these steps.")
    return work


def _positions(distance: str, context: HeadContext, device: str) -> Tensor | None:
    if distance == "tokens":
        return None
    import torch

    if context.text_tokens:
        raise InputError("--distance grid: text has no place on the grid; use tokens.")
    return torch.from_numpy(context.coordinates("--distance grid")).float().to(device)
