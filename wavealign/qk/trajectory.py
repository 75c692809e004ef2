"""Q and K over the steps of a denoising run: captured from one, or made from a single Q and K.

A made trajectory is a stand-in: at step t a head's queries and keys are

    x_t = √(1 - s_t) · content + √(s_t) · noise,   s_t = 0.9 · (1 - t / (T - 1))²,

content being the Q and K that were given (those of the last step), noise Gaussian, drawn once and
used at every step, of a standard deviation of 0.15 of the content's RMS. The softmax scale stays
1/√D. So content comes up out of noise, early attention is flat, and entropy and mean attention
distance fall with the step, as published for HunyuanVideo and Wan2.1 (GSRS, figure 1). That
they fall is by construction; how fast they fall says nothing about a video model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from wavealign.errors import InputError
from wavealign.qk.grid import TokenGrid
from wavealign.qk.sources import FileSource, QKSource, TensorSource
from wavealign.units import parse_heads

START, NOISE = 0.9, 0.15
Place = tuple[int, int]
"""Layer and head."""


class Trajectory(Protocol):
    """Q and K of some heads at some steps."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Which, ascending."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The heads."""

    @property
    def tokens(self) -> int:
        """Length of the sequence."""

    def read(self, step: int, place: Place) -> tuple[Tensor, Tensor]:
        """Queries and keys, float ``(L, D)`` each, in raster order."""


@dataclass(frozen=True)
class NoisyTrajectory:
    """A trajectory made from one Q and K, see above; deterministic.

    Attributes:
        source: the content.
        length: steps of the run.
        seed: of the noise.

    Raises:
        InputError: fewer than two steps.
    """

    source: QKSource
    length: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise InputError(f"a trajectory of {self.length} steps; expected at least 2.")

    @property
    def steps(self) -> tuple[int, ...]:
        """All."""
        return tuple(range(self.length))

    @property
    def places(self) -> tuple[Place, ...]:
        """The source's heads, by their layer where it says so."""
        known = self.source.describe().get("vit_heads")
        if known is not None and len(known) == self.source.heads:
            return tuple((int(layer), int(head)) for layer, head in known)
        layer = int(self.source.describe().get("layer", 0))
        return tuple((layer, head) for head in range(self.source.heads))

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self.source.tokens

    def noise_level(self, step: int) -> float:
        """The share s_t of noise, from 0.9 to 0."""
        return START * (1 - step / (self.length - 1)) ** 2

    def read(self, step: int, place: Place) -> tuple[Tensor, Tensor]:
        """Queries and keys of a head, float32."""
        index = self.places.index(place)
        level = self.noise_level(step)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        pair = []
        for content in self.source.read(index):
            x = content.float()
            noise = torch.randn(x.shape, generator=generator).to(x.device)
            deviation = NOISE * x.square().mean().sqrt()
            pair.append(math.sqrt(1 - level) * x + math.sqrt(level) * deviation * noise)
        return pair[0], pair[1]


