"""What commands print: lines for people, in which all text is text, and JSON, which is JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from wavealign.foreign import shown
from wavealign.structures import json_text


def say(*lines: object, err: bool = False) -> None:
    """Print lines, each as one, whatever names and messages are in it.

    Args:
        lines: to print; an empty one leaves room.
        err: on stderr, as progress and notes.
    """
    for line in lines:
        click.echo(shown(line), err=err)


def remark(*lines: object) -> None:
    """Print lines on stderr."""
    say(*lines, err=True)


def say_json(row: Mapping[str, Any] | str) -> None:
    """Print one JSON line: a row, or the line that its `to_json` made."""
    click.echo(row if isinstance(row, str) else json_text(row))
