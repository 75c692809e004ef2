"""How a kernel wants its lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wavealign.order.schedule import Schedule


@dataclass(frozen=True)
class ListLayout:
    """A kernel's convention; the default is that of a kernel with a row table.

    Attributes:
        rows: ``"table"``: counts and lists lie by query block, and a table says which query block
            a slot runs; ``"gathered"``: they lie by slot.
        walks: the end of a list from which the kernel starts.
        ragged_kv_first: rows that keep the last K/V block visit it first.
    """

    rows: Literal["table", "gathered"] = "table"
    walks: Literal["forwards", "backwards"] = "forwards"
    ragged_kv_first: bool = False

    @property
    def gathers(self) -> bool:
        """Whether rows lie by slot."""
        return self.rows == "gathered"

    def executed(self, schedule: Schedule) -> Schedule:
        """The schedule that a kernel really runs: the same but for what it insists on."""
        return schedule.last_kv_first() if self.ragged_kv_first else schedule
