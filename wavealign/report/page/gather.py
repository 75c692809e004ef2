"""What the page is about: settings, masks, policies, and what each policy gains on each mask.

A *setting* is all that a time depends on beside mask and policy: source, device, kernel, regime.
The order in which the rows were read decides nothing.
A *unit* is a launch's mask (digest and heads); a *family* is the units of one mask file; a *column*
of the page is a family as one launch or, where only its heads ran on their own, as the mean over
them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from wavealign.report.page.cells import Cell, column_cells, unit_cell
from wavealign.runs.files import Loaded, Row, in_order
from wavealign.runs.launch import BASELINE, Launch, LaunchKeys, head_numbers
from wavealign.runs.ranking import Standing, as_good, ranked, standings
from wavealign.runs.result import Result


@dataclass(frozen=True)
class Setting:
    """What a time depends on beside mask and policy.

    Attributes:
        source, device, kernel, regime: as in a row.
        model: of the simulator, None where measured.
        l2_capacity_bytes: the L2 modelled, None where measured.
        device_digest: of the profile that was simulated, where every row says it.
        launch: what is unusual about a launch: batch, K/V heads, head size, dtype.
        wave: rows in flight, where one mask ran with several; else None.
    """

    source: str
    device: str
    kernel: str
    regime: str
    model: str | None
    l2_capacity_bytes: int | None
    device_digest: str | None = None
    launch: str = ""
    wave: int | None = None


@dataclass(frozen=True)
class Unit:
    """The mask of a launch: digest, heads, name, and the bytes of a K/V block."""

    digest: str
    heads: str
    mask: str
    kv_block_bytes: int

    @property
    def single(self) -> bool:
        """Whether it is one head."""
        return re.fullmatch(r"\d+", self.heads) is not None


@dataclass(frozen=True)
class Column:
    """A mask as a reader thinks of it.

    Attributes:
        label: unique on the page.
        units: one launch, or the heads that ran on their own.
    """

    label: str
    units: tuple[Unit, ...]


@dataclass
class Block:
    """All of one setting.

    Attributes:
        setting: which.
        label: unique on the page.
        rows: its runs.
        columns: its masks.
        cells: by column label and policy.
        units: by unit and policy.
        families: the label of every unit's mask file.
        ranking: policies that ran on every column, by geometric mean of their speedups.
        standings: every policy with a speedup, best first.
    """

    setting: Setting
    label: str
    rows: list[Row]
    columns: list[Column] = field(default_factory=list)
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    units: dict[Unit, dict[str, Cell]] = field(default_factory=dict)
    families: Mapping[Unit, str] = field(default_factory=dict)
    ranking: list[tuple[str, float]] = field(default_factory=list)
    standings: list[Standing] = field(default_factory=list)

    def best(self, column: Column) -> Cell | None:
        """The fastest policy of a column; None where no time is known."""
        cells = [c for c in self.cells[column.label].values() if c.time_ms is not None]
        return min(cells, key=lambda c: (-(c.speedup or 0), c.time_ms), default=None)

    def as_good(self, column: Column, best: Cell) -> list[str]:
        """Other policies that gain as much as the best one, within 1 %."""
        return [
            cell.policy
            for cell in self.cells[column.label].values()
            if cell.policy != best.policy and as_good(cell.speedup, best.speedup)
        ]


def blocks(loaded: Loaded) -> list[Block]:
    """The settings, measured ones first, then those with most rows."""
    loaded_rows = in_order(loaded.rows)
    keys = LaunchKeys(row.result.launch for row in loaded_rows)
    by_setting: defaultdict[Setting, list[Row]] = defaultdict(list)
    for row in loaded_rows:
        by_setting[_setting(row.result.launch, keys)].append(row)
    found = [part for item in by_setting.items() for part in _split_waves(*item)]
    found.sort(key=lambda item: (item[0].source != "measured", -len(item[1])))
    labels = _labels([setting for setting, _ in found])
    families = _families(loaded_rows)
    return [
        _block(Block(setting, label, rows, families=families))
        for (setting, rows), label in zip(found, labels, strict=True)
    ]


def unit_of(row: Result) -> Unit:
    """The mask of a row's launch."""
    return Unit(row.mask_digest, row.heads, row.mask, row.kv_block_bytes)


def _setting(launch: Launch, keys: LaunchKeys) -> Setting:
    usual = {"batch": 1, "kv_heads": launch.head_count, "head_dim": 128, "dtype": "bf16"}
    values = zip(usual, keys.key(launch, ("source", *usual))[1:], strict=True)
    unusual = [f"{name} {value}" for name, value in values if value not in (None, usual[name])]
    _, digest = keys.key(launch, ("source", "device_digest"))
    return Setting(
        launch.source, launch.device, launch.kernel, launch.regime, launch.model,
        launch.l2_capacity_bytes, None if digest is None else str(digest), ", ".join(unusual),
    )  # fmt: skip


