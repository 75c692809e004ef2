"""The conditions of a sweep: each launch on each device, resolved, as the spec of its baseline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wavealign.errors import InputError
from wavealign.masks.block_mask import BlockMask
from wavealign.runs.launch import BASELINE, Launch
from wavealign.sim.devices import DeviceProfile, load_device
from wavealign.sim.setup import Setup
from wavealign.sweep.masks import SweepMask
from wavealign.sweep.space import DEFAULT, Space
from wavealign.sweep.trial import Inputs

_MOST_CONDITIONS = 100_000


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
        InputError: unknown devices, kernels, models or regimes, heads that a mask hasn't, an L2
            that doesn't hold one K/V block, or too many conditions.
    """
    axes = space.axes
    if (count := len(masks) * math.prod(map(len, axes.values()))) > _MOST_CONDITIONS:
        raise InputError(
            f"{count:,} conditions (mask, heads, device, ...) are more than {_MOST_CONDITIONS:,}; "
            "list fewer values."
        )
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
                launch = setup.launch(part, BASELINE, seed=seed, name=mask.name, heads=heads)
                said: dict[str, Any] = {**launch.spec, "device": name}  # maybe a path
                spec = Launch(**said)
                repeated += spec.named in found
                found.setdefault(spec.named, spec)
    if repeated:
        note(f"{repeated} conditions are the same as others; each runs once.")
    return list(found.values()), Inputs(launches, devices)


def _setups_of(space: Space, devices: Mapping[str, DeviceProfile]) -> list[tuple[str, Setup]]:
    names = ("device", "kernel", "l2", "wave", "head_dim", "dtype", "model", "regime")
    found = []
    for device, *own, head_dim, dtype, model, regime in itertools.product(
        *(space.axes[name] for name in names)
    ):
        kernel, l2_bytes, wave = (None if value == DEFAULT else value for value in own)
        setup = Setup.make(
            devices[device], kernel,
            l2_bytes=l2_bytes, wave=wave, head_dim=head_dim, dtype=dtype, model=model,
            regime=regime,
        )  # fmt: skip
        found.append((str(device), setup))
    return found
