"""Small charts as SVG text, coloured by classes of the page's style sheet.

They are drawn 360 units wide, so that their text is legible both at phone width and enlarged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from wavealign.foreign import shown

WIDTH, HEIGHT = 360, 250
_Place = Callable[[float], float]
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 26, 40

_SHAPES = {
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "square": "M-3.6 -3.6H3.6V3.6H-3.6Z",
    "triangle": "M0 -4.6L4.4 3.4H-4.4Z", "diamond": "M0 -5L5 0L0 5L-5 0Z",
    "dot": "M-2.6 0a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0 -5.2 0Z",
}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """A range of values.

    Attributes:
        title: with its unit.
        low, high: ends, both positive where `log`.
        log: logarithmic.
        binary: logarithmic, ticks at powers of two.
        percent: values are shares, ticks are shown in %.
        suffix: of tick labels.
    """

    title: str
    low: float
    high: float
    log: bool = False
    binary: bool = False
    percent: bool = False
    suffix: str = ""

    def place(self, value: float) -> float:
        """From 0 at `low` to 1 at `high`."""
        if self.log or self.binary:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Values and labels."""
        if self.binary:
            powers = range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)
            values = [2.0**power for power in powers][:: -(-len(powers) // 8)]
            return [(value, f"{value:g}{self.suffix}") for value in values]
        if self.log and self.high / self.low > 8:
            values = _log_ticks(self.low, self.high)
            return [(value, f"{value:,.10g}{self.suffix}") for value in values]
        step = _step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        scale = 100 if self.percent else 1
        digits = max(0, -math.floor(math.log10(step * scale) + 1e-9))
        values = [i * step for i in range(first, last + 1)]
        return [(v, f"{v * scale + 0.0:.{digits}f}{self.suffix}") for v in values]


@dataclass(frozen=True)
class Mark:
    """A point.

    Attributes:
        x, y: values.
        shape: of `_SHAPES`.
        kind: class of the style sheet.
        tip: what is said of it.
        number: written beside it, odd ones above and even ones below.
    """

    x: float
    y: float
    shape: str
    kind: str
    tip: str
    number: int | None = None


@dataclass(frozen=True)
class Line:
    """Points joined; `steps` as a staircase."""

    points: Sequence[tuple[float, float]]
    kind: str
    tip: str = ""
    steps: bool = False


def span(values: Sequence[float], pad: float = 0.06, log: bool = False) -> tuple[float, float]:
    """Ends of an axis that holds the values, with some room.

    Args:
        values: at least one.
        pad: room at each end / the distance of the ends.
        log: of a logarithmic axis.
    """
    low, high = min(values), max(values)
    if log:
        room = max((high / low) ** pad, 1.15)
        return low / room, high * room
    room = max((high - low) * pad, abs(high) * 0.01, 1e-9)
    return low - room, high + room


def chart(
    x: Axis, y: Axis, label: str, marks: Sequence[Mark] = (), lines: Sequence[Line] = (),
    verticals: Sequence[tuple[float, str]] = (), diagonal: bool = False,
) -> Markup:  # fmt: skip
    """A chart.

    Args:
        x, y: axes.
        label: what it shows, for those who can't see it.
        marks: points, later ones on top.
        lines: beneath the points.
        verticals: x and text of vertical rules.
        diagonal: draw y = x.
    """
    inner_w, inner_h = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def px(value: float) -> float:
        return _LEFT + inner_w * x.place(value)

    def py(value: float) -> float:
        return _TOP + inner_h * (1 - y.place(value))

    out = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" class="chart" tabindex="0" role="img" '
        f'aria-label="{_text(label)}">',
        f'<text class="axis-title" x="4" y="13">{_text(y.title)}</text>',
        f'<text class="axis-title" x="{WIDTH - _RIGHT}" y="{HEIGHT - 6}" text-anchor="end">'
        f"{_text(x.title)}</text>",
    ]
    for value, text in y.ticks():
        at = py(value)
        out.append(
            f'<path class="grid" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>'
            f'<text class="tick" x="{_LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">'
            f"{_text(text)}</text>"
        )
    out += [
        f'<text class="tick" x="{px(value):.1f}" y="{HEIGHT - _BOTTOM + 15}" '
        f'text-anchor="middle">{_text(text)}</text>'
        for value, text in x.ticks()
    ]
    out.append(f'<path class="frame" d="M{_LEFT} {HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}"/>')
    for value, text in verticals:
        right = x.place(value) > 0.5
        out.append(
            f'<path class="rule" d="M{px(value):.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>'
            f'<text class="tick" x="{px(value) + (3 if right else -3):.1f}" y="{_TOP - 2}" '
            f'text-anchor="{"end" if right else "start"}">{_text(text)}</text>'
        )
    if diagonal:
        low, high = max(x.low, y.low), min(x.high, y.high)
        out.append(
            f'<path class="rule" d="M{px(low):.1f} {py(low):.1f}L{px(high):.1f} {py(high):.1f}"/>'
        )
    out += [_line(line, px, py) for line in lines]
    for mark in marks:
        where = f"translate({px(mark.x):.1f} {py(mark.y):.1f})"
        out.append(
            f'<path class="mark {escape(mark.kind)}" transform="{where}" d="{_SHAPES[mark.shape]}" '
            f'data-tip="{_text(mark.tip)}"/>'
        )
        if mark.number is not None:
            left = x.place(mark.x) > 0.93
            shift, drop = -7 if left else 7, -6 if mark.number % 2 else 14
            out.append(
                f'<text class="number" transform="{where}" x="{shift}" y="{drop}" '
                f'text-anchor="{"end" if left else "start"}">{mark.number}</text>'
            )
    return Markup("".join(out) + "</svg>")  # every value was escaped above


def _text(text: str) -> Markup:
    return escape(shown(text))


def key(shape: str, kind: str) -> Markup:
    """A mark for the legend."""
    return _legend("key", "-7 -7 14 14", f"mark {kind}", _SHAPES[shape])


def line_key(kind: str) -> Markup:
    """A line for the legend."""
    return _legend("key wide", "0 -7 28 14", f"line {kind}", "M1 0H27")


def _legend(size: str, box: str, kind: str, path: str) -> Markup:
    start = f'<svg class="{size}" viewBox="{box}" aria-hidden="true">'
    return Markup(f'{start}<path class="{kind}" d="{path}"/></svg>')


def _line(line: Line, px: _Place, py: _Place) -> str:
    parts = []
    for i, (x, y) in enumerate(line.points):
        if line.steps and i:
            parts.append(f"H{px(x):.1f}V{py(y):.1f}")
        else:
            parts.append(f"{'L' if i else 'M'}{px(x):.1f} {py(y):.1f}")
    tip = f' data-tip="{_text(line.tip)}"' if line.tip else ""
    return f'<path class="line {escape(line.kind)}" d="{"".join(parts)}"{tip}/>'


def _step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, near `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.7)


def _log_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    factors = (1,) if decades > 3 else (1, 3) if decades > 1.2 else (1, 2, 5)
    found = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factor in factors
        if low <= factor * 10.0**power <= high
    ]
    return found[:: math.ceil(len(found) / 6)]
