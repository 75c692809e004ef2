"""Miss-ratio curves of the masks at hand, computed when the page is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from wavealign.errors import InputError
from wavealign.masks.block_mask import BlockMask
from wavealign.masks.files import load_mask
from wavealign.order.policies import build_schedule, parse_policy
from wavealign.report.page.figures import PAPER
from wavealign.report.page.gather import Block, Column, Unit, unit_of
from wavealign.report.page.l2 import given_l2
from wavealign.report.page.svg import Axis, Line, chart
from wavealign.report.progress import Progress
from wavealign.runs.launch import BASELINE, Launch
from wavealign.sim.curve import curve_sizes, hit_curve
from wavealign.sim.setup import DTYPE_BYTES, Setup
from wavealign.units import parse_heads

_MOST_MASKS = 12  # a page of curves; the rest is said to be left out
_KINDS = ("base", "paper", "best", "second")


@dataclass
class CurveSet:
    """The curves of a device and kernel, and of launches of one kind.

    Attributes:
        labels: settings that they belong to.
        title: device and kernel, and what is unusual about the launches.
        policies: what is drawn, with the class of each line.
        l2_bytes: sizes of L2 to mark; None for the device's own.
        masks: a name and a chart each.
        notes: what is missing, and why.
    """

    labels: list[str]
    title: str
    policies: list[tuple[str, str]]
    l2_bytes: set[int | None] = field(default_factory=set)
    masks: list[tuple[str, Markup]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def paths_of(given: Sequence[str], manifests: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Mask files: those given (folders for all their npz files), and those of manifests.

    Raises:
        InputError: a given path that isn't there, or a folder without masks.
    """
    found: list[Path] = []
    for path in map(Path, given):
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not files or not path.exists():
            raise InputError(f"{path}: holds no masks; expected an npz file, or a folder of them.")
        found += files
    for folder, manifest in manifests.items():
        for name in manifest.get("paths", {}).values():
            places = [Path(name), Path(folder) / name]
            found += [place for place in places if place.is_file()][:1]
    return list(dict.fromkeys(found))


def find_masks(
    units: Iterable[Unit], paths: Sequence[Path], given: int, notes: list[str],
    block: tuple[int, int] | None = None, key: str | None = None,
) -> dict[Unit, BlockMask]:  # fmt: skip
    """The masks that ran, found in files by digest.

    Args:
        units: what ran.
        paths: files, the first `given` of which a user named.
        given: a file among these that can't be read is an error, another one a note.
        notes: of files that were passed over.
        block, key: how to read files that don't say, as in `load_mask`.

    Raises:
        InputError: a file that a user named can't be read.
    """
    wanted = list(units)
    found: dict[Unit, BlockMask] = {}
    for number, path in enumerate(paths):
        if len(found) == len(wanted):
            break
        try:
            loaded = load_mask(path, block, key)
        except InputError as problem:
            if number < given:
                raise
            notes.append(f"mask passed over: {problem}")
            continue
        missing = [unit for unit in wanted if unit not in found]
        parts = {heads: _heads(loaded.mask, heads) for heads in {unit.heads for unit in missing}}
        for unit in missing:
            mask = parts[unit.heads]
            if mask is not None and mask.digest == unit.digest:
                found[unit] = mask
    return found


def _heads(mask: BlockMask, heads: str) -> BlockMask | None:
    try:
        chosen = parse_heads(heads, mask.H)
    except InputError:
        return None  # another mask's heads
    return mask if chosen == list(range(mask.H)) else mask.select_heads(chosen)


