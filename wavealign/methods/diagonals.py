"""Attention of a few representative queries over all keys, by column and by diagonal."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wavealign.errors import InputError


def representatives(tokens: int, count: int, which: str, causal: bool) -> Tensor:
    """Positions of the representative queries, int64 ``(min(count, tokens),)`` on the CPU.

    Args:
        tokens: L.
        count: how many.
        which: "last", "strided" (the middles of equal parts), or "auto".
        causal: decides "auto": last where causal, strided where not.
    """
    count = min(count, tokens)
    if which == "last" or (which == "auto" and causal):
        return torch.arange(tokens - count, tokens, device="cpu")
    return (torch.arange(count, device="cpu") * 2 + 1) * tokens // (2 * count)


def columns_and_diagonals(
    q: Tensor, k: Tensor, positions: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Softmax attention of the representatives, summed over them by key and by diagonal.

    Args:
        q, k: ``(L, D)``.
        positions: of the representatives.
        causal: mask keys after a query.

    Returns:
        float32 ``(L,)`` by key; float32 ``(2 L - 1,)`` by diagonal, at ``L - 1 + o`` for the
        offset ``o = query position - key position``.
    """
    L, D = q.shape
    by_key = torch.zeros(L, dtype=torch.float32, device=q.device)
    by_diagonal = torch.zeros(2 * L - 1, dtype=torch.float32, device=q.device)
    keys = k.float().T
    index = torch.arange(L, device=q.device)
    for part in torch.split(positions, 64):  # read here, so on the CPU: a GPU isn't waited for
        there = part.to(q.device)
        logits = q[there].float() @ keys / math.sqrt(D)
        if causal:
            logits.masked_fill_(index[None, :] > there[:, None], -math.inf)
        mass = logits.softmax(dim=-1)
        by_key += mass.sum(0)
        # Keys 0 to L - 1 lie on the diagonals from `position` down to `position - (L - 1)`.
        for position, row in zip(part.tolist(), mass.flip(1), strict=True):
            by_diagonal[position : position + L] += row
    return by_key, by_diagonal


def check_causal(causal: bool, which: str) -> None:
    """A causal head has nothing to see from strided representatives' futures: refuse the mix.

    Raises:
        InputError: strided representatives of a causal head.
    """
    if causal and which == "strided":
        raise InputError("representative is 'strided' and causal is set; expected 'last'.")


def from_block_diagonals(chosen: Tensor, rows: int, columns: int) -> Tensor:
    """Blocks on chosen block diagonals, bool ``(rows, columns)``.

    Args:
        chosen: bool ``(rows + columns - 1,)``, at ``columns - 1 + i - j`` for block ``(i, j)``.
        rows: M.
        columns: N.
    """
    i = torch.arange(rows, device=chosen.device)[:, None]
    j = torch.arange(columns, device=chosen.device)[None, :]
    return chosen[columns - 1 + i - j]
