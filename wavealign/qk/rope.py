"""3D rotary position: what a video model turns its queries and keys by.

Angles are made in float64 from the token grid; `rotate` applies them. Text behind the video isn't
turned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavealign.errors import InputError
from wavealign.qk.grid import TokenGrid


def axial_angles(grid: TokenGrid, dims: tuple[int, int, int], theta: float) -> Tensor:
    """Angles of integer grid positions, float64 ``(tokens, sum(dims) / 2)``, raster order.

    Args:
        grid: the token grid.
        dims: elements turned by time, height and width, each even; pair j of an axis with n
            elements turns by position / theta^(2j/n) (Su et al., "RoFormer", 2021).
        theta: the base.

    Raises:
        InputError: an odd number of elements.
    """
    if any(n % 2 for n in dims):
        raise InputError(f"rotary dimensions {dims}: expected even numbers, elements go in pairs.")
    parts = []
    for axis, (size, n) in enumerate(zip(grid.shape, dims, strict=True)):
        rates = theta ** (-torch.arange(0, n, 2, dtype=torch.float64) / max(n, 1))
        angles = torch.arange(size, dtype=torch.float64)[:, None] * rates
        shape = [1, 1, 1, len(rates)]
        shape[axis] = size
        parts.append(angles.view(shape).expand(*grid.shape, len(rates)))
    return torch.cat(parts, dim=-1).reshape(grid.tokens, -1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs of elements 2j and 2j+1; tokens beyond the angles (text) stay as they are.

    Args:
        x: float ``(L, D)``.
        angles: ``(tokens, D / 2)``, tokens up to L.

    Returns:
        ``(L, D)`` in the dtype of `x`.

    Raises:
        InputError: a head of another size than the angles'.
    """
    if angles.shape[-1] * 2 != x.shape[-1] or len(angles) > len(x):
        raise InputError(
            f"{len(angles)} tokens of {2 * angles.shape[-1]} rotary elements don't fit Q or K of "
            f"shape {tuple(x.shape)}."
        )
    video = x[: len(angles)].float()
    first, second = video[:, 0::2], video[:, 1::2]
    cos, sin = angles.cos().to(video), angles.sin().to(video)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return torch.cat([turned.flatten(-2).to(x.dtype), x[len(angles) :]])
