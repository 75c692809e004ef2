"""Options that several commands share, and what they resolve to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wavealign.cli.paths import Input, Output

if TYPE_CHECKING:
    from wavealign.masks import BlockMask, LoadedMask
    from wavealign.order import Schedule
    from wavealign.sim.setup import Setup

Command = TypeVar("Command", bound=Callable[..., Any])

MOST_SEED = 2**63 - 1  # what tables have a place for


def group(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Options as one decorator, in the order that ``--help`` lists them."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


# fmt: off
json_option = click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout.")
seed_option = click.option("--seed", type=click.IntRange(0, MOST_SEED), default=0,
                           show_default=True, help="Seed of every random choice.")
quiet_option = click.option("--quiet", is_flag=True, help="No progress on stderr.")
jobs_option = click.option("--jobs", type=click.IntRange(1), help="Threads; default: all cores.")
rows_option = click.option("--out", type=Output(),
                           help="Write the rows as JSON lines (replaces FILE).")
plot_option = click.option("--plot", type=Output(),
                           help="Write a picture (png, svg, pdf; extra `report`).")
heads_option = click.option("--heads", metavar="LIST", help="Only these heads, e.g. 0,3-7.")
_block = click.option("--block", metavar="QxKV",
                      help="Tokens per query and K/V block, e.g. 128x64.")
_key = click.option("--key", help="The mask inside a file that holds several: KEY/mask, ...")
kernel_option = click.option("--kernel", help="Kernel of the device; default: its first.")
head_dim_option = click.option("--head-dim", type=click.IntRange(1), default=128,
                               show_default=True, help="Elements per head.")
dtype_option = click.option("--dtype", default="bf16", show_default=True,
                            help="Of K and V: bf16, fp16.")


def device_option(default: str) -> Callable[[Command], Command]:
    """``--device``, a profile."""
    return click.option(
        "--device", default=default, show_default=True, type=Input(), metavar="TEXT",
        help="Device profile (see `wavealign devices`) or path to a TOML of your own.",
    )


# How to read a file of another program, and which part of it is meant: what `load_heads` takes.
reading_options = group(
    _key, _block, heads_option,
    click.option("--format", "form", metavar="F",
                 help="Read FILE as native, dense, flex, fa4, vsa, sparge-lut, scipy or "
                 "flashinfer; default: by the names of its arrays."),
    click.option("--seq-len", metavar="QxKV", help="Query and K/V tokens, e.g. 75600."),
)
# A mask file, for commands that have it as an option.
mask_options = group(
    click.option("--mask", "mask_path", type=Input(), required=True,
                 help="Mask file (npz, npy, safetensors, pt)."),
    reading_options,
)
# The device, its kernel and its L2: what `make_setup` takes.
device_options = group(
    device_option("h100"), kernel_option,
    click.option("--l2", metavar="SIZE",
                 help="L2 capacity, all of it usable, e.g. 50MB or 48MiB; default: the device's "
                 "effective capacity."),
    click.option("--wave", type=click.IntRange(1), metavar="W",
                 help="Rows in flight; default: SMs x CTAs per SM of the device."),
    head_dim_option, dtype_option,
)
# Of the simulator, for commands that simulate time.
model_options = group(
    click.option("--model", default="full", show_default=True,
                 help="full (L2 partitions, drifting SMs, bandwidth) or fast (one LRU)."),
    click.option("--regime", default="single", show_default=True,
                 help="A single launch, or the steady state: launches back to back for seconds."),
)
# fmt: on


def make_setup(options: Mapping[str, Any], **fixed: Any) -> Setup:
    """The `Setup` that `device_options` and `model_options` mean.

    Raises:
        InputError: see `Setup.make`; an L2 that isn't a size.
    """
    from wavealign.sim.setup import Setup
    from wavealign.units import parse_size

    names = ("device", "kernel", "wave", "head_dim", "dtype", "model", "regime")
    given = {name: options[name] for name in names if name in options}
    l2_bytes = parse_size(options["l2"]) if options["l2"] is not None else None
    return Setup.make(l2_bytes=l2_bytes, **given, **fixed)


def load_heads(path: str, options: Mapping[str, Any]) -> tuple[LoadedMask, list[int]]:
    """The mask, reduced to the chosen heads, and their indices in the file.

    Raises:
        InputError: see `load_mask`; heads or sizes that can't be read.
    """
    from wavealign.masks import load_mask
    from wavealign.units import parse_block, parse_heads

    tokens, block = (
        parse_block(options[name]) if options.get(name) else None for name in ("seq_len", "block")
    )
    loaded = load_mask(path, block, options["key"], options.get("form"), tokens)
    if options["heads"] is None:
        return loaded, list(range(loaded.mask.H))
    chosen = parse_heads(options["heads"], loaded.mask.H)
    return dataclasses.replace(loaded, mask=loaded.mask.select_heads(chosen)), chosen


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fitting_schedules(
    options: Mapping[str, Any], mask: BlockMask, head_ids: list[int]
) -> list[Schedule]:
    """The schedule files that the options name, each checked against the mask.

    Args:
        options: of the command, by name.
        mask: of the chosen heads.
        head_ids: their indices in the mask file.

    Raises:
        InputError: a schedule isn't this mask's, with the file's name.
    """
    from wavealign.order import Schedule

    chosen = None if options["heads"] is None else head_ids
    return [Schedule.fitting(path, mask, chosen) for path in options["schedule_paths"]]


def check_picture(path: str | None) -> None:
    """Refuse a ``--plot`` that can't be made, before the work; see `check_plot`."""
    if path is not None:
        from wavealign.report.plots import check_plot

        check_plot(path)
