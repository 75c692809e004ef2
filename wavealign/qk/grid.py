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
        match = re.fullmatch(r"(\d{1,9})[xX×,](\d{1,9})[xX×,](\d{1,9})", text.strip())
        if match is None:
            raise InputError(
                f"grid '{text}' can't be read; expected frames, height and width in tokens, e.g. "
                "21x45x80."
            )
        frames, height, width = (int(part) for part in match.groups())
        return cls(frames, height, width)


def check_tokens(tokens: int, grid: TokenGrid | None, text_tokens: int, told: str) -> None:
    """Raise unless a sequence is some video, as much as the grid has, and the text.

    Args:
        tokens: its length.
        grid: of the video, where it is known.
        text_tokens: behind the video.
        told: whose length it is, for errors.

    Raises:
        InputError: lengths that contradict each other.
    """
    if text_tokens >= tokens:
        raise InputError(f"{text_tokens} text tokens of {tokens}; expected some video before them.")
    if grid is not None and grid.tokens + text_tokens != tokens:
        raise InputError(
            f"grid {grid} has {grid.tokens} tokens and there are {text_tokens} of text; expected "
            f"{tokens} together, the length of {told}."
        )


@dataclass(frozen=True)
class VideoModel:
    """What a video transformer does to a clip before attention.

    Attributes:
        name: as given to ``--model``.
        title: in full.
        family: what methods with a parameter ``model`` call it.
        stride: pixels (and frames) that the VAE folds into a latent, in time, height, width.
        patch: latents that one token covers, in time, height, width.
        source: where these figures come from.
    """

    name: str
    title: str
    family: str
    stride: tuple[int, int, int]
    patch: tuple[int, int, int]
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


_WAN = "Wan-Video/Wan2.1, wan/configs, wan/modules/model"
_HUNYUAN = "diffusers, transformer_hunyuan_video"
_LTX = "diffusers, transformer_ltx2 and its conversion script"
MODELS = {
    model.name: model
    for model in (
        VideoModel("wan2.1", "Wan2.1-T2V-14B", "wan", (4, 8, 8), (1, 2, 2), _WAN),
        VideoModel("wan2.1-1.3b", "Wan2.1-T2V-1.3B", "wan", (4, 8, 8), (1, 2, 2), _WAN),
        VideoModel("hunyuan", "HunyuanVideo", "hunyuan", (4, 8, 8), (1, 2, 2), _HUNYUAN),
        VideoModel("ltx2", "LTX-2.3", "ltx2", (8, 32, 32), (1, 1, 1), _LTX),
    )
}


def find_model(name: str) -> VideoModel:
    """The model of this name.

    Raises:
        InputError: there is none, with the nearest name.
    """
    if name not in MODELS:
        raise unknown_name("video model", name, MODELS)
    return MODELS[name]
