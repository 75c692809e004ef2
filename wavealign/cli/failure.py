"""Errors on the command line: one message, one exit code; mistakes that every command refuses."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from wavealign.cli.paths import paths_kept
from wavealign.errors import InputError, MissingCapabilityError, WaveAlignError
from wavealign.foreign import shown

# What looking for a file that an argument names may end with.
_WRONG_PATHS = {
    errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR,
    errno.EISDIR,
}  # fmt: skip


class Failure(click.ClickException):
    """Ends the program with a message on stderr and this exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(shown(message))
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance


class Command(click.Command):
    """A command that refuses an option given twice, and to write over what it was given.

    click takes the last of two values and says nothing: `--mask a.npz --mask b.npz` would answer
    for b.npz alone.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and count the options."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for parameter, times in Counter(order).items():
            single = isinstance(parameter, click.Option) and not (
                parameter.multiple or parameter.is_flag or parameter.count
            )
            if single and times > 1:
                raise click.UsageError(
                    f"{parameter.opts[-1]} is given {times} times; it takes one value.", ctx
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, unless what it writes can't be written, or would replace what it reads.

        Raises:
            InputError: see `paths_kept`.
        """
        try:
            with paths_kept(ctx):
                return super().invoke(ctx)
        except WaveAlignError as problem:
            problem.args = (str(problem) + who_has(str(problem), ctx),)
            raise


def who_has(message: str, ctx: click.Context) -> str:
    """Says of options that a message names, and the command lacks, which command has them.

    Args:
        message: of an error that several commands can end with.
        ctx: of the command that it ended.
    """
    own = _options(ctx.command)
    every = dict(_commands(ctx.find_root().command))
    name = next((name for name, command in every.items() if command is ctx.command), ctx.info_name)
    # What stands behind the name of a command is said of that command.
    message = re.sub(r"wavealign [a-z][^.;`]*", "", message)
    told = ""
    for option in dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", message)):
        owners = [other for other, command in every.items() if option in _options(command)]
        if option not in own and owners:
            best = "mask convert" if "mask convert" in owners else owners[0]
            told += f" (`wavealign {name}` has no {option}; `wavealign {best}` has.)"
    return told


def _options(command: click.Command) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def _commands(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command below, with its name behind ``wavealign``."""
    for below, inner in getattr(command, "commands", {}).items():
        yield f"{name}{below}", inner
        yield from _commands(inner, f"{name}{below} ")


class Group(click.Group):
    """Turns the package's errors, and the system's, into exit codes."""

    command_class = Command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, writing what a terminal's or pipe's encoding lacks as escapes."""
        for stream in (sys.stdout, sys.stderr):
            if getattr(stream, "errors", None) in ("strict", "surrogateescape"):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        return super().main(*args, **kwargs)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the arguments of the program itself."""
        with _shown_usage():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _shown_usage():
            return self._run(ctx)

    def _run(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a full disk behind stdout shows here, not after the exit code
            return result
        except InputError as problem:
            raise Failure(str(problem), 2) from problem
        except MissingCapabilityError as problem:
            raise Failure(str(problem), 3) from problem
        except WaveAlignError as problem:
            raise Failure(str(problem), 1) from problem
        except MemoryError as problem:
            raise Failure(f"not enough memory ({problem}); fewer heads need less.", 1) from problem
        except SystemError as problem:
            # What numba makes of Ctrl-C that comes while a kernel runs.
            cause: BaseException | None = problem
            while isinstance(cause, SystemError):
                cause = cause.__cause__
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            raise
        except OSError as problem:
            where = f"{problem.filename}: " if problem.filename else ""
            if problem.errno in _WRONG_PATHS and where:
                raise Failure(f"{where}can't be used ({problem.strerror}).", 2) from problem
            if problem.errno != errno.ENOSPC:
                raise
            _drop_stdout()
            raise Failure(f"{where}no space left; the output is cut off.", 1) from problem


@contextmanager
def _shown_usage() -> Iterator[None]:
    """Inside this block click's own errors show arguments as text; pages of help are ours."""
    try:
        yield
    except getattr(click.exceptions, "NoArgsIsHelpError", ()):
        raise
    except click.ClickException as problem:
        problem.message = shown(problem.message)  # type: ignore[misc]
        raise


def _drop_stdout() -> None:
    """Send what is still buffered for a full disk nowhere: else Python fails on it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives until exit
