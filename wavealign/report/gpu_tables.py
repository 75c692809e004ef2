"""Tables for people about GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from wavealign.gpu.doctor import Check
from wavealign.report.tables import table_frame

_STYLES = {"ok": "green", "missing": "red", "warning": "yellow"}


def doctor_table(checks: Iterable[Check]) -> Table:
    """What `wavealign doctor` found, one row a component."""
    table = table_frame("component", "state", "found", "what to do", overflow="fold")
    for check in checks:
        # As Text, so that 'wavealign[gpu]' isn't taken for markup.
        state = Text(check.state, _STYLES[check.state])
        table.add_row(Text(check.component), state, Text(check.detail), Text(check.remedy or ""))
    return table
