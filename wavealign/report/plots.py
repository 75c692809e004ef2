"""Pictures (extra `report`): policies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wavealign._extras import require
from wavealign.errors import InputError
from wavealign.foreign import shown
from wavealign.outputs import check_writable, whole_file
from wavealign.runs.baseline import speedup
from wavealign.runs.result import Result

FORMATS = (".png", ".svg", ".pdf")

_MOST_LABEL = 120  # characters

BLUE, ORANGE, INK, MUTED = "#3b6fb6", "#d9822b", "#1f2328", "#6b7280"
COLOURS = (BLUE, ORANGE, "#3f8f6b", "#8a5fb0", MUTED, "#b5475d", "#8a6d3b", "#2f8fa3")


def check_plot(path: str | Path) -> Path:
    """The path, if a picture can be made and written there.

    Raises:
        InputError: an unknown format or a path that can't be written.
        MissingCapabilityError: matplotlib isn't installed.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise InputError(f"{target}: unknown picture format; expected {', '.join(FORMATS)}.")
    require("matplotlib", "report", "--plot")
    return check_writable(target)


def plot_policies(
    results: Sequence[Result], baseline: Result | None, title: str, path: str | Path
) -> None:
    """Bars of L2 hit ratio, HBM reads and speedup, one row a policy.

    Args:
        results: rows of one launch, in the order to show them.
        baseline: the run of `original` that speedup refers to.
        title: above the picture.
        path: where to write it; the suffix chooses the format.
    """
    target = check_plot(path)
    panels: list[tuple[str, list[float], str]] = [
        ("L2 hit ratio (%)", [100 * (r.l2_hit_frac or 0.0) for r in results], "{:.1f}"),
        ("HBM reads (GB)", [(r.hbm_read_bytes or 0) / 1e9 for r in results], "{:.1f}"),
    ]
    if baseline is not None and baseline.time_ms:
        speedups = [speedup(baseline, result) or 0.0 for result in results]
        panels.append(("speedup over original", speedups, "{:.2f}x"))
    figure = new_figure(10.5, 1.3 + 0.36 * len(results), title)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    best = max(range(len(results)), key=lambda i: results[i].l2_hit_frac or 0.0, default=0)
    for axis, (label, values, text) in zip(axes, panels, strict=True):
        _bars(axis, label, values, text, best)
    axes[0].set_yticks(range(len(results)), [labelled(r.policy) for r in results])
    axes[0].invert_yaxis()
    save(figure, target)


def new_figure(width: float, height: float, title: str) -> Any:
    """An empty picture that needs no display.

    Args:
        width, height: in inches.
        title: above it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(labelled(title), x=0.01, ha="left", fontsize=11, color=INK)
    return figure


def labelled(text: str) -> str:
    """A name as a picture shows it."""
    return shown(text, _MOST_LABEL)


def dress(axis: Any, x: str, y: str = "", grid: str = "both") -> None:
    """Labels, ticks and lines in the house style.

    Args:
        axis: of a picture.
        x, y: labels.
        grid: ``"both"``, or ``"x"`` where the other direction has no scale.
    """
    axis.set_xlabel(x, fontsize=9.5, color=INK)
    axis.set_ylabel(y, fontsize=9.5, color=INK)
    axis.tick_params(labelsize=9, colors=MUTED, length=0)
    axis.spines[["top", "right", *(["bottom"] if grid == "x" else [])]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#c9ced6")
    axis.grid(axis=grid, color="#e6e9ee", linewidth=0.8)
    axis.set_axisbelow(True)


def save(figure: Any, target: Path) -> None:
    """Write a picture, whole or not at all.

    No date or version is inside: the same results make the same file. A dollar sign in a name is
    one, and begins no formula.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    metadata = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    suffix = target.suffix.lower()
    with whole_file(target) as stream, rc_context({"text.parse_math": False}):
        figure.savefig(stream, dpi=150, metadata=metadata[suffix], format=suffix[1:])


def _bars(axis: Any, label: str, values: list[float], text: str, best: int) -> None:
    colours = [ORANGE if i == best else BLUE for i in range(len(values))]
    axis.barh(range(len(values)), values, color=colours, height=0.68)
    for i, value in enumerate(values):
        axis.annotate(
            text.format(value), (value, i), (3, 0), textcoords="offset points", va="center",
            fontsize=8.5, color=INK,
        )  # fmt: skip
    axis.set_xlim(0, 1.22 * max(values, default=1.0) or 1.0)
    dress(axis, label, grid="x")
    for tick in axis.get_yticklabels():
        tick.set_color(INK)
