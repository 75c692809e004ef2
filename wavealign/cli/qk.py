"""Options that say where Q and K come from and how their tokens lie, for several commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wavealign.errors import InputError, MissingCapabilityError

if TYPE_CHECKING:
    from wavealign.methods.sources import QKSource
    from wavealign.video import TokenGrid

Command = TypeVar("Command", bound=Callable[..., Any])


def qk_options(command: Command) -> Command:
    """Where Q and K come from, and how their tokens lie in the video."""
    for option in (
        click.option(
            "--device", default="cpu", show_default=True, help="Where to compute: cpu or cuda."
        ),
        click.option(
            "--num-heads", type=click.IntRange(1), default=1, show_default=True,
            help="Heads to make without Q and K.",
        ),
        click.option(
            "--text-tokens", type=click.IntRange(0), default=0, show_default=True,
            help="Tokens of text behind the video.",
        ),
        click.option(
            "--order", default="raster", show_default=True,
            help="Token order to put Q and K into first: raster, hilbert or tiles.",
        ),
        click.option(
            "--size", metavar="FxHxW", help="Instead of --grid: frames and pixels of the clip."
        ),
        click.option(
            "--model", default="wan2.1", show_default=True,
            help="Of --size: wan2.1, wan2.1-1.3b, hunyuan or ltx2.",
        ),
        click.option(
            "--grid", "grid_text", metavar="TxHxW",
            help="The video's tokens: frames, height, width, e.g. 21x45x80.",
        ),
        click.option(
            "--qk", "qk_path", metavar="FILE",
            help="Q and K: arrays q and k, [heads, tokens, head_dim] (safetensors, npz).",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


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
    """The source of Q and K that the options name, closed with the stack."""
    from wavealign.methods.sources import FileSource

    check_device(options["device"])
    if options["qk_path"] is not None:
        return stack.enter_context(FileSource(options["qk_path"]))
    if needed:
        raise InputError("this method looks at Q and K; give them with --qk FILE.")
    return None


def choose_grid(options: Mapping[str, Any], source: QKSource | None) -> TokenGrid | None:
    """The token grid that the options name, if any."""
    from wavealign.video import TokenGrid, find_model

    model = find_model(options["model"])
    if options["size"] is not None:
        if options["grid_text"] is not None:
            raise InputError("--grid and --size both say how the tokens lie; give one of them.")
        try:
            size = TokenGrid.parse(options["size"])
        except InputError as problem:
            raise InputError(
                f"--size {options['size']}: expected frames, height and width in pixels, e.g. "
                "81x720x1280."
            ) from problem
        return model.grid(*size.shape)
    if options["grid_text"] is not None:
        return TokenGrid.parse(options["grid_text"])
    return None
