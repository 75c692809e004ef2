"""What a mask method knows of a head beside its Q and K: where the tokens lie, and chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign.errors import InputError
from wavealign.qk.grid import TokenGrid, check_tokens
from wavealign.qk.orders import token_order


@dataclass(frozen=True)
class HeadContext:
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

    @classmethod
    def make(
        cls, tokens: int, grid: TokenGrid | None, order: str = "raster", text_tokens: int = 0,
        seed: int = 0, tile: tuple[int, int, int] | None = None,
    ) -> HeadContext:  # fmt: skip
        """What is common to all heads, checked; as the context of head 0.

        Args:
            tokens: length of the sequence.
            grid: the video's token grid; needed by every order but "raster".
            order: token order, see `wavealign.qk.ORDERS`.
            text_tokens: tokens of text behind the video, which keep their places.
            seed: of every random choice.
            tile: of the order "tiles", where the method has tiles of its own.

        Raises:
            InputError: lengths that contradict each other, an unknown order or one without a grid.
        """
        if text_tokens < 0:
            raise InputError(f"text tokens: {text_tokens}; expected 0 or more.")
        check_tokens(tokens, grid, text_tokens, "Q and K")
        if grid is None and order != "raster":
            raise InputError(f"token order '{order}' needs the token grid, e.g. --grid 21x45x80.")
        places = None
        if grid is not None and order != "raster":
            places = token_order(order, grid, tile)
        shape = grid.shape if grid is not None else None
        return cls(0, tokens, seed, shape, places, text_tokens)

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


def keep_text(keep: Any, tokens: int, text_tokens: int, block: tuple[int, int]) -> None:
    """Make rows and columns of blocks that hold a token of text dense, in place.

    Args:
        keep: bool ``(..., M, N)``, an array or a tensor.
        tokens: length of the sequence.
        text_tokens: at its end.
        block: tokens of a query and of a K/V block.
    """
    if text_tokens:
        keep[..., (tokens - text_tokens) // block[0] :, :] = True
        keep[..., (tokens - text_tokens) // block[1] :] = True
