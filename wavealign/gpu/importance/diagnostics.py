"""How spread out attention is, and how far it looks: entropy and mean attention distance.

Per row i with weights w: H(i) = -Σ_j w_ij · log w_ij and D(i) = Σ_j w_ij · |i - j|; of a head,
the means over rows (GSRS, section 4 and appendix B).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from wavealign.gpu.importance.attend import attend_with_importance
from wavealign.gpu.importance.chunked import distances

SCHEMA = "wavealign.diagnosis/1"
_SCORES_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Diagnosis:
    """One head at one step.

    Attributes:
        step, layer, head: which.
        entropy_nats: mean over rows; at most log of the tokens.
        distance: mean attention distance, in tokens, or in the unit of positions.
        distance_frac: of what attending to all tokens alike would give these rows.
        rows: queries it is the mean of.
        tokens: keys.
    """

    step: int
    layer: int
    head: int
    entropy_nats: float
    distance: float
    distance_frac: float
    rows: int
    tokens: int

    def to_row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"schema": SCHEMA, **asdict(self)}


def diagnose_head(
    q: Tensor, k: Tensor, *, rows: int | None = None, positions: Tensor | None = None,
    where: tuple[int, int, int] = (0, 0, 0),
) -> Diagnosis:  # fmt: skip
    """Entropy and distance of one head.

    Args:
        q, k: ``(L, D)`` on the device that computes.
        rows: so many queries, evenly spread; None for all, by the fused kernel on a GPU.
        positions: float ``(L, axes)``: distances are Euclidean in them; None for |i - j|.
        where: step, layer and head of the result.
    """
    L = len(q)
    if rows is None or rows >= L:
        chosen = torch.arange(L, device=q.device)
        queries, keys = q[None, :, None], k[None, :, None]
        found = attend_with_importance(queries, keys, keys, diagnostics=True, positions=positions)
        assert found.entropy is not None
        assert found.distance is not None
        entropy, distance = found.entropy[0, 0], found.distance[0, 0]
    else:
        chosen = (torch.arange(rows, device=q.device) * 2 + 1) * L // (2 * rows)
        entropy, distance = _sampled(q, k, chosen, positions)
    near = distance.double().mean()
    frac = near / _away(chosen, L, positions).clamp_min(1e-30)
    means = float(entropy.double().mean()), float(near), float(frac)
    return Diagnosis(*where, *means, len(chosen), L)


def _sampled(q: Tensor, k: Tensor, rows: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    entropies, means = [], []
    keys, tokens = k.float().T, torch.arange(len(k), device=k.device)
    for part in torch.split(rows, _rows_at_once(len(k))):
        weights = (q[part].float() @ keys / math.sqrt(q.shape[1])).softmax(-1)
        entropies.append(torch.special.entr(weights).sum(-1))
        means.append((weights * distances(part, tokens, positions, torch.float32)).sum(-1))
    return torch.cat(entropies), torch.cat(means)


def _away(rows: Tensor, tokens: int, positions: Tensor | None) -> Tensor:
    """Mean distance of rows from all tokens, float64, 0-dimensional."""
    if positions is None:  # sums of 1 to i on the left, 1 to L - 1 - i on the right
        i = rows.double()
        right = tokens - 1 - i
        return ((i * (i + 1) + right * (right + 1)) / (2 * tokens)).mean()
    whole = torch.arange(tokens, device=rows.device)
    parts = torch.split(rows, _rows_at_once(tokens))
    means = [distances(part, whole, positions, torch.float32).mean(-1) for part in parts]
    return torch.cat(means).double().mean()


def _rows_at_once(tokens: int) -> int:
    return max(1, _SCORES_BYTES // (4 * tokens))
