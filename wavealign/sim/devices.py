"""Device profiles: what the simulator knows of a GPU and of a kernel on it, with sources.

Profiles are TOML files (``wavealign.device/1``), shipped in ``wavealign/sim/profiles``; a path to
a file of one's own is accepted wherever a device name is. Every figure must name its source.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from wavealign.errors import unknown_name
from wavealign.shipped import profile_names, read_profile
from wavealign.sim.power import PowerProfile

DEVICE_SCHEMA = "wavealign.device/1"
DEFAULT_DEVICE = "h100"


@dataclass(frozen=True)
class KernelProfile:
    """A kernel on a device.

    Attributes:
        name: e.g. ``"fa4"``.
        ctas_per_sm: rows in flight per SM.
        block_cycles: SM cycles of one K/V block, all of its bytes in L2, by
            ``(block_q, block_kv)``, at `head_dim`; other sizes are scaled by their
            multiply-adds from the nearest entry.
        head_dim: elements per head that `block_cycles` holds for.
        row_start_blocks: time between two rows of a worker, in block times.
        miss_exposed_blocks: what a block read wholly from HBM adds to its own step, in block
            times, where the worker's block before it missed too (a lone miss is hidden by
            prefetch).
        sm_spread_frac: standard deviation of the SMs' speeds / their mean.
        calibrated_on: the measurements behind the figures, or "" for an estimate.
    """

    name: str
    ctas_per_sm: int
    block_cycles: Mapping[tuple[int, int], float]
    head_dim: int
    row_start_blocks: float
    miss_exposed_blocks: float
    sm_spread_frac: float
    calibrated_on: str

    def step_cycles(self, block_q: int, block_kv: int, head_dim: int) -> float:
        """Cycles of one K/V block at the compute limit.

        A tile that the profile lists is taken as it is; another is scaled from the listed one
        with the nearest number of query rows (then of keys), in proportion to its work.

        Args:
            block_q, block_kv: tokens of the tile.
            head_dim: elements per head.
        """
        nearest = min(
            self.block_cycles,
            key=lambda tile: (abs(tile[0] - block_q), abs(tile[1] - block_kv), tile),
        )
        work = block_q * block_kv * head_dim / (nearest[0] * nearest[1] * self.head_dim)
        return self.block_cycles[nearest] * work


@dataclass(frozen=True)
class DeviceProfile:
    """A GPU.

    Attributes:
        name: as given to ``--device``.
        title: the vendor's name.
        sms: streaming multiprocessors.
        clock_max_ghz: highest SM clock.
        flop_per_clock_sm: dense 16-bit tensor FLOP per cycle and SM.
        l2_bytes: L2 as the device reports it.
        l2_partitions: parts that keep copies of each other's lines (1 or 2).
        l2_usable_frac: share of it that holds K/V in the full model.
        l2_effective_bytes: what a single LRU must hold to miss as often (fast model).
        l2_bytes_per_clock: bytes that L2 moves per SM cycle: lookups, crossings and fills; None
            where it isn't known, then it never binds.
        hbm_bytes_per_s: device memory bandwidth by datasheet.
        hbm_usable_frac: share of it that reads can reach.
        power: the power budget, or None where it isn't known.
        kernels: by name.
        sources: where each figure is from, by field.
    """

    name: str
    title: str
    sms: int
    clock_max_ghz: float
    flop_per_clock_sm: float
    l2_bytes: int
    l2_partitions: int
    l2_usable_frac: float
    l2_effective_bytes: int
    l2_bytes_per_clock: float | None
    hbm_bytes_per_s: float
    hbm_usable_frac: float
    power: PowerProfile | None
    kernels: Mapping[str, KernelProfile]
    sources: Mapping[str, str]

    @property
    def ridge_flop_per_byte(self) -> float:
        """FLOP per HBM byte where the roofline turns: peak FLOP/s / HBM bandwidth."""
        peak = self.sms * self.flop_per_clock_sm * self.clock_max_ghz * 1e9
        return peak / self.hbm_bytes_per_s

    @cached_property
    def digest(self) -> str:
        """Hex digits of a hash of the content: profiles of one name may differ."""
        return hashlib.sha256(profile_toml(self).encode()).hexdigest()[:16]

    def kernel(self, name: str | None) -> KernelProfile:
        """The kernel `name`, or the profile's first.

        Raises:
            InputError: the profile has no such kernel.
        """
        if name is None:
            return next(iter(self.kernels.values()))
        if name not in self.kernels:
            raise unknown_name(f"kernel on {self.name}:", name, self.kernels)
        return self.kernels[name]


def device_names() -> list[str]:
    """Names of the shipped profiles."""
    return profile_names("wavealign.sim")


# What the driver calls the cards of each profile; the first that fits, so memory sizes come first.
_GPU_NAMES = (
    ("H200", "h200"), ("H100 PCIe", "h100-pcie"), ("H100 80GB HBM3", "h100"),
    ("A100-SXM4-80GB", "a100"), ("A100 80GB", "a100"),
    ("A100-SXM4-40GB", "a100-40gb"), ("A100-PCIE-40GB", "a100-40gb"),
    ("A40", "a40"), ("L40S", "l40s"), ("RTX 4090", "rtx4090"), ("B200", "b200"),
)  # fmt: skip


def device_of_gpu(gpu_name: str) -> str | None:
    """The shipped profile of a card, by the driver's name for it; None if there is none."""
    words = gpu_name.replace("NVIDIA ", "")
    return next((profile for name, profile in _GPU_NAMES if words.endswith(name)), None)


