"""Errors on the command line: one message, one exit code."""

from __future__ import annotations

from typing import Any

import click

from wavealign.errors import InputError, MissingCapabilityError, WaveAlignError


class Failure(click.ClickException):
    """Ends the program with a message on stderr and this exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance


class Group(click.Group):
    """Turns the package's errors into exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except InputError as problem:
            raise Failure(str(problem), 2) from problem
        except MissingCapabilityError as problem:
            raise Failure(str(problem), 3) from problem
        except WaveAlignError as problem:
            raise Failure(str(problem), 1) from problem
