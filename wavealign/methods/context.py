"""Where a head's tokens lie: what static and video-aware methods know beside Q and K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign.errors import InputError


@dataclass(frozen=True)
class Site:
    """One head's surroundings.

    Attributes:
        head: index, also the stream of chance.
        tokens: length of the sequence, text included.
        seed: of every random choice.
        grid: frames, height and width of the video's token grid, or None.
        order: place in the sequence -> raster token, int64 ``(video tokens,)``, or None for
            raster order.
        text_tokens: tokens of text behind the video.
    """

    head: int
    tokens: int
    seed: int = 0
    grid: tuple[int, int, int] | None = None
    order: npt.NDArray[np.int64] | None = None
    text_tokens: int = 0

    @property
    def video_tokens(self) -> int:
        """Tokens before the text."""
        return self.tokens - self.text_tokens

    def need_grid(self, method: str) -> tuple[int, int, int]:
        """The grid.

        Raises:
            InputError: there is none.
        """
        if self.grid is None:
            raise InputError(
                f"{method} works on a video's token grid; give it, e.g. --grid 21x45x80 (frames, "
                "height and width in tokens)."
            )
        return self.grid

    def coordinates(self, method: str) -> npt.NDArray[Any]:
        """Frame, row and column of every video token in sequence order, int64 ``(tokens, 3)``."""
        grid = self.need_grid(method)
        raster = self.order if self.order is not None else np.arange(self.video_tokens)
        return np.stack(np.unravel_index(raster, grid), axis=-1)
