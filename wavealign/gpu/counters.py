"""Hardware counters: which ones, how Nsight Compute prints them, and what they say."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wavealign.errors import WaveAlignError

_SECTOR_BYTES = 32

# Quantity -> metrics that give it, the first that the chip has is collected. `tex` is what SMs
# request, TMA included; `fabric` what one L2 partition requests from the other.
QUANTITIES: dict[str, tuple[str, ...]] = {
    "tex": ("lts__t_sectors_srcunit_tex.sum",),
    "tex_hit": ("lts__t_sectors_srcunit_tex_lookup_hit.sum",),
    "fabric": ("lts__t_sectors_srcunit_ltcfabric.sum",),
    "fabric_hit": ("lts__t_sectors_srcunit_ltcfabric_lookup_hit.sum",),
    "sector_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "read": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "write": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "time": ("gpu__time_duration.sum",),
    "cycles": ("sm__cycles_elapsed.max",),
    "tensor_pct": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    ),
}
REQUIRED = ("tex", "tex_hit", "read", "time")
"""What has to be there for a row to be worth anything."""

METRICS: tuple[str, ...] = tuple(name for names in QUANTITIES.values() for name in names)


@dataclass(frozen=True)
class Counters:
    """What the counters say about one launch. What the chip doesn't count is None.

    Attributes:
        kernel: its name.
        time_ms: time of the replay that measured time, at the clock of that replay.
        l2_hit_frac: share of the SMs' requests that hit in L2, in the partition that was
            asked or, behind it, in the other one.
        lts_sector_hit_frac: the profiler's own hit rate, which counts a request that crosses
            to the other partition twice.
        l2_requested_bytes: what SMs requested from L2, reads and writes.
        fabric_bytes: what one partition requested from the other.
        hbm_read_bytes, hbm_write_bytes: traffic of device memory.
        tensor_active_frac: share of elapsed cycles in which the tensor pipe was busy.
        clock_ghz: SM clock, cycles / time.
    """

    kernel: str
    time_ms: float | None = None
    l2_hit_frac: float | None = None
    lts_sector_hit_frac: float | None = None
    l2_requested_bytes: int | None = None
    fabric_bytes: int | None = None
    hbm_read_bytes: int | None = None
    hbm_write_bytes: int | None = None
    tensor_active_frac: float | None = None
    clock_ghz: float | None = None


def parse_csv(text: str) -> list[dict[str, str]]:
    """Launches in the output of ``ncu --csv --page raw``, one dict each, in order.

    A dict maps column and metric names to what is printed, numbers without thousands
    separators. Both layouts are read: wide (a row of units, then a row a launch) and long (a
    row a metric). Lines that aren't part of the table are skipped.

    Raises:
        WaveAlignError: no launch in it, with the gist of what ncu said.
    """
    header: list[str] = []
    launches: dict[tuple[str, str], dict[str, str]] = {}
    for line in text.splitlines():
        cells = next(csv.reader([line])) if line.startswith('"') else []
        if cells and cells[0] == "ID" and "Kernel Name" in cells:
            header = cells
        elif cells and len(cells) == len(header) and cells[0].isdecimal():
            row = dict(zip(header, cells, strict=True))
            launch = launches.setdefault((row["ID"], row.get("Process ID", "")), {})
            if "Metric Name" in row:
                row = {"Kernel Name": row["Kernel Name"], row["Metric Name"]: row["Metric Value"]}
            launch.update((k, v.replace(",", "") if "__" in k else v) for k, v in row.items())
    if not launches:
        raise WaveAlignError(f"ncu profiled no kernel; it said: {gist(text)}")
    return list(launches.values())


def derive(row: Mapping[str, str]) -> Counters:
    """The counters of a launch that `parse_csv` read."""
    value = {q: _first(row, names) for q, names in QUANTITIES.items()}
    tex, tex_hit, fabric_hit = value["tex"], value["tex_hit"], value["fabric_hit"]
    time_ns, cycles = value["time"], value["cycles"]
    hit_frac = None
    if tex and tex_hit is not None and fabric_hit is not None:
        hit_frac = min(1.0, (tex_hit + fabric_hit) / tex)  # counted in passes that differ a little
    return Counters(
        kernel=row["Kernel Name"], time_ms=None if time_ns is None else time_ns / 1e6,
        l2_hit_frac=hit_frac, lts_sector_hit_frac=_fraction(value["sector_hit_pct"]),
        l2_requested_bytes=_count(tex, _SECTOR_BYTES),
        fabric_bytes=_count(value["fabric"], _SECTOR_BYTES), hbm_read_bytes=_count(value["read"]),
        hbm_write_bytes=_count(value["write"]), tensor_active_frac=_fraction(value["tensor_pct"]),
        clock_ghz=cycles / time_ns if cycles is not None and time_ns else None,
    )  # fmt: skip


def check_control(counters: Counters, read_bytes: int) -> str | None:
    """Why the counters can't be trusted, judged by a kernel whose traffic is known, or None.

    Args:
        counters: of a control kernel that streams `read_bytes` from HBM once, with no reuse.
        read_bytes: how many.
    """
    start = f"a control kernel that reads {read_bytes:,} bytes once, with no reuse, has"
    read, requested = counters.hbm_read_bytes, counters.l2_requested_bytes
    for found, what in ((read, "HBM reads"), (requested, "bytes requested from L2")):
        if found is None:
            return f"{start} no count of {what}."
        if abs(found - read_bytes) > 0.03 * read_bytes:
            return f"{start} {found:,} {what}; is the GPU idle otherwise?"
    if counters.l2_hit_frac is None:
        return f"{start} no L2 hit ratio."
    if counters.l2_hit_frac >= 0.05:
        return f"{start} an L2 hit ratio of {counters.l2_hit_frac:.3f}."
    return None


def last_lines(text: str) -> str:
    """The end of an output, on one line."""
    return " | ".join(line.strip() for line in text.splitlines() if line.strip())[-400:]


def gist(text: str) -> str:
    """What ncu complains of, or else the end of what it said."""
    for sign in ("==ERROR==", "==WARNING=="):
        if lines := [line for line in text.splitlines() if line.startswith(sign)]:
            return last_lines("\n".join(lines))
    return last_lines(text) or "nothing"


def _first(row: Mapping[str, str], names: Iterable[str]) -> float | None:
    """The first of these metrics that has a number."""
    for name in names:
        try:
            value = float(row.get(name, "n/a"))
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return None


def _fraction(percent: float | None) -> float | None:
    return None if percent is None else min(1.0, percent / 100)


def _count(value: float | None, unit: int = 1) -> int | None:
    return None if value is None else round(value * unit)