class CapturedTrajectory(AbstractContextManager["CapturedTrajectory"]):
    """Files of `wavealign capture`: each one layer at one step. A context manager.

    Attributes:
        grid: of the tokens, where the files say so.
        text_tokens: behind the video.
        tokens: length of the sequence.
        steps: that any layer was captured at.
        places: heads that were captured at any step.

    Raises:
        InputError: no files, files of different lengths or grids, or two of one layer and step.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.grid: TokenGrid | None = None
        self.text_tokens = 0
        self._stack = ExitStack()
        self._found: dict[tuple[int, Place], tuple[FileSource, int]] = {}
        if not paths:
            raise InputError("no files of Q and K; expected some of wavealign capture.")
        try:
            lengths = {self._add(path): path for path in paths}
            if len(lengths) > 1:
                told = ", ".join(f"{path} {n}" for n, path in lengths.items())
                raise InputError(f"sequences of different lengths: {told} tokens.")
        except BaseException:
            self.close()
            raise
        (self.tokens,) = lengths
        self.steps = tuple(sorted({step for step, _ in self._found}))
        self.places = tuple(sorted({place for _, place in self._found}))

    @classmethod
    def open(cls, path: str | Path) -> CapturedTrajectory:
        """A file, or all safetensors of a folder.

        Raises:
            InputError: neither, or a folder without any.
        """
        target = Path(path)
        if not target.exists():
            raise InputError(f"{target}: no such file or folder.")
        if not target.is_dir():
            return cls([target])
        files = sorted(target.glob("*.safetensors"))
        if not files:
            raise InputError(f"{target}: holds no .safetensors; expected those of a capture.")
        return cls(files)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def holds(self, step: int, place: Place) -> bool:
        """Whether this head was captured at this step."""
        return (step, place) in self._found

    def read(self, step: int, place: Place) -> tuple[Tensor, Tensor]:
        """Queries and keys of a head."""
        source, index = self._found[step, place]
        return source.read(index)

    def _add(self, path: Path) -> int:
        source = self._stack.enter_context(FileSource(path))
        try:
            step, layer = int(source.about.get("step", 0)), int(source.about.get("layer", 0))
            named = source.about.get("heads")
            heads = parse_heads(named, 1 << 20) if named else list(range(source.heads))
            if len(heads) != source.heads:
                raise ValueError(f"{len(heads)} names of {source.heads} heads")
            if isinstance(source.about.get("grid"), str):
                self._lie(source.about["grid"], int(source.about.get("text_tokens", 0)))
        except ValueError as problem:
            raise InputError(f"{path}: its metadata can't be used ({problem}).") from problem
        known = NoisyTrajectory(source).places if named is None else None
        for index, head in enumerate(heads):
            place = known[index] if known is not None else (layer, head)
            if (step, place) in self._found:
                other = self._found[step, place][0].path
                raise InputError(
                    f"{path} and {other} both hold layer {place[0]}, head {place[1]} at step "
                    f"{step}; expected one of them."
                )
            self._found[step, place] = source, index
        return source.tokens

    def _lie(self, written: str, text_tokens: int) -> None:
        """Take over how a file's tokens lie, which is the same in all files."""
        grid = TokenGrid.parse(written)
        if self.grid not in (None, grid) or (self.grid and self.text_tokens != text_tokens):
            raise ValueError(
                f"grid {grid} and {text_tokens} tokens of text, where others have {self.grid} and "
                f"{self.text_tokens}"
            )
        self.grid, self.text_tokens = grid, text_tokens


def synthetic_qk(
    grid: TokenGrid, heads: int = 4, head_dim: int = 64, seed: int = 0
) -> TensorSource:
    """Q and K without a clip: smooth features of a token's place, for tests and trials.

    Each head attends near each query, to a reach of its own, and to a few themes that tokens
    far apart share. Float32, raster order.

    Args:
        grid: of the tokens.
        heads, head_dim: H and D.
        seed: of the features.
    """
    rng = np.random.default_rng(seed)
    places = np.stack(np.unravel_index(np.arange(grid.tokens), grid.shape), -1)
    places = places / np.asarray(grid.shape)
    pair = np.empty((2, heads, grid.tokens, head_dim), np.float32)
    for h in range(heads):
        reach = 3.0 * 2.0 ** (h % 4)  # cycles over the grid: the more, the nearer it looks
        waves = rng.normal(size=(3, head_dim // 2)) * reach
        near = places @ waves
        near = np.concatenate([np.cos(near), np.sin(near)], -1)
        themes = rng.normal(size=(4, head_dim))
        blend = np.cos(places @ rng.normal(size=(3, 4)) * 4.0) @ themes
        for which in range(2):
            own = 0.3 * rng.normal(size=near.shape)
            pair[which, h] = 1.8 * near + 0.5 * blend + own
    q, k = torch.from_numpy(pair[0]), torch.from_numpy(pair[1])
    return TensorSource(q, k, f"synthetic {grid}, seed {seed}")
