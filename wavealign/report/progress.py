"""Progress of long work, on stderr."""

from __future__ import annotations

import sys
import time

from wavealign.foreign import shown

_EVERY_SECONDS = 5.0
_MOST_DETAIL = 200  # characters


class Progress:
    """A bar on a terminal; elsewhere a line every few seconds, so that logs stay short.

    Args:
        total: pieces.
        what: what is being done, e.g. ``"simulating"``.
        quiet: say nothing.
    """

    def __init__(self, total: int, what: str, quiet: bool = False) -> None:
        self._total, self._what, self._quiet = total, what, quiet
        self.done, self._said = 0, time.monotonic()
        self._bar = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def advance(self, detail: str) -> None:
        """One more piece is done."""
        self.advance_to(self.done + 1, f"{detail} done")

    def advance_to(self, done: int, detail: str) -> None:
        """So many pieces are done."""
        self.done, detail = done, shown(detail, _MOST_DETAIL)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=f"{self._what} {detail}")
        elif not self._quiet and time.monotonic() - self._said >= _EVERY_SECONDS:
            self._said = time.monotonic()
            print(f"{self._what}: {self.done}/{self._total}, {detail}", file=sys.stderr)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
