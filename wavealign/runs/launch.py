"""What a run is: everything that its outcome depends on, but the day and the machine."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from wavealign.structures import Count, Share, Size, json_text

BASELINE = "original"
"""The policy that every other one is compared with: what kernels do today."""

OBJECTIVES = {"time": "time_ms", "reads": "hbm_read_bytes", "energy": "energy_j"}
"""What can be made small → the field of a result."""


Regime = Literal["single", "steady"]
Model = Literal["full", "fast"]
Heads = Annotated[
    str,
    Meta(
        pattern=r"^[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*$",
        description='heads, e.g. "0,3-7"',
    ),
]


def head_numbers(heads: str) -> list[int]:
    """The numbers in a list of heads, by which people expect it sorted: 0, 3, 7 of ``"0,3-7"``."""
    return [int(number) for number in re.findall(r"\d+", heads)]


def but(fields: Iterable[str], *names: str) -> tuple[str, ...]:
    """The fields without these."""
    return tuple(field for field in fields if field not in names)


# What makes two runs comparable stands here once; who compares names one of these groups.
ORDER = ("policy", "schedule_file")
"""The order in which the rows run, beside wave and seed: what is tried."""

SHAPES = ("kv_block_bytes", "batch", "kv_heads", "head_dim", "dtype")
"""How large Q, K and V are under the mask."""

ON_CARD = ("mask_digest", "heads", *SHAPES, "device", "kernel", "regime")
"""What is timed together on a card, each order in turn."""

SHARED = (*ON_CARD, *ORDER, "wave", "seed")
"""What a measured launch and its prediction agree in."""

KEY_FIELDS = (
    "mask_digest", "heads", "policy", "device", "kernel", "wave", "regime", "source", "seed",
    "model", "l2_capacity_bytes", "kv_block_bytes", "batch", "kv_heads", "head_dim", "dtype",
    "schedule_file", "device_digest",
)  # fmt: skip
"""What repeats of a launch agree in. `head` isn't among them: `heads` and the digest say what ran;
nor `l2_bytes`: the L2 that was modelled is what counts."""

_LATER_FIELDS = ("head_dim", "dtype", "device_digest")
_ID_DIGITS = 16
SPEC_FIELDS = (
    "source", "mask", "mask_digest", "heads", "policy", "device", "kernel", "wave", "l2_bytes",
    "head_dim", "dtype", "model", "regime", "seed",
)  # fmt: skip
"""What a trial's line says of its launch (``wavealign.trial/1``)."""


@dataclass(frozen=True)
class Launch:
    """One launch under one policy, simulated or measured.

    Two runs of equal launches are repeats of each other. What a file of an earlier version
    doesn't say is None.

    Attributes:
        source: ``"simulated"`` or ``"measured"``.
        mask: the mask's name, for people; the digest is what counts.
        mask_digest: hash of the mask that ran (of the heads that ran: lists, block sizes, tokens).
        heads: which heads of the file ran, e.g. ``"0,3-7"``.
        policy: the recipe of the schedule, parameters written out.
        device: name of the device profile; of the card where it has none.
        kernel: name of the kernel or backend.
        wave: rows in flight at once, W.
        regime: ``"single"`` launch or ``"steady"`` state.
        seed: of every random choice.
        head: the head, or None where all of `heads` ran in one launch.
        model: the simulator's, ``"full"`` or ``"fast"``; None in a measured run.
        l2_bytes: the L2 that was asked for, all of it usable; None for the device's own.
        l2_capacity_bytes: the L2 that was modelled; None in a measured run.
        kv_block_bytes: K and V of one full block.
        batch: sequences, all under the same mask.
        kv_heads: K/V heads, over which the query heads are spread evenly (GQA).
        head_dim: elements per head.
        dtype: of Q, K and V.
        schedule_file: the schedule came from this file, not from the policy's name.
        device_digest: hash of the profile that was simulated: one name may have several.
        tokens_kv, density: of the mask.
    """

    source: Literal["simulated", "measured"]
    mask: str
    mask_digest: str
    heads: Heads
    policy: str
    device: str
    kernel: str
    wave: Size
    regime: Regime
    seed: Count
    head: Count | None = None
    model: Model | None = None
    l2_bytes: Size | None = None
    l2_capacity_bytes: Size | None = None
    kv_block_bytes: Size | None = None
    batch: Size | None = None
    kv_heads: Size | None = None
    head_dim: Size | None = None
    dtype: str | None = None
    schedule_file: str | None = None
    device_digest: str | None = None
    tokens_kv: Size | None = None
    density: Share | None = None

    def key(self, fields: Iterable[str] = KEY_FIELDS) -> tuple[object, ...]:
        """What the launch says of these fields (see `LaunchKeys` for rows of several versions)."""
        return tuple(getattr(self, field) for field in fields)

    @property
    def head_count(self) -> int:
        """How many heads ran: 6 for ``"0,3-7"``."""
        parts = [head_numbers(part) for part in self.heads.split(",")]
        return sum(part[-1] - part[0] + 1 for part in parts if part)

    @property
    def baseline(self) -> Launch:
        """The same launch in today's order; equal for launches that differ in their order alone."""
        return dataclasses.replace(self, policy=BASELINE, schedule_file=None)

    @property
    def spec(self) -> dict[str, object]:
        """What a trial's line says of it."""
        return {name: getattr(self, name) for name in SPEC_FIELDS}

    @property
    def identity(self) -> str:
        """Hex digits of the SHA-256 of the canonical JSON of `spec`, without the mask's name."""
        what = {key: value for key, value in self.spec.items() if key != "mask"}
        text = json_text(what, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]

    @property
    def named(self) -> str:
        """The identity and the mask's name: files may share a head, and each has rows of it."""
        return f"{self.identity} {self.mask}"


class LaunchKeys:
    """What tells the launches at hand apart, though some of them say less than others.

    Rows of earlier versions don't say every field. They had one sequence and a K/V head for each
    query head. Their head dimension follows from the mask and the bytes of a K/V block, where
    another launch says it. A field that some launches of a source don't say even so tells nobody
    of that source apart.

    Args:
        launches: all that may be compared with each other.
    """

    def __init__(self, launches: Iterable[Launch]) -> None:
        launches = list(launches)
        said = {(la.mask_digest, la.kv_block_bytes or 0, la.head_dim or 0) for la in launches}
        self._head_dims = {what[:2]: what[2] for what in sorted(said) if what[2]}
        self._sources = {launch.source for launch in launches}
        self._unsaid = {
            (launch.source, field)
            for launch in launches
            for field in _LATER_FIELDS
            if self._said(launch, field) is None
        }

    def key(self, launch: Launch, fields: Iterable[str] = KEY_FIELDS) -> tuple[object, ...]:
        """Equal for launches that agree in these fields, as far as all of them say.

        Args:
            launch: one of those at hand.
            fields: of `KEY_FIELDS`. Without ``"source"``, what either source doesn't say tells
                nobody apart.
        """
        fields = tuple(fields)
        sources = {launch.source} if "source" in fields else self._sources
        return tuple(
            None
            if any((source, field) in self._unsaid for source in sources)
            else self._said(launch, field)
            for field in fields
        )

    def _said(self, launch: Launch, field: str) -> object:
        if field == "batch":
            return launch.batch or 1
        if field == "kv_heads":
            return launch.kv_heads or launch.head_count
        if field == "head_dim" and launch.head_dim is None:
            return self._head_dims.get((launch.mask_digest, launch.kv_block_bytes or 0))
        return getattr(launch, field)
