"""What the sections of benchmarks/gsrs_sessions.py share: sizes, timing, notes, checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import Notes, timed

from wavealign.methods.select import top_p
from wavealign.qk.grid import TokenGrid
from wavealign.qk.orders import token_order


@dataclass
class Bench:
    """Sizes, where it runs, and the file of results.

    Attributes:
        small: a few tokens on the CPU, without meaning.
        grid, heads, head_dim, block, steps: of the run.
        out: folder of results.
        work: folder of masks.
        backend: of the sessions.
    """

    small: bool
    grid: TokenGrid
    heads: int
    head_dim: int
    block: int
    steps: int
    out: Path
    work: Path
    backend: str
    notes: Notes = field(init=False)

    def __post_init__(self) -> None:
        self.notes = Notes(self.out / "sessions.jsonl")
        self.note, self.say = self.notes.note, self.notes.say

    @property
    def device(self) -> str:
        """Of everything."""
        return "cpu" if self.small else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of Q, K and V."""
        return torch.bfloat16

    @property
    def terms(self) -> dict[str, Any]:
        """Options of every session."""
        return {
            "block": (self.block, self.block), "steps": self.steps, "backend": self.backend,
            "profile": "h200" if self.small else None,
        }  # fmt: skip

    def timed(self, run: Callable[[], Any]) -> tuple[Any, float, float]:
        """See `common.timed`."""
        return timed(run, cuda=not self.small)

    def memory(self) -> dict[str, int]:
        """Bytes on the device."""
        if self.small:
            return {}
        return {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }


class Reference:
    """Float32 attention of some tokens of some heads, in the Hilbert order of a session."""

    def __init__(self, bench: Bench, rows: int = 48, heads: int = 3) -> None:
        tokens = bench.grid.tokens
        self._block, self._device = bench.block, bench.device
        self._order = torch.from_numpy(token_order("hilbert", bench.grid)).to(bench.device)
        spread = torch.linspace(0, tokens - 1, rows, device=bench.device)
        self._places = spread.round().long()  # the last one in a ragged block
        self._heads = [h * bench.heads // heads for h in range(min(heads, bench.heads))]

    def error_frac(
        self, out: torch.Tensor, qkv: tuple[torch.Tensor, ...], keep: torch.Tensor | None
    ) -> float:
        """Largest |out - reference| / |reference| of a head's sampled rows.

        Args:
            out: ``[1, L, H, D]``, raster order, as `qkv`.
            qkv: Q, K and V.
            keep: bool ``[1, H, M, N]``, the blocks that were attended to; None for all.
        """
        worst = 0.0
        tokens = self._order[self._places]
        for h in self._heads:
            q, k, v = (x[0, :, h].float() for x in qkv)
            scores = q[tokens] @ k[self._order].T / math.sqrt(q.shape[1])
            if keep is not None:
                rows = keep[0, h, self._places // self._block]
                seen = rows.repeat_interleave(self._block, 1)[:, : scores.shape[1]]
                scores.masked_fill_(~seen, -math.inf)
            wanted = scores.softmax(-1) @ v[self._order]
            error = (out[0, tokens, h].float() - wanted).norm() / wanted.norm()
            worst = max(worst, float(error))
        return worst

    def differing(
        self, keep: torch.Tensor, qkv: tuple[torch.Tensor, ...], share: float,
        among: torch.Tensor | None,
    ) -> dict[str, int]:  # fmt: skip
        """Blocks of some rows that top-p of float32 weights selects otherwise.

        Args:
            keep: bool ``[1, H, M, N]``, what was selected.
            qkv: Q, K and V, raster order.
            share: p.
            among: the candidates; None for all blocks.
        """
        differ = kept = 0
        N = keep.shape[3]
        blocks = torch.unique(self._places // self._block)[::12]
        for h in self._heads:
            q, k = (x[0, self._order, h].float() for x in qkv[:2])
            for u in blocks.tolist():
                rows = q[u * self._block : (u + 1) * self._block]
                scores = rows @ k.T / math.sqrt(q.shape[1])
                if among is not None:
                    seen = among[0, h, u].repeat_interleave(self._block)[: scores.shape[1]]
                    scores.masked_fill_(~seen, -math.inf)
                mass = scores.softmax(-1).double().mean(0)
                mass = torch.nn.functional.pad(mass, (0, N * self._block - len(mass)))
                weights = mass.view(N, self._block).sum(1)
                wanted = top_p(weights, share, "inclusive") & (weights > 0)
                differ += int((wanted != keep[0, h, u]).sum())
                kept += int(wanted.sum())
        return {"selected_otherwise": differ, "selected": kept}
