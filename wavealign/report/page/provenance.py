"""How each figure was obtained: tool, model, device profile, seeds, cards, clocks, digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wavealign.errors import InputError
from wavealign.masks.block_mask import BlockMask
from wavealign.report.page.gather import Block, Unit, unit_of
from wavealign.runs.files import Row
from wavealign.runs.result import Result
from wavealign.sim.devices import load_device
from wavealign.units import format_size


@dataclass(frozen=True)
class MaskFacts:
    """A mask that ran: name, heads, digest, shape and density where they are known."""

    mask: str
    heads: str
    digest: str
    shape: str
    density: float | None


def setting_facts(block: Block) -> list[tuple[str, str]]:
    """Terms and what they are, of one setting."""
    rows = [row.result for row in block.rows]
    facts = [
        ("rows", f"{len(rows)} on {len(block.columns)} masks"),
        ("WaveAlign", _values(rows, "version")),
        ("rows in flight", _values(rows, "wave")),
        ("seeds", _values(rows, "seed")),
    ]
    if block.setting.source == "measured":
        facts += _measured_facts(rows)
    else:
        facts += [
            ("model", f"{block.setting.model}, {block.setting.regime} regime"),
            ("L2 modelled", format_size(block.setting.l2_capacity_bytes or 0)),
        ]
        facts += _profile_facts(block)
        facts.append(("digest of the profile", _values(rows, "device_digest")))
    planning = [row.planning_ms for row in block.rows if row.planning_ms is not None]
    if planning:
        facts.append(("planning time", f"on the CPU that ran the trials, {len(planning)} trials"))
    return [(term, text) for term, text in facts if text]


def _measured_facts(rows: Sequence[Result]) -> list[tuple[str, str]]:
    clocks = [row.clock_ghz for row in rows if row.clock_ghz is not None]
    spreads = [row.time_spread_frac for row in rows if row.time_spread_frac is not None]
    errors = [row.error_frac for row in rows if row.error_frac is not None]
    checked = "not checked against float32"
    if errors:
        least = f"{len(errors)} of {len(rows)} checked"
        checked = f"{least}, error against float32 at most {max(errors):.1e}"
    return [
        ("card", _values(rows, "gpu")), ("driver", _values(rows, "driver")),
        ("kernel", _values(rows, "backend_version")),
        ("SM clock", f"{min(clocks):.2f} to {max(clocks):.2f} GHz" if clocks else "not read"),
        ("launches a row", _values(rows, "repeats")),
        ("spread of launches", f"interquartile range up to {max(spreads):.1%}" if spreads else ""),
        ("L2 before counted launches", _cache(rows)), ("output", checked),
    ]  # fmt: skip


def _cache(rows: Sequence[Result]) -> str:
    words = {"all": "flushed", "none": "as it was"}
    found = {words.get(row.cache_control, "") for row in rows if row.cache_control is not None}
    return ", ".join(sorted(found))


def _profile_facts(block: Block) -> list[tuple[str, str]]:
    """What the device's profile says of itself."""
    try:
        profile = load_device(block.setting.device)
        kernel = profile.kernel(block.setting.kernel)
    except InputError:
        return [("device profile", "not at hand (a file of one's own)")]
    calibrated = kernel.calibrated_on or "nothing: an estimate; trust hit ratios before times"
    fields = ("l2_bytes", "hbm_bytes_per_s", f"kernels.{kernel.name}.block_cycles")
    sources = [f"{name}: {profile.sources[name]}" for name in fields if name in profile.sources]
    return [
        ("device profile", f"{profile.name}, {profile.title}"),
        ("calibrated on", calibrated),
        ("figures from", "; ".join(sources)),
    ]


def mask_facts(rows: Iterable[Row], masks: Mapping[Unit, BlockMask]) -> list[MaskFacts]:
    """Every mask that ran, once."""
    found: dict[tuple[str, str, str], MaskFacts] = {}
    for row in rows:
        result, mask = row.result, masks.get(unit_of(row.result))
        key = (result.mask, result.heads, result.mask_digest)
        if key in found and found[key].density is not None:
            continue
        shape, density = "", result.density
        if mask is not None:
            shape = f"{mask.H} × {mask.M} × {mask.N}, blocks of {mask.block_q}×{mask.block_kv}"
            density = mask.density
        found[key] = MaskFacts(*key, shape, density)
    return sorted(found.values(), key=lambda f: (f.mask, len(f.heads), f.heads, f.digest))


def _values(rows: Sequence[Result], name: str) -> str:
    values: dict[Any, None] = dict.fromkeys(getattr(row, name) for row in rows)
    known = [value for value in values if value is not None]
    if all(isinstance(value, int) for value in known):
        known.sort()
    shown = [str(value) for value in known]
    if len(shown) > 6:
        return f"{', '.join(shown[:5])} and {len(shown) - 5} more"
    return ", ".join(shown)
