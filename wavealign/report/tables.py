"""Tables for people: results, mask statistics, policies, devices. JSON is made elsewhere."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, OverflowMethod
from rich.table import Table

from wavealign.foreign import shown
from wavealign.masks.block_mask import BlockMask
from wavealign.masks.stats import MaskStats
from wavealign.methods.registry import Method
from wavealign.order.parameters import Parameter, format_value
from wavealign.order.registry import Entry
from wavealign.runs.baseline import change, speedup
from wavealign.runs.result import Result
from wavealign.sim.curve import Curve
from wavealign.sim.devices import DeviceProfile
from wavealign.sim.setup import Setup
from wavealign.units import decimal_size, decimals, format_size

if TYPE_CHECKING:
    from wavealign.gpu.importance.diagnostics import Diagnosis

_STATS = ("head", "density", "NNZ mean", "spread", "min", "max")
_MOST_CELL = 200  # characters
_PIPE_WIDTH = 200  # columns where stdout is no terminal: nothing is cut off


def print_table(table: Table) -> None:
    """Write a table to stdout, whole even where stdout is a pipe or a narrow terminal.

    Figures stand in right-aligned columns. They are never shortened: a terminal that is too narrow
    breaks the lines.
    """
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    if any(column.justify == "right" for column in table.columns):
        needed = 0
        for column in table.columns:
            texts = [str(cell) for cell in (column.header, *column.cells)]
            column.no_wrap = column.justify == "right"
            if not column.no_wrap:
                texts = [word for text in texts for word in text.split()]
            column.min_width = max((cell_len(text) for text in texts), default=0)
            needed += column.min_width + table.padding[1] + table.padding[3]
        console.width = max(console.width, needed)
    console.print(table)


def launch_lines(mask: BlockMask, name: str, heads: str, setup: Setup) -> list[str]:
    """What is simulated, in a few lines: mask, device, L2.

    Args:
        mask: of the launch.
        name: of its file.
        heads: which of them, e.g. ``"0,3-7"``.
        setup: of the simulation.
    """
    block_bytes = setup.kv_bytes(mask.block_kv)
    device, kernel = setup.device, setup.kernel
    return [
        f"mask    {name}, heads {heads}: {mask.M} x {mask.N} blocks of {mask.block_q} x "
        f"{mask.block_kv} tokens, density {mask.density:.3f}",
        f"device  {device.name} ({device.title}), {kernel.name}: {setup.wave} rows in flight",
        f"L2      {setup.l2_capacity_bytes:,} bytes ({setup.l2_origin}) = "
        f"{setup.capacity_blocks(mask)} K/V blocks of {block_bytes:,} bytes; a head's K/V is "
        f"{setup.kv_bytes(mask.tokens_kv):,} bytes",
    ]


def timing_line(setup: Setup) -> str:
    """Where the setup's times come from."""
    if setup.kernel.calibrated_on:
        return f"timing  calibrated on {setup.kernel.calibrated_on}"
    return "timing  an estimate, not calibrated on this device: compare hit ratios rather than ms"


def results_table(results: Sequence[Result], baselines: dict[int | None, Result]) -> Table:
    """One row a run, with the change against the `original` of the same head (or launch)."""
    per_head = any(result.head is not None for result in results)
    headings = ("L2 hit", "HBM reads", "change", "OPT", "time", "speedup", "limit", "gap", "binds")
    table = table_frame("policy", right=headings, first="head" if per_head else None)
    size = decimal_size(max((r.hbm_read_bytes or 0 for r in results), default=0))
    duration = decimals(max((r.time_ms or 0.0 for r in results), default=0.0), "ms")
    for result in results:
        base, took = baselines.get(result.head), result.outcome
        table.add_row(
            *([str(result.head)] if per_head else []), result.policy,
            figure(took.l2_hit_frac, "{:.1f} %", 100), figure(took.hbm_read_bytes, size),
            figure(change(base, result, "hbm_read_bytes"), "{:+.1f} %", 100),
            figure(took.belady_bytes, size), figure(took.time_ms, duration),
            figure(speedup(base, result), "{:.3f}x"), figure(took.limit_ms, duration),
            figure(took.gap, "{:.2f}"), took.bound or "-",
        )  # fmt: skip
    return table


def curves_table(curves: Sequence[Curve], l2_capacity_bytes: int) -> Table:
    """L2 hit ratios in %, one row a size, one column a policy; `*` marks the device's size."""
    table = table_frame("", right=[curve.policy for curve in curves], first="L2 size")
    sizes_bytes = curves[0].sizes_bytes
    places = next(
        (n for n in (1, 2) if len({format_size(s, n) for s in sizes_bytes}) == len(sizes_bytes)), 3
    )
    for i, size_bytes in enumerate(sizes_bytes):
        table.add_row(
            format_size(size_bytes, places),
            "*" if size_bytes == l2_capacity_bytes else "",
            *(f"{100 * c.hit_frac[i]:.1f}" if c.requested_bytes else "-" for c in curves),
        )
    return table


def stats_table(
    rows: Iterable[MaskStats], setup: Setup, block_kv: int, recalls: Sequence[float] | None = None
) -> Table:
    """Mask statistics, one row a head.

    Args:
        rows: of each head, and of all.
        setup: whose L2 and element size the working set is told by.
        block_kv: tokens of a K/V block.
        recalls: attention mass kept, one a row, where it is known.
    """
    known = ("recall",) if recalls is not None else ()
    table = table_frame(right=(*_STATS, "empty rows", "overlap", "K/V set", "of L2", *known))
    for index, stats in enumerate(rows):
        working_set = stats.working_set_bytes(setup.kv_bytes(block_kv))
        table.add_row(
            *_stats_cells(stats), str(stats.empty_rows), figure(stats.neighbour_overlap, "{:.2f}"),
            format_size(working_set), f"{working_set / setup.l2_capacity_bytes:.2f}x",
            *([f"{recalls[index]:.3f}"] if recalls is not None else []),
        )  # fmt: skip
    return table


