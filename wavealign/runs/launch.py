"""What a run is: everything that its outcome depends on, but the day and the machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

BASELINE = "original"
"""The policy that every other one is compared with: what kernels do today."""

OBJECTIVES = {"time": "time_ms", "reads": "hbm_read_bytes", "energy": "energy_j"}
"""What can be made small → the field of a result."""

_ID_DIGITS = 16
_SPEC_FIELDS = (
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

    source: str
    mask: str
    mask_digest: str
    heads: str
    policy: str
    device: str
    kernel: str
    wave: int
    regime: str
    seed: int
    head: int | None = None
    model: str | None = None
    l2_bytes: int | None = None
    l2_capacity_bytes: int | None = None
    kv_block_bytes: int | None = None
    batch: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    schedule_file: str | None = None
    device_digest: str | None = None
    tokens_kv: int | None = None
    density: float | None = None

    @property
    def baseline(self) -> Launch:
        """The same launch in today's order."""
        return dataclasses.replace(self, policy=BASELINE, schedule_file=None)

    @property
    def spec(self) -> dict[str, object]:
        """What a trial's line says of it."""
        return {name: getattr(self, name) for name in _SPEC_FIELDS}

    @property
    def identity(self) -> str:
        """Hex digits of the SHA-256 of the canonical JSON of `spec`, without the mask's name."""
        what = {key: value for key, value in self.spec.items() if key != "mask"}
        text = json.dumps(what, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]
