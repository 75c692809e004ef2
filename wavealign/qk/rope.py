"""3D rotary position: what a video model turns its queries and keys by.

Angles are made per head in float64 from the token grid; `rotate` applies them. Text behind the
video isn't turned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wavealign.errors import InputError
from wavealign.qk.grid import TokenGrid, VideoModel

_LTX_SPAN = (20.0, 2048.0, 2048.0)  # seconds, pixels, pixels: mapped to -1 .. 1
_LTX_FREQUENCIES = 682  # per axis: 4096 channels / 6
_LTX_FPS = 24.0


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


def model_angles(model: VideoModel, grid: TokenGrid, head: int, fps: float = _LTX_FPS) -> Tensor:
    """Angles of one head of a video model, float64 ``(tokens, head_dim / 2)``, raster order.

    Only LTX-2 differs between heads: one run of frequencies is dealt out over all of them, so
    that the first heads turn slowly and the last ones fast.

    Args:
        model: see `MODELS`.
        grid: the token grid.
        head: index, below ``model.heads``.
        fps: frames a second, which only LTX-2 looks at.

    Raises:
        InputError: no such head.
    """
    if not 0 <= head < model.heads:
        raise InputError(f"{model.title} has no head {head}; expected 0 to {model.heads - 1}.")
    if model.rotary == "interleaved":
        return axial_angles(grid, model.rotary_dims, model.theta)
    middles = _ltx_middles(model, grid, fps)
    places = torch.arange(model.head_dim // 2) + head * (model.head_dim // 2)
    places -= model.heads * model.head_dim // 2 - 3 * _LTX_FREQUENCIES  # the first turn nothing
    rates = (math.pi / 2) * model.theta ** (
        torch.div(places, 3, rounding_mode="floor").double() / (_LTX_FREQUENCIES - 1)
    )
    angles = middles[:, places % 3] * rates
    angles[:, places < 0] = 0
    return angles


def _ltx_middles(model: VideoModel, grid: TokenGrid, fps: float) -> Tensor:
    """Middle of every token in time, height and width, mapped to -1 .. 1, ``(tokens, 3)``."""
    axes = []
    for axis, size in enumerate(grid.shape):
        step = model.stride[axis] * model.patch[axis]
        start = torch.arange(size, dtype=torch.float64) * step
        stop = start + step
        if axis == 0:  # the first latent frame is a single frame of the clip
            start, stop = (((edge + 1 - step).clamp_min(0)) / fps for edge in (start, stop))
        axes.append((start + stop) / _LTX_SPAN[axis] - 1)
    mesh = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([m.reshape(-1) for m in mesh], dim=-1)


def rotate(x: Tensor, angles: Tensor, kind: str) -> Tensor:
    """Turn pairs of elements; tokens beyond the angles (text) stay as they are.

    Args:
        x: float ``(L, D)``.
        angles: ``(tokens, D / 2)``, tokens up to L.
        kind: "interleaved" pairs elements 2j and 2j+1, "split" pairs j and j + D/2.

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
    if kind == "interleaved":
        first, second = video[:, 0::2], video[:, 1::2]
    else:
        first, second = video.chunk(2, dim=-1)
    cos, sin = angles.cos().to(video), angles.sin().to(video)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    turned = turned.flatten(-2) if kind == "interleaved" else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[len(angles) :]])
