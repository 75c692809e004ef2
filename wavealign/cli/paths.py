"""Paths among a command's options: what it reads, and what it writes and never over that."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from wavealign.errors import InputError
from wavealign.outputs import check_folder, check_writable, inputs_kept, is_stream, note_read

NPZ = (".npz", "")
"""Kinds of an `Output` that is an npz, by whatever name reading takes for one."""

# What is made of a folder's files, and often put beside them.
_MADE = {".html", ".htm", ".png", ".svg", ".pdf", ".toml"}


class Input(click.types.StringParamType):
    """A file that a command reads, or a folder that stands for its files."""

    name = "file"


class Output(click.types.StringParamType):
    """A file that a command writes.

    Args:
        kinds: see `check_writable`.
        folder: it is a folder, whose files are written.
    """

    def __init__(self, *kinds: str, folder: bool = False) -> None:
        self.kinds, self.folder = kinds, folder
        self.name = "dir" if folder else "file"


@contextmanager
def paths_kept(ctx: click.Context) -> Iterator[None]:
    """Inside this block a command runs whose options may be written, and what it reads is kept.

    Raises:
        InputError: a path that can't be written, that is read, or that two options write.
    """
    command = ctx.command
    given = [(p, path) for p in command.params for path in _paths(ctx.params.get(p.name or ""))]
    # An argument is written where it is said to be: `mask convert FILE FILE`.
    options = [(p, path) for p, path in given if isinstance(p, click.Option)]
    written = [(p, p.type, path) for p, path in options if isinstance(p.type, Output)]
    with inputs_kept(bool(written)):
        for parameter, path in given:
            if isinstance(parameter.type, Input):
                for file in _files(Path(path)):
                    note_read(file, f"the file that {_spelled(parameter)} names")
        for _, kind, path in written:
            check_folder(path) if kind.folder else check_writable(path, *kind.kinds)
        for (one, _, path), (other, _, again) in itertools.combinations(written, 2):
            if os.path.realpath(path) == os.path.realpath(again) and not is_stream(Path(path)):
                raise InputError(
                    f"{again}: {_spelled(other)} would overwrite the file that {_spelled(one)} "
                    "names; choose another one to write."
                )
        yield


def _paths(value: object) -> Iterator[str]:
    """The paths in a parameter's value."""
    for path in value if isinstance(value, tuple) else (value,):
        if isinstance(path, str):
            yield path


def _files(path: Path) -> Iterator[Path]:
    """The file, or those of a folder, a sweep's trials among them, but for what is made of them."""
    yield path
    with suppress(OSError, ValueError):
        for folder in filter(Path.is_dir, (path, path / "trials")):
            yield from (file for file in folder.iterdir() if file.suffix not in _MADE)


def _spelled(parameter: click.Parameter) -> str:
    option = isinstance(parameter, click.Option)
    return parameter.opts[-1] if option else str(parameter.human_readable_name)