def curve_sets(
    blocks: Sequence[Block], masks: Mapping[Unit, BlockMask], jobs: int, quiet: bool
) -> list[CurveSet]:
    """Curves for each device and kernel: `original`, the paper's order, the two best ones.

    Settings share curves where their launches are of one kind and have the same waves.

    Args:
        blocks: of the page.
        masks: those at hand.
        jobs: threads.
        quiet: no progress.
    """
    sets: dict[tuple[object, ...], CurveSet] = {}
    work: list[tuple[CurveSet, Block, Column, Unit]] = []
    for block in blocks:
        setting, launches = block.setting, [row.result.launch for row in block.rows]
        parts = (setting.device, setting.kernel, setting.launch)
        name = (*parts, *sorted({launch.wave for launch in launches}))
        known = [(c, u) for c in block.columns for u in c.units[:1] if u in masks]
        if name not in sets:
            wave = "" if setting.wave is None else f"W = {setting.wave}"
            title = " · ".join(filter(None, (*parts, wave)))
            sets[name] = CurveSet([], title, _policies(block))
            every, there = len(block.columns), len(known)
            if there < every:
                note = f"{every - there} of {every} masks aren't at hand: name their files"
                sets[name].notes.append(f"{note} with --mask.")
            if there > _MOST_MASKS:
                note = f"The first {_MOST_MASKS} of {there} masks"
                sets[name].notes.append(f"{note}; wavealign curve draws the others.")
            work += [(sets[name], block, column, unit) for column, unit in known[:_MOST_MASKS]]
        sets[name].labels.append(block.label)
        sets[name].l2_bytes.add(given_l2(launches[0]))
    with Progress(len(work), "miss-ratio curves", quiet) as progress:
        for curves, block, column, unit in work:
            try:
                curves.masks.append(_curves(curves, block, column, unit, masks[unit], jobs))
            except InputError as problem:
                curves.notes.append(f"{column.label}: {problem}")
            progress.advance(column.label)
    return list(sets.values())


def _curves(
    curves: CurveSet, block: Block, column: Column, unit: Unit, mask: BlockMask, jobs: int
) -> tuple[str, Markup]:
    launch = next(row.result.launch for row in block.rows if unit_of(row.result) == unit)
    setups = [_setup(launch, mask, size) for size in curves.l2_bytes]
    setups.sort(key=lambda setup: setup.l2_capacity_bytes)
    sizes = sorted({size for setup in setups for size in curve_sizes(mask, setup)})
    lines = []
    for policy, kind in curves.policies:
        schedule = build_schedule(mask, policy, launch.wave, launch.seed, jobs)
        curve = hit_curve(mask, schedule, setups[0], sizes)
        if not curve.requested_bytes:
            raise InputError("the mask keeps no block.")
        ratios = zip(curve.sizes_bytes, curve.hit_frac, strict=True)
        points = [(size / 2**20, 1 - float(hit)) for size, hit in ratios]
        lines.append(Line(points, kind, policy))
    x = Axis("L2 size (MiB)", sizes[0] / 2**20, sizes[-1] / 2**20, binary=True)
    most = max(1e-3, *(value for line in lines for _, value in line.points))
    y = Axis("miss ratio (%)", 0.0, most, percent=True)
    names = ", ".join(name for name, _ in curves.policies)
    label = f"Miss ratio against L2 size, {column.label}, {names}"
    rules = []
    for setup in setups:
        at = setup.l2_capacity_bytes / 2**20
        whose = "given" if setup.l2_origin == "given" else launch.device
        rules.append((at, f"{whose}, {at:.0f} MiB"))
    name = column.label if len(column.units) == 1 else f"{column.label}, head {unit.heads}"
    return name, chart(x, y, label, lines=lines, verticals=rules)


def _setup(launch: Launch, mask: BlockMask, l2_bytes: int | None) -> Setup:
    """The terms of a launch's curve: one LRU over the K/V blocks that it read."""
    dtype = launch.dtype or "bf16"
    # Rows of earlier versions say the bytes of a K/V block alone.
    implied = (launch.kv_block_bytes or 0) // (2 * mask.block_kv * DTYPE_BYTES.get(dtype, 2))
    return Setup.make(
        launch.device, launch.kernel, l2_bytes=l2_bytes, wave=launch.wave,
        head_dim=launch.head_dim or implied, dtype=dtype, model="fast",
    )  # fmt: skip


def _policies(block: Block) -> list[tuple[str, str]]:
    """`original`, the paper's order, the best and the second best of the rest, with classes."""
    ranked = [s.policy for s in block.standings if s.policy not in (BASELINE, PAPER)]
    usable = filter(_buildable, ranked)
    return list(zip((BASELINE, PAPER, *usable), _KINDS, strict=False))


def _buildable(policy: str) -> bool:
    try:
        parse_policy(policy)
    except InputError:
        return False  # a schedule file, or a policy of another version
    return True
