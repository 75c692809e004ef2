"""A generalized Hilbert curve through a box of any size.

A box is walked from one corner to the corner at the other end of its first axis. It is cut into
smaller boxes that are walked the same way, each beginning beside the end of the one before:

- flat boxes (one cell thick in one direction): two halves along the first axis where it is
  long, else over, along and back;
- solid boxes: two halves where the first axis is long; over, along and back in the plane of the
  first axis and the longer of the other two where that one is much longer; else in five parts,
  each a corner-to-corner walk.

Halves are kept even where the box is longer than two cells, because an odd box can't be left at
the wanted corner by unit steps alone. Where sizes are odd some steps remain diagonal, never
longer than one cell in each direction: what matters here is locality.

The curve for powers of two is Hilbert's (1891); the generalisation by cutting boxes follows the
idea of J. Cerveny's gilbert (2019), in an implementation of our own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Axis = tuple[int, int]
"""Direction along a coordinate, and the signed number of cells: ``(coordinate, cells)``."""

Box = tuple[tuple[int, int, int], tuple[Axis, Axis, Axis]]
"""First cell, and the three axes in the order in which they matter."""


def hilbert_curve(shape: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """The cells of a box along the curve, int64 ``(cells, 3)``.

    Args:
        shape: cells in each direction, each at least 1.
    """
    axes = sorted(((axis, size) for axis, size in enumerate(shape)), key=lambda a: -a[1])
    pieces: list[npt.NDArray[np.int64]] = []
    todo: list[Box] = [((0, 0, 0), (axes[0], axes[1], axes[2]))]
    while todo:
        corner, (a, b, c) = todo.pop()
        if abs(b[1]) < abs(c[1]):
            b, c = c, b
        if abs(c[1]) == 1 and (abs(b[1]) == 1 or abs(a[1]) == 1):
            pieces.append(_line(corner, a if abs(b[1]) == 1 else b))
        else:
            todo.extend(reversed(_cut(corner, a, b, c)))
    return np.concatenate(pieces)


def _line(corner: tuple[int, int, int], axis: Axis) -> npt.NDArray[np.int64]:
    coordinate, cells = axis
    line = np.tile(np.asarray(corner, dtype=np.int64), (abs(cells), 1))
    line[:, coordinate] += np.sign(cells) * np.arange(abs(cells))
    return line


def _cut(corner: tuple[int, int, int], a: Axis, b: Axis, c: Axis) -> list[Box]:
    """The parts of a box that isn't a line, in walking order; `b` is at least as long as `c`."""
    long_a, long_b, long_c = abs(a[1]), abs(b[1]), abs(c[1])
    if 2 * long_a > 3 * long_b:
        front, back = _halve(a)
        return [(corner, (front, b, c)), (_move(corner, front), (back, b, c))]
    if long_c == 1 or 3 * long_b > 4 * long_c:
        return _over_along_back(corner, a, b, c)
    return _five(corner, a, b, c)


def _over_along_back(corner: tuple[int, int, int], a: Axis, b: Axis, c: Axis) -> list[Box]:
    """Half of `b` over, all of `a` along the other half, half of `b` back."""
    near_a, far_a = _halve(a)
    near_b, far_b = _halve(b)
    end = _last(_move(_move(corner, near_a), far_a), far_a)
    return [
        (corner, (near_b, near_a, c)),
        (_move(corner, near_b), (a, far_b, c)),
        (_last(_move(end, near_b), near_b), (_back(near_b), _back(far_a), c)),
    ]


def _five(corner: tuple[int, int, int], a: Axis, b: Axis, c: Axis) -> list[Box]:
    """A quarter up `b`, along `c`, across `a` at the far side of both, and the way back."""
    near_a, far_a = _halve(a)
    near_b, far_b = _halve(b)
    near_c, far_c = _halve(c)
    over = _move(corner, near_b)
    end = _last(_move(corner, a), a)
    return [
        (corner, (near_b, near_c, near_a)),
        (over, (c, near_a, far_b)),
        (_last(_move(_last(over, near_b), c), c), (a, _back(near_b), _back(far_c))),
        (_last(_move(_move(end, near_b), c), c), (_back(c), _back(far_a), far_b)),
        (_last(_move(end, near_b), near_b), (_back(near_b), near_c, _back(far_a))),
    ]


def _halve(axis: Axis) -> tuple[Axis, Axis]:
    """Two halves, the first of them even where the axis is longer than two cells."""
    coordinate, cells = axis
    sign = 1 if cells > 0 else -1
    half = abs(cells) // 2
    if half % 2 and abs(cells) > 2:
        half += 1
    return (coordinate, sign * half), (coordinate, sign * (abs(cells) - half))


def _back(axis: Axis) -> Axis:
    return axis[0], -axis[1]


def _move(cell: tuple[int, int, int], axis: Axis) -> tuple[int, int, int]:
    """The cell behind the end of an axis."""
    moved = list(cell)
    moved[axis[0]] += axis[1]
    return moved[0], moved[1], moved[2]


def _last(cell: tuple[int, int, int], axis: Axis) -> tuple[int, int, int]:
    """One cell back along an axis: from behind its end to its last cell."""
    return _move(cell, (axis[0], -1 if axis[1] > 0 else 1))
