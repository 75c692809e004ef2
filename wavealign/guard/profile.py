"""The guard's few constants for a device, with where they are from (``wavealign.guard/1``)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from wavealign.order.policies import parse_policy
from wavealign.shipped import profile_names, read_profile

GUARD_SCHEMA = "wavealign.guard/1"
SOURCES = ("measured", "simulated")


@cache
def _phased(policy: str) -> bool:
    return parse_policy(policy).visits.phased


@dataclass(frozen=True)
class GuardProfile:
    """What the cost model needs beside the device profile.

    Attributes:
        device: the device profile that it belongs to.
        kernel: the kernel of it.
        source: ``"measured"`` where runs of the card were among those fitted, ``"simulated"``
            where only the simulator spoke.
        capacity_frac: K/V bytes that a snapshot's LRU holds / the profile's effective L2.
        phased_sweeps: how often a wave under ``resync`` reads its head's working set from HBM.
        miss_stall_frac: cycles that a miss adds / cycles of a block.
        margin_frac: share of a launch's time that planning it must save.
        hysteresis_frac: share of a head's time that a change of policy must save.
        plan_launch_ms: planning time that doesn't depend on size, of a launch.
        plan_cell_ns: planning time of a block of the mask, kept or not.
        phase_row_ns: of a row, head after head: the list schedule behind ``phased``.
        phase_slot_ns: of a slot, all heads side by side: the entries of ``phased``.
        lengths_launch_ms: looking at the lengths of a launch's rows, without what grows with size.
        look_launch_ms: the same of looking at its blocks (`Guard` says when it does either).
        look_row_ns: of a row, for both.
        look_cell_ns: of a block of the mask, kept or not, for the latter.
        plan_source: where the times of planning and looking are from.
        calibrated_on: what was fitted.
    """

    device: str
    kernel: str
    source: str
    capacity_frac: float
    phased_sweeps: float
    miss_stall_frac: float
    margin_frac: float
    hysteresis_frac: float
    plan_launch_ms: float
    plan_cell_ns: float
    phase_row_ns: float
    phase_slot_ns: float
    lengths_launch_ms: float
    look_launch_ms: float
    look_row_ns: float
    look_cell_ns: float
    plan_source: str
    calibrated_on: str

    def plan_ms(self, policies: Collection[str], heads: int, rows: int, columns: int) -> float:
        """Planning time of a launch in which heads run these policies.

        Beyond the lists in natural order, which `original` needs as well. A launch is planned as
        a whole, so one head that is reordered costs as much as all of them.

        Args:
            policies: of the heads.
            heads, rows, columns: H, M, N.
        """
        if all(policy == "original" for policy in policies):
            return 0.0
        once_ms = self.plan_launch_ms + 1e-6 * self.plan_cell_ns * heads * rows * columns
        if not any(_phased(policy) for policy in set(policies)):
            return once_ms
        # A second pass over the mask, and the two recurrences.
        return 2 * once_ms + 1e-6 * rows * (heads * self.phase_row_ns + self.phase_slot_ns)

    def lengths_ms(self, heads: int, rows: int) -> float:
        """The host's wait for the lengths of a launch's rows."""
        return self.lengths_launch_ms + 1e-6 * self.look_row_ns * heads * rows

    def look_ms(self, heads: int, rows: int, columns: int) -> float:
        """The host's wait for all statistics of a launch, and the decision.

        Args:
            heads, rows, columns: H, M, N.
        """
        cells_ms = 1e-6 * self.look_cell_ns * heads * rows * columns
        return self.look_launch_ms + 1e-6 * self.look_row_ns * heads * rows + cells_ms

    def to_toml(self) -> str:
        """The text that `load_guard_profile` reads."""
        lines = [f"schema = {json.dumps(GUARD_SCHEMA)}"]
        for name, value in dataclasses.asdict(self).items():
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else f"{value:g}"
            lines.append(f"{name} = {text}")
        return "\n".join(lines) + "\n"


def guard_profile_names() -> list[str]:
    """Devices for which a profile ships."""
    return profile_names("wavealign.guard")


@cache
def load_guard_profile(name: str) -> GuardProfile:
    """A shipped profile by device name, or one's own by path to a ``.toml``.

    Raises:
        InputError: an unknown name, or a file that isn't a complete profile.
    """
    return read_profile("wavealign.guard", "guard profile", name, _parse)


def _parse(table: Mapping[str, Any]) -> GuardProfile:
    if table.get("schema") != GUARD_SCHEMA:
        raise ValueError(f"has schema {table.get('schema')!r}; expected '{GUARD_SCHEMA}'.")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(GuardProfile):
        if field.name not in table:
            raise ValueError(f"has no '{field.name}'; expected a complete guard profile.")
        value = table[field.name]
        if field.type == "float":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise ValueError(f"'{field.name}' is {value!r}; expected a number from 0 up.")
            values[field.name] = float(value)
        else:
            values[field.name] = str(value)
    if values["source"] not in SOURCES:
        raise ValueError(f"'source' is '{values['source']}'; expected {' or '.join(SOURCES)}.")
    return GuardProfile(**values)
