"""Picture (extra `report`): attention entropy and distance by layer, head and step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wavealign.report.plots import COLOURS, INK, check_plot, dress, new_figure, save

if TYPE_CHECKING:
    from wavealign.gpu.importance.diagnostics import Diagnosis

_PANELS = (
    ("entropy_nats", "attention entropy (nats)", "Blues"),
    ("distance_frac", "mean attention distance / that of uniform attention", "Oranges"),
)


def plot_diagnosis(found: Sequence[Diagnosis], title: str, path: str | Path) -> None:
    """Left, a line a layer (mean over its heads) over steps; right, every head at every step.

    Args:
        found: in any order; what is missing stays blank.
        title: above the picture.
        path: where to write it; the suffix chooses the format.
    """
    target = check_plot(path)
    steps = sorted({d.step for d in found})
    places = sorted({(d.layer, d.head) for d in found})
    figure = new_figure(11, 3.6 + 0.22 * len(places), title)
    axes = figure.subplots(2, 2, width_ratios=(1, 1.15))
    for (name, label, colours), (lines, heat) in zip(_PANELS, axes, strict=True):
        table = np.full((len(places), len(steps)), np.nan)
        for d in found:
            table[places.index((d.layer, d.head)), steps.index(d.step)] = getattr(d, name)
        _lines(lines, table, places, steps, label)
        image = heat.imshow(table, aspect="auto", cmap=colours, interpolation="nearest")
        figure.colorbar(image, ax=heat, pad=0.02).outline.set_visible(False)
        heat.set_xticks(range(len(steps)), [str(step) for step in steps])
        heat.set_yticks(range(len(places)), [f"layer {a}, head {b}" for a, b in places])
        heat.set_xlabel("step", fontsize=9.5, color=INK)
        heat.tick_params(labelsize=8, colors=INK, length=0)
        heat.spines[:].set_visible(False)
        _thin(heat, len(steps), len(places))
    save(figure, target)


def _lines(
    axis: Any, table: Any, places: list[tuple[int, int]], steps: list[int], label: str
) -> None:
    for i, layer in enumerate(sorted({layer for layer, _ in places})):
        mine = table[[place[0] == layer for place in places]]
        known = ~np.isnan(mine)
        counts = known.sum(0)
        mean = np.where(known, mine, 0).sum(0) / np.where(counts, counts, 1)
        mean[counts == 0] = np.nan
        axis.plot(
            steps, mean, color=COLOURS[i % len(COLOURS)], linewidth=1.8, marker="o",
            markersize=3.5, label=f"layer {layer}",
        )  # fmt: skip
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8.5, labelcolor=INK, ncols=2)
    dress(axis, "step", label)


def _thin(axis: Any, steps: int, places: int) -> None:
    """Few enough labels to be read."""
    ticks_x, ticks_y = axis.get_xticklabels(), axis.get_yticklabels()
    for ticks, count, most in ((ticks_x, steps, 12), (ticks_y, places, 40)):
        every = -(-count // most)
        for i, tick in enumerate(ticks):
            tick.set_visible(i % every == 0)