def _split_waves(setting: Setting, rows: list[Row]) -> list[tuple[Setting, list[Row]]]:
    """By wave, where a mask ran with several; a tile's own wave needn't be told apart."""
    waves: defaultdict[Unit, set[int]] = defaultdict(set)
    for row in rows:
        waves[unit_of(row.result)].add(row.result.wave)
    if all(len(found) == 1 for found in waves.values()):
        return [(setting, rows)]
    parts: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        parts[row.result.wave].append(row)
    return [(replace(setting, wave=wave), rows) for wave, rows in sorted(parts.items())]


def _labels(settings: Sequence[Setting]) -> list[str]:
    """Short names, with as much detail as tells them apart."""
    models: defaultdict[tuple[str, ...], set[object]] = defaultdict(set)
    profiles: defaultdict[tuple[str, ...], set[object]] = defaultdict(set)
    for s in settings:
        models[s.source, s.device, s.kernel, s.regime].add((s.model, s.l2_capacity_bytes))
        profiles[s.source, s.device].add(s.device_digest)

    def name(s: Setting) -> str:
        parts = [s.source, s.device, s.kernel]
        if s.regime != "single":
            parts.append("steady state" if s.regime == "steady" else s.regime)
        parts += [s.launch] if s.launch else []
        parts += [f"W = {s.wave}"] if s.wave is not None else []
        if len(models[s.source, s.device, s.kernel, s.regime]) > 1 and s.model is not None:
            parts += [f"{s.model} model", f"L2 {(s.l2_capacity_bytes or 0) / 2**20:.1f} MiB"]
        if len(profiles[s.source, s.device]) > 1:
            parts.append(f"profile {(s.device_digest or '')[:6]}")
        return " · ".join(parts)

    return [name(s) for s in settings]


def _families(rows: Sequence[Row]) -> dict[Unit, str]:
    """Units by mask file, as far as rows tell: one name, joined by the results they are in.

    Where a name stands for several files, the results' folder, their file or a digest is added.
    """
    origins: defaultdict[Unit, set[str]] = defaultdict(set)
    for row in rows:
        origins[unit_of(row.result)].add(row.origin)
    by_name: defaultdict[str, list[tuple[set[str], list[Unit]]]] = defaultdict(list)
    for unit in sorted(origins, key=_unit_order):
        joined, members = set(origins[unit]), [unit]
        apart = []
        for known, others in by_name[unit.mask]:
            if known & joined:
                joined, members = known | joined, [*others, *members]
            else:
                apart.append((known, others))
        by_name[unit.mask] = [*apart, (joined, members)]
    labels: dict[Unit, str] = {}
    for name, groups in by_name.items():
        for (_, members), suffix in zip(groups, _suffixes(groups), strict=True):
            labels |= dict.fromkeys(members, name + suffix)
    return labels


def _suffixes(groups: Sequence[tuple[set[str], list[Unit]]]) -> list[str]:
    """What tells files of one name apart; nothing for a single one."""
    if len(groups) == 1:
        return [""]
    first = [Path(min(origins)) for origins, _ in groups]
    folders = [path.parent.name if path.suffix == ".jsonl" else path.name for path in first]
    for choice in (folders, [path.stem for path in first]):
        if all(choice) and len(set(choice)) == len(choice):
            return [f" ({text})" for text in choice]
    return [f" ({units[0].digest[:6]})" for _, units in groups]


def _columns(units: Iterable[Unit], families: Mapping[Unit, str]) -> list[Column]:
    """The masks of a setting: whole launches, or the heads that ran on their own."""
    by_family: defaultdict[str, list[Unit]] = defaultdict(list)
    for unit in sorted(units, key=_unit_order):
        by_family[families[unit]].append(unit)
    columns = []
    for name, members in by_family.items():
        if len({unit.heads for unit in members}) < len(members):
            # Several files after all in the same results, or several sizes of a K/V block.
            for u in members:
                same = sum(other.digest == u.digest for other in members) > 1
                size = f", K/V blocks of {u.kv_block_bytes:,} bytes" if same else ""
                columns.append(Column(f"{name} [{u.heads}] {u.digest[:6]}{size}", (u,)))
            continue
        launches = [unit for unit in members if not unit.single]
        if len(launches) > 1:
            columns += [Column(f"{name} [{u.heads}]", (u,)) for u in launches]
        else:
            columns.append(Column(name, tuple(launches or members)))
    return columns


def _unit_order(unit: Unit) -> tuple[object, ...]:
    return unit.mask, not unit.single, head_numbers(unit.heads), unit.digest, unit.kv_block_bytes


def _block(block: Block) -> Block:
    by_unit: defaultdict[Unit, defaultdict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in block.rows:
        by_unit[unit_of(row.result)][row.result.policy].append(row)
    for unit, policies in by_unit.items():
        base = policies.get(BASELINE, [])
        block.units[unit] = {p: unit_cell(p, rows, base) for p, rows in policies.items()}
    block.columns = _columns(block.units, block.families)
    for column in block.columns:
        block.cells[column.label] = column_cells([block.units[u] for u in column.units])
    speedups: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for label, cells in block.cells.items():
        for policy, cell in cells.items():
            if cell.speedup is not None:
                speedups[policy][label] = cell.speedup
    block.ranking = ranked(speedups)
    if block.ranking:
        block.standings = standings(speedups, block.ranking[0][0])
    return block
