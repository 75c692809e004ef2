"""Device profiles: what the simulator knows of a GPU and of a kernel on it, with sources.

Profiles are TOML files (``wavealign.device/1``), shipped in ``wavealign/sim/profiles``; a path to
a file of one's own is accepted wherever a device name is. Every figure must name its source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from wavealign.errors import InputError, unknown_name

DEVICE_SCHEMA = "wavealign.device/1"
DEFAULT_DEVICE = "h100"


@dataclass(frozen=True)
class KernelProfile:
    """A kernel on a device, at the compute limit.

    Attributes:
        name: e.g. ``"fa4"``.
        ctas_per_sm: rows in flight per SM.
        block_ns: time of one K/V block, all of its bytes in L2, by ``(block_q, block_kv)``, at
            `head_dim`; other sizes are scaled by their multiply-adds from the nearest entry.
        head_dim: elements per head that `block_ns` holds for.
        row_start_blocks: time between two rows of a worker, in block times.
        miss_stall_ns: how long the row that misses waits itself, beyond what prefetch hides.
        miss_shared_ns: what each miss costs the launch as a whole, in ns x rows in flight:
            the clock lost to the power that HBM reads draw.
        calibrated_on: the measurements behind the figures, or "" for an estimate.
    """

    name: str
    ctas_per_sm: int
    block_ns: Mapping[tuple[int, int], float]
    head_dim: int
    row_start_blocks: float
    miss_stall_ns: float
    miss_shared_ns: float
    calibrated_on: str

    def step_ns(self, block_q: int, block_kv: int, head_dim: int) -> float:
        """Time of one K/V block at the compute limit, in ns.

        A tile that the profile lists is taken as it is; another is scaled from the listed one
        with the nearest number of query rows (then of keys), in proportion to its work.
        """
        nearest = min(
            self.block_ns, key=lambda tile: (abs(tile[0] - block_q), abs(tile[1] - block_kv), tile)
        )
        work = block_q * block_kv * head_dim / (nearest[0] * nearest[1] * self.head_dim)
        return self.block_ns[nearest] * work


@dataclass(frozen=True)
class DeviceProfile:
    """A GPU.

    Attributes:
        name: as given to ``--device``.
        title: the vendor's name.
        sms: streaming multiprocessors.
        l2_bytes: L2 as the device reports it.
        l2_partitions: parts that keep copies of each other's lines.
        l2_effective_bytes: what a single LRU must hold to miss as often as the device does.
        hbm_bytes_per_s: device memory bandwidth by datasheet.
        kernels: by name.
        sources: where each figure is from, by field.
    """

    name: str
    title: str
    sms: int
    l2_bytes: int
    l2_partitions: int
    l2_effective_bytes: int
    hbm_bytes_per_s: float
    kernels: Mapping[str, KernelProfile]
    sources: Mapping[str, str]

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
    folder = files("wavealign.sim") / "profiles"
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


@cache
def load_device(name: str) -> DeviceProfile:
    """A shipped profile by name, or one's own by path to a ``.toml``.

    Raises:
        InputError: an unknown name, or a file that isn't a complete profile.
    """
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise InputError(f"{name}: can't be read ({problem}).") from problem
    elif name in device_names():
        text = (files("wavealign.sim") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        raise unknown_name("device", name, device_names())
    try:
        return _parse(tomllib.loads(text))
    except tomllib.TOMLDecodeError as problem:
        raise InputError(f"{name}: is not TOML ({problem}).") from problem
    except KeyError as problem:
        raise InputError(f"{name}: has no {problem}; expected a complete profile.") from problem
    except (TypeError, ValueError, AttributeError) as problem:
        raise InputError(f"{name}: {problem}") from problem


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
        sms=int(_figure(table, "sms", sources)),
        l2_bytes=int(_figure(table, "l2_bytes", sources)),
        l2_partitions=int(_figure(table, "l2_partitions", sources)),
        l2_effective_bytes=int(_figure(table, "l2_effective_bytes", sources)),
        hbm_bytes_per_s=_figure(table, "hbm_bytes_per_s", sources),
        kernels=kernels,
        sources=sources,
    )


def _kernel(name: str, entry: Mapping[str, Any], sources: Mapping[str, str]) -> KernelProfile:
    prefix = f"kernels.{name}."
    tiles = {(int(t["block_q"]), int(t["block_kv"])): float(t["ns"]) for t in entry["block_ns"]}
    _require_source(prefix + "block_ns", sources)
    if not tiles or min(min(tiles.values()), *map(min, tiles)) <= 0:
        raise ValueError(f"'{prefix}block_ns' needs at least one tile, with positive figures.")
    return KernelProfile(
        name=name,
        ctas_per_sm=int(_figure(entry, "ctas_per_sm", sources, prefix)),
        block_ns=tiles,
        head_dim=int(entry["head_dim"]),
        row_start_blocks=_figure(entry, "row_start_blocks", sources, prefix, lowest=0.0),
        miss_stall_ns=_figure(entry, "miss_stall_ns", sources, prefix, lowest=0.0),
        miss_shared_ns=_figure(entry, "miss_shared_ns", sources, prefix, lowest=0.0),
        calibrated_on=str(entry["calibrated_on"]),
    )


def _figure(
    table: Mapping[str, Any],
    field: str,
    sources: Mapping[str, str],
    prefix: str = "",
    lowest: float = 1.0,
) -> float:
    value = table[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= lowest:
        raise ValueError(f"'{prefix}{field}' is {value!r}; expected a number from {lowest:g} up.")
    _require_source(prefix + field, sources)
    return float(value)


def _require_source(field: str, sources: Mapping[str, str]) -> None:
    if not sources.get(field):
        raise ValueError(f"'{field}' names no source; add it to the [source] table.")
