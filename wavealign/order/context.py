"""What a row order or visit order may depend on besides the mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np


class Draw(IntEnum):
    """What a random stream is for, so that one choice never shifts another."""

    ROWS = 0
    VISITS = 1
    SOLVER = 2


@dataclass(frozen=True)
class OrderContext:
    """The launch that an order is made for.

    Attributes:
        wave: rows in flight at once, W = SMs x CTAs per SM.
        seed: seed of every random choice.
        head: position of the head in the launch; each head draws its own numbers.
    """

    wave: int
    seed: int = 0
    head: int = 0

    def replaced(self, wave: int | None = None, seed: int | None = None) -> OrderContext:
        """This context, with another wave or seed where one is given."""
        return replace(
            self, wave=self.wave if wave is None else wave, seed=self.seed if seed is None else seed
        )

    def rng(self, draw: Draw) -> np.random.Generator:
        """The head's random stream for one purpose."""
        return np.random.default_rng([self.seed, self.head, int(draw)])
