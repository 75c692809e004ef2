"""How a kernel wants its lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
