"""The conditions of a sweep: each launch on each device, resolved, as the spec of its baseline."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence

from wavealign.errors import InputError
from wavealign.masks.block_mask import BlockMask
from wavealign.runs.launch import Launch
from wavealign.sim.devices import DeviceProfile, load_device, profile_toml
from wavealign.sim.setup import Setup
from wavealign.sweep.masks import SweepMask
from wavealign.sweep.space import DEFAULT, Space
from wavealign.sweep.trial import Inputs

BASELINE = "original"
OBJECTIVES = {"time": "time_ms", "reads": "hbm_read_bytes", "energy": "energy_j"}
"""What is minimised → the field of the result row."""


def resolve_conditions(
    space: Space,
    masks: Sequence[SweepMask],
    objective: str = "time",
    note: Callable[[str], None] = lambda _: None,
) -> tuple[list[Launch], Inputs]:
    """Every condition of the space on these masks, as the spec of its baseline `original`.

    Args:
        space: its axes.
        masks: what runs.
        objective: of `OBJECTIVES`; a device that can't tell it is refused.
        note: told of conditions that are the same.

    Returns:
        The baselines, masks outermost, without duplicates; and what their trials need.

    Raises:
        InputError: unknown devices, kernels, models or regimes, heads that a mask hasn't, or an
            L2 that doesn't hold one K/V block.
    """
    axes = space.axes
    devices = {name: load_device(name) for name in axes["device"]}
    if objective == "energy":
        for name, device in devices.items():
            if device.power is None:
                raise InputError(
                    f"--objective energy: the power budget of '{name}' isn't known, so its energy "
                    "can't be told; leave the device out, or choose time or reads."
                )
    setups = _setups_of(space, devices)
    found: dict[str, Launch] = {}
    launches: dict[str, BlockMask] = {}
    repeated = 0
    for mask in masks:
        for heads, part in itertools.chain.from_iterable(map(mask.launches, axes["heads"])):
            launches.setdefault(part.digest, part)
            for (name, setup), seed in itertools.product(setups, axes["seed"]):
                setup.capacity_blocks(part)
                spec = _baseline(mask, heads, part, name, setup, seed)
                repeated += spec.identity in found
                found.setdefault(spec.identity, spec)
    if repeated:
        note(f"{repeated} conditions are the same as others; each runs once.")
    return list(found.values()), Inputs(launches, devices)


def device_digests(devices: dict[str, DeviceProfile]) -> dict[str, str]:
    """A hash of each profile's content, so that a store notices when one has changed."""
    return {
        name: hashlib.sha256(profile_toml(device).encode()).hexdigest()[:16]
        for name, device in devices.items()
    }


def _setups_of(space: Space, devices: Mapping[str, DeviceProfile]) -> list[tuple[str, Setup]]:
    names = ("device", "kernel", "l2", "wave", "head_dim", "dtype", "model", "regime")
    found = []
    for values in itertools.product(*(space.axes[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        own = {name for name, value in chosen.items() if value == DEFAULT}
        setup = Setup.make(
            devices[chosen["device"]],
            None if "kernel" in own else chosen["kernel"],
            l2_bytes=None if "l2" in own else chosen["l2"],
            wave=None if "wave" in own else chosen["wave"],
            head_dim=chosen["head_dim"],
            dtype=chosen["dtype"],
            model=chosen["model"],
            regime=chosen["regime"],
        )
        found.append((str(chosen["device"]), setup))
    return found


def _baseline(
    mask: SweepMask, heads: str, part: BlockMask, device: str, setup: Setup, seed: int
) -> Launch:
    return Launch(
        source="simulated",
        mask=mask.name,
        mask_digest=part.digest,
        heads=heads,
        policy=BASELINE,
        device=device,
        kernel=setup.kernel.name,
        wave=setup.wave,
        l2_bytes=setup.l2_capacity_bytes if setup.l2_origin == "given" else None,
        head_dim=setup.head_dim,
        dtype=setup.dtype,
        model=setup.model,
        regime=setup.regime,
        seed=seed,
    )
