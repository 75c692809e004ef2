"""Options that several commands share, and what they resolve to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from wavealign.masks import LoadedMask
    from wavealign.sim.setup import Setup

Command = TypeVar("Command", bound=Callable[..., Any])


def mask_options(command: Command) -> Command:
    """``--mask``, and which part of the file is meant."""
    for option in (
        click.option("--key", help="The mask inside a file that holds several: KEY/mask, ..."),
        click.option(
            "--block", metavar="QxKV", help="Tokens per query and K/V block, e.g. 128x64."
        ),
        click.option("--heads", metavar="LIST", help="Only these heads, e.g. 0,3-7."),
        click.option(
            "--mask",
            "mask_path",
            metavar="FILE",
            required=True,
            help="Mask file (npz, npy, safetensors, pt).",
        ),
    ):
        command = option(command)
    return command


def reading_options(command: Command) -> Command:
    """How to read a file of another program, for commands that take any."""
    for option in (
        click.option("--seq-len", metavar="QxKV", help="Query and K/V tokens, e.g. 75600."),
        click.option(
            "--format", "form", metavar="F",
            help="Read FILE as native, dense, flex, fa4, vsa, sparge-lut, scipy or flashinfer; "
            "default: by the names of its arrays.",
        ),
        click.option("--heads", metavar="LIST", help="Only these heads, e.g. 0,3-7."),
        click.option(
            "--block", metavar="QxKV", help="Tokens per query and K/V block, e.g. 128x64."
        ),
        click.option("--key", help="The mask inside a file that holds several: KEY/mask, ..."),
    ):  # fmt: skip
        command = option(command)
    return command


def device_options(command: Command) -> Command:
    """The device, its kernel and its L2: what `make_setup` takes."""
    for option in (
        click.option("--dtype", default="bf16", show_default=True, help="Of K and V: bf16, fp16."),
        click.option(
            "--head-dim", type=click.IntRange(1), default=128, show_default=True,
            help="Elements per head.",
        ),
        click.option(
            "--wave", type=click.IntRange(1), metavar="W",
            help="Rows in flight; default: SMs x CTAs per SM of the device.",
        ),
        click.option(
            "--l2", metavar="SIZE",
            help="L2 capacity, all of it usable, e.g. 50MB or 48MiB; default: the device's "
            "effective capacity.",
        ),
        click.option("--kernel", help="Kernel of the device; default: its first."),
        click.option(
            "--device", default="h100", show_default=True,
            help="Device profile (see `wavealign devices`) or path to a TOML of your own.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def model_options(command: Command) -> Command:
    """``--model`` and ``--regime``, for commands that simulate time."""
    for option in (
        click.option(
            "--regime",
            default="single",
            show_default=True,
            help="A single launch, or the steady state: launches back to back for seconds.",
        ),
        click.option(
            "--model",
            default="full",
            show_default=True,
            help="full (L2 partitions, drifting SMs, bandwidth) or fast (one LRU).",
        ),
    ):
        command = option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout.")
seed_option = click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of every random choice.",
)


def make_setup(
    device: str,
    kernel: str | None,
    l2: str | None,
    wave: int | None,
    head_dim: int,
    dtype: str,
    model: str = "full",
    regime: str = "single",
) -> Setup:
    """The `Setup` that these options mean.

    Args:
        l2: a size with its unit; None for the device's own.
        device, kernel, wave, head_dim, dtype, model, regime: see `Setup.make`.

    Raises:
        InputError: see `Setup.make`; an L2 that isn't a size.
    """
    from wavealign.sim.setup import Setup
    from wavealign.units import parse_size

    return Setup.make(
        device,
        kernel,
        l2_bytes=parse_size(l2) if l2 is not None else None,
        wave=wave,
        head_dim=head_dim,
        dtype=dtype,
        model=model,
        regime=regime,
    )


def load_heads(
    path: str,
    heads: str | None,
    block: str | None,
    key: str | None,
    form: str | None = None,
    seq_len: str | None = None,
) -> tuple[LoadedMask, list[int]]:
    """The mask, reduced to the chosen heads, and their indices in the file.

    Args:
        path, key, form: see `load_mask`.
        heads: e.g. ``"0,3-7"``; None for all.
        block, seq_len: e.g. ``"128x64"``; None where the file says it.

    Raises:
        InputError: see `load_mask`; heads or sizes that can't be read.
    """
    from wavealign.masks import load_mask
    from wavealign.units import parse_block, parse_heads

    tokens = parse_block(seq_len) if seq_len else None
    loaded = load_mask(path, parse_block(block) if block else None, key, form, tokens)
    if heads is None:
        return loaded, list(range(loaded.mask.H))
    chosen = parse_heads(heads, loaded.mask.H)
    return dataclasses.replace(loaded, mask=loaded.mask.select_heads(chosen)), chosen


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
