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

Sizes = tuple[int, int, int]
"""Cells along the three axes of a box, in the order in which they matter."""

Cell = tuple[int, int, int]
Cells = npt.NDArray[np.int64]

Box = tuple[Cell, tuple[Axis, Axis, Axis]]
"""First cell, and the three axes in the order in which they matter."""


def hilbert_curve(shape: tuple[int, int, int]) -> Cells:
    """The cells of a box along the curve, int64 ``(cells, 3)``.

    Args:
        shape: cells in each direction, each at least 1.
    """
    longest_first = sorted(range(3), key=lambda axis: -shape[axis])
    sizes = [shape[axis] for axis in longest_first]
    walk = _walk((sizes[0], sizes[1], sizes[2]), {})
    curve = np.empty_like(walk)
    curve[:, longest_first] = walk
    return curve


def _walk(sizes: Sizes, known: dict[Sizes, Cells]) -> Cells:
    """The walk through a box from its origin, in coordinates along its own three axes.

    There are few different sizes among the parts of a box: each is walked once.
    """
    if sizes not in known:
        a, b, c = sizes
        if b < c:
            known[sizes] = _walk((a, c, b), known)[:, [0, 2, 1]]
        elif c == 1 and (a == 1 or b == 1):
            known[sizes] = np.zeros((a * b, 3), dtype=np.int64)
            known[sizes][:, 0 if b == 1 else 1] = np.arange(a * b)
        else:
            parts = []
            for corner, axes in _cut((0, 0, 0), (0, a), (1, b), (2, c)):
                x, y, z = (abs(cells) for _, cells in axes)
                parts.append(_place(_walk((x, y, z), known), corner, axes))
            known[sizes] = np.concatenate(parts)
    return known[sizes]


def _place(walk: Cells, corner: Cell, axes: tuple[Axis, Axis, Axis]) -> Cells:
    """A walk in the coordinates of the box around it."""
    placed = np.empty_like(walk)
    for own, (coordinate, cells) in enumerate(axes):
        steps = walk[:, own] if cells > 0 else -walk[:, own]
        placed[:, coordinate] = corner[coordinate] + steps
    return placed


def _cut(corner: Cell, a: Axis, b: Axis, c: Axis) -> list[Box]:
    """The parts of a box that isn't a line, in walking order; `b` is at least as long as `c`."""
    long_a, long_b, long_c = abs(a[1]), abs(b[1]), abs(c[1])
    if 2 * long_a > 3 * long_b:
        front, back = _halve(a)
        return [(corner, (front, b, c)), (_move(corner, front), (back, b, c))]
    if long_c == 1 or 3 * long_b > 4 * long_c:
        return _over_along_back(corner, a, b, c)
    return _five(corner, a, b, c)


def _over_along_back(corner: Cell, a: Axis, b: Axis, c: Axis) -> list[Box]:
    """Half of `b` over, all of `a` along the other half, half of `b` back."""
    near_a, far_a = _halve(a)
    near_b, far_b = _halve(b)
    end = _last(_move(_move(corner, near_a), far_a), far_a)
    return [
        (corner, (near_b, near_a, c)),
        (_move(corner, near_b), (a, far_b, c)),
        (_last(_move(end, near_b), near_b), (_back(near_b), _back(far_a), c)),
    ]


def _five(corner: Cell, a: Axis, b: Axis, c: Axis) -> list[Box]:
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


def _move(cell: Cell, axis: Axis) -> Cell:
    """The cell behind the end of an axis."""
    moved = list(cell)
    moved[axis[0]] += axis[1]
    return moved[0], moved[1], moved[2]


def _last(cell: Cell, axis: Axis) -> Cell:
    """One cell back along an axis: from behind its end to its last cell."""
    return _move(cell, (axis[0], -1 if axis[1] > 0 else 1))
