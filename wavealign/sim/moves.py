"""The moves of the local search: small changes of one head's row order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wavealign.masks.block_mask import Int32Array, Int64Array
from wavealign.order.schedule import inverse


class Moves:
    """Changes of one head's row order; each proposal is a new permutation.

    Args:
        row_nnz: int64 ``(M,)``, K/V blocks per row.
        wave: rows in flight.
        lenders: other orders, whose neighbourhoods are borrowed.
    """

    def __init__(self, row_nnz: Int64Array, wave: int, lenders: Sequence[Int32Array]) -> None:
        self._wave = wave
        self._by_nnz = np.argsort(-row_nnz, kind="stable")
        self._rank = inverse(self._by_nnz)
        self._places = [inverse(order) for order in lenders]
        self._kinds = (
            self.swap, self.swap_similar, self.exchange, self.shift, self.turn, self.borrow,
            self.tail,
        )  # fmt: skip

    def propose(self, order: Int32Array, rng: np.random.Generator) -> Int32Array:
        """A neighbour of `order`, by one of the moves."""
        if len(order) < 2:
            return order
        return self._kinds[rng.integers(len(self._kinds))](order, rng)

    def swap(self, order: Int32Array, rng: np.random.Generator) -> Int32Array:
        """Two rows change places, one to a quarter wave's number of times."""
        return self._swapped(order, rng, self._wave // 4)

    def swap_similar(self, order: Int32Array, rng: np.random.Generator) -> Int32Array:
        """Rows of similar length change places, up to a quarter wave's number of pairs."""
        new = order.copy()
        slot = inverse(order)
        for _ in range(self._some(rng, self._wave // 4)):
            i = int(rng.integers(len(order)))
            near = self._rank[order[i]] + rng.integers(-self._wave, self._wave + 1)
            j = slot[self._by_nnz[int(np.clip(near, 0, len(order) - 1))]]
            new[i], new[j] = new[j], new[i]
            slot[new[i]], slot[new[j]] = i, j
        return new

    def exchange(self, order: Int32Array, rng: np.random.Generator) -> Int32Array:
        """Two stretches of slots change places."""
        length = min(self._some(rng, self._wave), len(order) // 2)
        a, b = sorted(int(n) for n in rng.integers(len(order) - 2 * length + 1, size=2))
        b += length
        new = order.copy()
        new[a : a + length], new[b : b + length] = order[b : b + length], order[a : a + length]
        return new

    def shift(self, order: Int32Array, rng: np.random.Generator) -> Int32Array:
        """A stretch of slots moves elsewhere."""
        length = min(self._some(rng, self._wave), len(order) - 1)
        a = int(rng.integers(len(order) - length + 1))
        rest = np.concatenate([order[:a], order[a + length :]])
        b = int(rng.integers(len(rest) + 1))
        return np.concatenate([rest[:b], order[a : a + length], rest[b:]])

    def turn(self, order: Int32Array, rng: np.random.Generator) -> Int32Array:
        """A stretch of slots turns around."""
        a, end = self._stretch(order, rng)
        new = order.copy()
        new[a:end] = order[a:end][::-1]
        return new

    def borrow(self, order: Int32Array, rng: np.random.Generator) -> Int32Array:
        """Rows of up to a few waves are put in the order that a cheap order has them in."""
        place = self._places[rng.integers(len(self._places))]
        a, end = self._stretch(order, rng)
        new = order.copy()
        new[a:end] = order[a:end][np.argsort(place[order[a:end]], kind="stable")]
        return new

    def tail(self, order: Int32Array, rng: np.random.Generator) -> Int32Array:
        """A row of the last two waves changes places with another one: balance."""
        return self._swapped(order, rng, 4, max(0, len(order) - 2 * self._wave))

    def _swapped(
        self, order: Int32Array, rng: np.random.Generator, most: int, first: int = 0
    ) -> Int32Array:
        new = order.copy()
        for _ in range(self._some(rng, most)):
            i, j = rng.integers(first, len(order), size=2)
            new[i], new[j] = new[j], new[i]
        return new

    def _some(self, rng: np.random.Generator, most: int) -> int:
        """1 to `most`, small numbers as likely as large ones on a log scale."""
        return int(math.exp(rng.random() * math.log(max(1, most) + 0.999)))

    def _stretch(self, order: Int32Array, rng: np.random.Generator) -> tuple[int, int]:
        length = min(1 + self._some(rng, 4 * self._wave), len(order))
        a = int(rng.integers(len(order) - length + 1))
        return a, a + length