@cache
def load_device(name: str) -> DeviceProfile:
    """A shipped profile by name, or one's own by path to a ``.toml``.

    Raises:
        InputError: an unknown name, or a file that isn't a complete profile.

    Example:
        >>> import wavealign as wa
        >>> device = wa.load_device("h200")
        >>> device.sms, device.l2_bytes, list(device.kernels)
        (132, 62914560, ['fa4', 'triton', 'flex'])
    """
    return read_profile("wavealign.sim", "device", name, _parse)


def profile_toml(profile: DeviceProfile) -> str:
    """The profile as the TOML text that `load_device` reads, every figure to its last digit."""

    def line(name: str, value: object) -> str:
        if isinstance(value, str):
            return f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        return f"{name} = {value!r}\n"

    text = line("schema", DEVICE_SCHEMA)
    for field in dataclasses.fields(profile):
        value = getattr(profile, field.name)
        if isinstance(value, str | int | float):
            text += line(field.name, value)
    if profile.power is not None:
        text += "\n[power]\n"
        for name, value in dataclasses.asdict(profile.power).items():
            text += line(name, value)
    for kernel in profile.kernels.values():
        text += f"\n[kernels.{kernel.name}]\n"
        text += line("ctas_per_sm", kernel.ctas_per_sm) + line("head_dim", kernel.head_dim)
        text += "block_cycles = [\n"
        for (q, kv), cycles in kernel.block_cycles.items():
            number = f"{cycles:g}" if float(f"{cycles:g}") == cycles else repr(cycles)
            text += f"    {{ block_q = {q}, block_kv = {kv}, cycles = {number} }},\n"
        text += "]\n"
        for name in ("row_start_blocks", "miss_exposed_blocks", "sm_spread_frac"):
            text += line(name, getattr(kernel, name))
        text += line("calibrated_on", kernel.calibrated_on)
    text += "\n[source]\n"
    return text + "".join(line(json.dumps(name), value) for name, value in profile.sources.items())


def _parse(table: Mapping[str, Any]) -> DeviceProfile:
    if table.get("schema") != DEVICE_SCHEMA:
        raise ValueError(f"has schema {table.get('schema')!r}; expected '{DEVICE_SCHEMA}'.")
    sources = dict(table["source"])
    kernels = {name: _kernel(name, entry, sources) for name, entry in table["kernels"].items()}
    if not kernels:
        raise ValueError("lists no kernel.")
    return DeviceProfile(
        name=str(table["name"]),
        title=str(table["title"]),
        **{"l2_bytes_per_clock": None, **_figures(DeviceProfile, table, sources)},
        power=(
            PowerProfile(**_figures(PowerProfile, table["power"], sources, "power."))
            if "power" in table
            else None
        ),
        kernels=kernels,
        sources=sources,
    )


def _kernel(name: str, entry: Mapping[str, Any], sources: Mapping[str, str]) -> KernelProfile:
    prefix = f"kernels.{name}."
    tiles = {
        (int(t["block_q"]), int(t["block_kv"])): float(t["cycles"]) for t in entry["block_cycles"]
    }
    _require_source(prefix + "block_cycles", sources)
    if not tiles or min(min(tiles.values()), *map(min, tiles)) <= 0:
        raise ValueError(f"'{prefix}block_cycles' needs at least one tile, with positive figures.")
    return KernelProfile(
        name=name, block_cycles=tiles, head_dim=int(entry["head_dim"]),
        calibrated_on=str(entry["calibrated_on"]),
        **_figures(KernelProfile, entry, sources, prefix),
    )  # fmt: skip


# Of figures that needn't be at least 1, and of those that have an upper bound.
_LEAST = {
    "clock_max_ghz": 0.1, "l2_usable_frac": 0.01, "hbm_usable_frac": 0.01,
    "row_start_blocks": 0.0, "miss_exposed_blocks": 0.0, "sm_spread_frac": 0.0,
    "cap_w": 0.0, "static_w": 0.0, "flop_pj": 0.0, "hbm_pj_per_byte": 0.0, "l2_pj_per_byte": 0.0,
    "reference_ghz": 0.1, "steady_clock_frac": 0.1, "settle_ms": 0.1,
}  # fmt: skip
_MOST = {"l2_partitions": 2, "l2_usable_frac": 1, "hbm_usable_frac": 1, "sm_spread_frac": 0.1}


def _figures(
    profile: type, table: Mapping[str, Any], sources: Mapping[str, str], prefix: str = ""
) -> dict[str, Any]:
    """The numbers of a profile, each within its bounds and with a source.

    Optional ones that the table leaves out are left out.

    Args:
        profile: whose fields are meant.
        table: of the file.
        sources: by figure.
        prefix: of the figures' names there.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(profile):
        name, kind = field.name, str(field.type)
        # `head_dim` says what a kernel's figures hold for.
        if kind not in ("int", "float", "float | None") or name == "head_dim":
            continue
        if kind == "float | None" and name not in table:
            continue
        value, lowest, highest = table[name], _LEAST.get(name, 1.0), _MOST.get(name, math.inf)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not lowest <= value <= highest:
            bounds = f"from {lowest:g} " + (f"to {highest:g}" if highest < math.inf else "up")
            raise ValueError(f"'{prefix}{name}' is {value!r}; expected a number {bounds}.")
        _require_source(prefix + name, sources)
        found[name] = int(value) if kind == "int" else float(value)
    return found


def _require_source(field: str, sources: Mapping[str, str]) -> None:
    if not sources.get(field):
        raise ValueError(f"'{field}' names no source; add it to the [source] table.")