def policies_table(entries: Iterable[Entry]) -> Table:
    """The policy registry."""
    headings = ("kind", "name", "what it does", "parameters", "cost per head", "source")
    table = table_frame(*headings, overflow="fold")
    for entry in entries:
        names = ", ".join(parameter.name for parameter in entry.parameters)
        source = f"{entry.source} (extra `{entry.extra}`)" if entry.extra else entry.source
        table.add_row(entry.kind, entry.name, entry.formula, names, entry.cost, source)
    return table


def policy_parameters_table(entries: Iterable[Entry]) -> Table:
    """Parameters of the registry's row orders and visit orders, equal ones in one row."""
    owners: dict[Parameter, list[str]] = {}
    for entry in entries:
        for parameter in entry.parameters if entry.kind != "alias" else ():
            owners.setdefault(parameter, []).append(entry.name)
    table = table_frame("parameter", "default", "allowed", "what it is", "of", overflow="fold")
    for parameter, names in owners.items():
        default = "-" if parameter.default is None else format_value(parameter.default)
        of = ", ".join(names)
        table.add_row(parameter.name, default, parameter.range_text, parameter.doc, of)
    return table


def methods_table(methods: Iterable[Method]) -> Table:
    """The method registry."""
    table = table_frame("name", "keeps", "cost per head", "row NNZ", "source", overflow="fold")
    for method in methods:
        table.add_row(method.name, method.formula, method.cost, method.row_nnz, method.source)
    return table


def made_table(rows: Iterable[MaskStats]) -> Table:
    """What a method made, one row a head."""
    table = table_frame(right=_STATS)
    for stats in rows:
        table.add_row(*_stats_cells(stats))
    return table


def _stats_cells(stats: MaskStats) -> list[str]:
    """What stands under `_STATS`."""
    return [
        "all" if stats.head is None else str(stats.head), f"{stats.density:.3f}",
        f"{stats.row_nnz_mean:.1f}", f"{stats.row_nnz_spread:.2f}",
        str(stats.row_nnz_min), str(stats.row_nnz_max),
    ]  # fmt: skip


def diagnosis_table(found: Sequence[Diagnosis], per_head: bool) -> Table:
    """Attention entropy and distance: a row a step and layer (means over heads), or a head."""
    which = ("head", "entropy") if per_head else ("heads", "entropy", "spread")
    table = table_frame(right=("step", "layer", *which, "distance", "of uniform"))
    groups: dict[tuple[int, int, int], list[Diagnosis]] = {}
    for one in found:
        groups.setdefault((one.step, one.layer, one.head if per_head else -1), []).append(one)
    for (step, layer, head), members in groups.items():
        entropies = [one.entropy_nats for one in members]
        table.add_row(
            *(str(step), str(layer), str(head if per_head else len(members))),
            f"{statistics.fmean(entropies):.3f}",
            *([] if per_head else [f"{statistics.pstdev(entropies):.3f}"]),
            f"{statistics.fmean(one.distance for one in members):,.1f}",
            f"{statistics.fmean(one.distance_frac for one in members):.3f}",
        )
    return table


def devices_table(profiles: Iterable[DeviceProfile]) -> Table:
    """Device profiles, one row a kernel."""
    table = table_frame()
    for heading in ("device", "", "SMs", "L2", "effective", "HBM", "kernel", "timing"):
        table.add_column(heading, justify="right" if heading in ("SMs", "L2") else "left")
    for profile in profiles:
        sizes = (format_size(size) for size in (profile.l2_bytes, profile.l2_effective_bytes))
        card = (profile.name, profile.title, str(profile.sms), *sizes)
        hbm = f"{profile.hbm_bytes_per_s / 1e12:.2f} TB/s"
        for kernel in profile.kernels.values():
            timing = "calibrated" if kernel.calibrated_on else "estimate"
            table.add_row(*card, hbm, kernel.name, timing)
    return table


class Frame(Table):
    """A table whose cells are text: what a name holds is neither markup nor an escape sequence."""

    def add_row(self, *cells: Any, **how: Any) -> None:
        """Add one; a styled cell is of our own making."""
        texts = (shown(cell, _MOST_CELL) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*texts, **how)


def table_frame(
    *left: str,
    right: Iterable[str] = (),
    first: str | None = None,
    overflow: OverflowMethod = "ellipsis",
) -> Table:
    """An empty table in the house style.

    Args:
        left: headings of columns of words.
        right: headings of columns of figures after these.
        first: heading of a column of figures before them.
        overflow: what becomes of words that are too long.
    """
    table = Frame(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    if first is not None:
        table.add_column(first, justify="right")
    for heading in left:
        table.add_column(heading, overflow=overflow)
    for heading in right:
        table.add_column(shown(heading, _MOST_CELL), justify="right")
    return table


def figure(value: float | None, form: str | Callable[[float], str], scale: float = 1) -> str:
    """A figure in words, or a dash where there is none.

    Args:
        value: the figure, or None.
        form: how it is written, e.g. ``"{:.1f} %"``; or what writes it.
        scale: times the value, 100 for percent.
    """
    if value is None:
        return "-"
    return form.format(scale * value) if isinstance(form, str) else form(value)
