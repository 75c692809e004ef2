"""Picture (extra `report`): L2 hit ratio over L2 size, a line a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wavealign.report.plots import COLOURS, MUTED, check_plot, dress, labelled, new_figure, save
from wavealign.sim.curve import Curve
from wavealign.units import format_size

_LABEL_GAP = 4.5  # points of hit ratio, so that labels of lines that meet stay apart


def plot_curves(
    curves: Sequence[Curve], l2_capacity_bytes: int, title: str, path: str | Path
) -> None:
    """Hit ratio over size, labelled at the lines' ends, the device's L2 as a dashed line.

    Args:
        curves: all of the same sizes, ascending.
        l2_capacity_bytes: where the dashed line stands.
        title: above the picture.
        path: where to write it; the suffix chooses the format.
    """
    target = check_plot(path)
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = new_figure(8.5, 4.8, title)
    axis = figure.subplots()
    ends = []
    for i, curve in enumerate(curves):
        colour = COLOURS[i % len(COLOURS)]
        percent = 100 * curve.hit_frac
        axis.plot(curve.sizes_bytes / 2**20, percent, color=colour, linewidth=1.8)
        ends.append((float(percent[-1]) if curve.requested_bytes else 0.0, i, curve, colour))
    height = 102.0
    for end, _, curve, colour in sorted(ends, key=lambda item: (-item[0], item[1])):
        height = min(end, height - _LABEL_GAP)
        axis.annotate(
            labelled(curve.policy), (1.0, height), (6, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=9, color=colour,
        )  # fmt: skip
    axis.axvline(l2_capacity_bytes / 2**20, color=MUTED, linewidth=1.0, linestyle="--")
    axis.annotate(
        f"L2: {format_size(l2_capacity_bytes)}", (l2_capacity_bytes / 2**20, 0.02), (4, 0),
        xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8.5, color=MUTED,
    )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_ylim(0, 100)
    axis.margins(x=0)
    dress(axis, "L2 size (MiB)", "L2 hit ratio (%)")
    save(figure, target)
