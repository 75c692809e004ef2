"""How a clip becomes a grid of tokens, for the video models people run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from wavealign.errors import InputError, unknown_name


@dataclass(frozen=True)
class TokenGrid:
    """Tokens along time, height and width; raster order runs along width first.

    Attributes:
        frames: latent frames.
        height: tokens from top to bottom.
        width: tokens from left to right.

    Raises:
        InputError: no token in some direction.
    """

    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise InputError(f"grid {self}: expected at least one token in each direction.")

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(frames, height, width)``."""
        return self.frames, self.height, self.width

    @property
    def tokens(self) -> int:
        """All tokens."""
        return math.prod(self.shape)

    @classmethod
    def parse(cls, text: str) -> TokenGrid:
        """A grid from ``"21x45x80"``.

        Raises:
            InputError: not three positive whole numbers.
        """
        match = re.fullmatch(r"(\d+)[xX×,](\d+)[xX×,](\d+)", text.strip())
        if match is None:
            raise InputError(
                f"grid '{text}' can't be read; expected frames, height and width in tokens, e.g. "
                "21x45x80."
            )
        frames, height, width = (int(part) for part in match.groups())
        return cls(frames, height, width)


@dataclass(frozen=True)
class VideoModel:
    """What a video transformer does to a clip before attention.

    Attributes:
        name: as given to ``--model``.
        title: in full.
        layers: transformer layers.
        heads: attention heads.
        head_dim: elements per head.
        stride: pixels (and frames) that the VAE folds into a latent, in time, height, width.
        patch: latents that one token covers, in time, height, width.
        rotary: the kind of rotary position: "interleaved" or "split".
        rotary_dims: elements of a head turned by time, height and width.
        theta: base of the rotary frequencies.
        text_tokens: most text tokens behind the video in self-attention.
        source: where these figures come from.
    """

    name: str
    title: str
    layers: int
    heads: int
    head_dim: int
    stride: tuple[int, int, int]
    patch: tuple[int, int, int]
    rotary: str
    rotary_dims: tuple[int, int, int]
    theta: float
    text_tokens: int
    source: str

    def grid(self, frames: int, height: int, width: int) -> TokenGrid:
        """The token grid of a clip.

        Args:
            frames: of the clip; the first is a latent frame of its own, the rest come in
                groups of the VAE's temporal stride.
            height: in pixels.
            width: in pixels.

        Raises:
            InputError: a size that the model can't cut into tokens.
        """
        if min(frames, height, width) < 1:
            raise InputError(f"clip of {frames}x{height}x{width}: expected positive sizes.")
        group = self.stride[0]
        if (frames - 1) % group:
            near = 1 + round((frames - 1) / group) * group
            raise InputError(
                f"{self.title} takes {group}n+1 frames; {frames} isn't one of them, {near} is."
            )
        sizes = []
        for axis, pixels in ((1, height), (2, width)):
            side = self.stride[axis] * self.patch[axis]
            if pixels % side:
                raise InputError(
                    f"{self.title} takes heights and widths in multiples of {side} pixels; found "
                    f"{pixels}."
                )
            sizes.append(pixels // side)
        latents = (frames - 1) // group + 1
        if latents % self.patch[0]:
            raise InputError(f"{self.title}: {latents} latent frames, a patch has {self.patch[0]}.")
        return TokenGrid(latents // self.patch[0], *sizes)


MODELS = {
    model.name: model
    for model in (
        VideoModel(
            "wan2.1", "Wan2.1-T2V-14B", 40, 40, 128, (4, 8, 8), (1, 2, 2),
            "interleaved", (44, 42, 42), 1e4, 0, "Wan-Video/Wan2.1, wan/configs, wan/modules/model",
        ),
        VideoModel(
            "wan2.1-1.3b", "Wan2.1-T2V-1.3B", 30, 12, 128, (4, 8, 8), (1, 2, 2),
            "interleaved", (44, 42, 42), 1e4, 0, "Wan-Video/Wan2.1, wan/configs, wan/modules/model",
        ),
        VideoModel(
            "hunyuan", "HunyuanVideo", 60, 24, 128, (4, 8, 8), (1, 2, 2),
            "interleaved", (16, 56, 56), 256.0, 256, "diffusers, transformer_hunyuan_video",
        ),
        VideoModel(
            "ltx2", "LTX-2.3", 48, 32, 128, (8, 32, 32), (1, 1, 1),
            "split", (0, 0, 0), 1e4, 0, "diffusers, transformer_ltx2 and its conversion script",
        ),
    )
}  # fmt: skip


def find_model(name: str) -> VideoModel:
    """The model of this name.

    Raises:
        InputError: there is none, with the nearest name.
    """
    if name not in MODELS:
        raise unknown_name("video model", name, MODELS)
    return MODELS[name]
