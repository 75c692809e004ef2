"""LiteAttention: a tile that stays far below the running maximum is never visited again.

After moonmath-ai/LiteAttention (snapshot f316493). Rows walk their K/V tiles from last to first. A
tile is marked when, in every row of the query tile, its largest score lies below the running
maximum of the tiles before it by a threshold; the next step leaves it out, and so do all later
ones. The first tile that is visited is never marked.

Upstream marks tiles inside its kernel, at hardly any cost. Here it is a second pass in torch that
computes the scores again: the masks are the method's, the time it takes is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wavealign.errors import InputError
from wavealign.gpu.importance.chunked import scores_bytes
from wavealign.methods.context import keep_text
from wavealign.numbers import flag, number, whole_number
from wavealign.sessions.rule import Action, Found, Memory, StepCall, run_length


@dataclass(frozen=True)
class LiteAttention:
    """When LiteAttention marks tiles, and which.

    Attributes:
        threshold: in units of log2, after scaling: a tile is marked below it (upstream: -10;
            its example -6).
        warmup: steps of full attention before the first one that marks (upstream: 0).
        steps: of the run.
        dense_text: blocks that hold text are always kept (upstream: ranges to be given).
        name: in reports.

    Raises:
        InputError: a threshold that isn't finite, or a warm-up beyond the run.
    """

    takes_schedule: ClassVar[bool] = False

    threshold: float = -10.0
    warmup: int = 0
    steps: int = 50
    dense_text: bool = True
    name: str = "liteattention"

    def __post_init__(self) -> None:
        flag("dense_text", self.dense_text)
        if not 0 <= whole_number("warmup", self.warmup) < run_length(self.steps):
            raise InputError(
                f"warmup={self.warmup} in a run of {self.steps} steps; expected 0 to "
                f"{self.steps - 1}."
            )
        if not math.isfinite(number("threshold", self.threshold)):
            raise InputError(f"threshold is {self.threshold}; expected a finite number.")

    def action(self, step: int) -> Action:
        """See `Rule.action`: every step after the warm-up marks tiles for the next."""
        if step < self.warmup:
            return "full"
        return "search" if step < self.steps - 1 or step == self.warmup else "reuse"

    def uses(self, step: int) -> int:
        """See `Rule.uses`."""
        return 1 if step < self.steps - 1 else 0

    def search(self, call: StepCall, memory: Memory, attend: Callable[[], Tensor]) -> Found:
        """See `Rule.search`: attention over the tiles that are left, and fewer for the next.

        Args:
            call, memory, attend: see `Rule.search`.
        """
        out = attend()
        keep, finite = mark_tiles(call.q, call.k, memory.candidates, call.block, self.threshold)
        if self.dense_text:
            keep_text(keep, call.q.shape[1], call.text_tokens, call.block)
        return Found(out, keep, Memory(candidates=keep), finite)


def mark_tiles(
    q: Tensor, k: Tensor, kept: Tensor | None, block: tuple[int, int], threshold: float
) -> tuple[Tensor, Tensor]:
    """The tiles that the next step visits.

    Args:
        q, k: ``[B, L, H, D]``.
        kept: bool ``[B, H, M, N]``, the tiles that this step visits; None for all.
        block: tokens of a query and of a K/V tile.
        threshold: in units of log2.

    Returns:
        bool ``[B, H, M, N]``, and whether all maxima were numbers (0-dimensional).
    """
    B, L, H, _ = q.shape
    M, N = -(-L // block[0]), -(-k.shape[1] // block[1])
    if kept is None:
        kept = torch.ones(B, H, M, N, dtype=torch.bool, device=q.device)
    left = torch.empty_like(kept)
    finite = torch.ones((), dtype=torch.bool, device=q.device)
    for blocks, maxima in tile_maxima(q, k, block):
        visited = kept[:, :, blocks, None]
        finite = finite & ((maxima < math.inf) | ~visited).all()  # NaN isn't below it either
        left[:, :, blocks] = still_needed(maxima, visited, threshold)
    return left, finite


def tile_maxima(q: Tensor, k: Tensor, block: tuple[int, int]) -> Iterator[tuple[slice, Tensor]]:
    """Each row's largest score of each K/V tile, scaled by 1/√D, some query tiles at a time.

    Args:
        q, k: ``[B, L, H, D]``.
        block: tokens of a query and of a K/V tile.

    Yields:
        Query tiles, and float32 ``[B, H, tiles, block_q, N]``; -inf in rows beyond the sequence.
    """
    B, L, H, D = q.shape
    keys = torch.empty(B, H, D, k.shape[1], dtype=torch.float32, device=k.device)
    keys.copy_(k.permute(0, 2, 3, 1))
    step = max(1, scores_bytes(q.device) // (4 * B * H * block[0] * k.shape[1]))
    whole = k.shape[1] // block[1] * block[1]
    for first in range(0, -(-L // block[0]), step):
        rows = q[:, first * block[0] : (first + step) * block[0]].transpose(1, 2).float()
        # A chunk of scores fills the budget: scaling or padding it would copy it.
        scores = (rows / math.sqrt(D)) @ keys
        tiles_of = (*scores.shape[:3], whole // block[1], block[1])
        maxima = scores[..., :whole].view(tiles_of).amax(-1)
        if whole < k.shape[1]:
            maxima = torch.cat([maxima, scores[..., whole:].amax(-1, keepdim=True)], -1)
        short = -maxima.shape[2] % block[0]
        maxima = torch.nn.functional.pad(maxima, (0, 0, 0, short), value=-math.inf)
        tiles = maxima.reshape(B, H, -1, block[0], maxima.shape[-1])
        yield slice(first, first + tiles.shape[2]), tiles


def still_needed(maxima: Tensor, visited: Tensor, threshold: float) -> Tensor:
    """Which tiles are left, bool ``[..., N]``.

    Args:
        maxima: ``[..., rows, N]`` of a query tile, see `tile_maxima`.
        visited: bool, broadcast against `maxima`.
        threshold: in units of log2.
    """
    backwards = maxima.masked_fill(~visited, -math.inf).flip(-1)
    running = backwards.cummax(-1).values.roll(1, -1)
    running[..., 0] = -math.inf
    # -inf - -inf is NaN, which passes nothing; the first tile's own is +inf.
    rises = (backwards - running) * math.log2(math.e) > threshold
    return rises.any(-2).flip(-1)
