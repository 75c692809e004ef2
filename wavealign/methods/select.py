"""Picking blocks from scores, one row at a time: top-k and the two conventions of top-p."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wavealign._extras import installed

_ROWS_ENTRIES = 1 << 23  # entries that are sorted at a time: about 200 MB


def top_p(scores: Tensor, share: float, convention: str) -> Tensor:
    """Blocks that together hold a share of each row's score.

    Args:
        scores: float ``(..., N)``, not negative.
        share: of the row's sum, above 0 and up to 1.
        convention: "inclusive" keeps the block that crosses the share, "exclusive" drops it
            but keeps at least one.

    Returns:
        bool ``(..., N)``. Sums are taken in float64; ties go to the lower index. On a GPU a
        kernel without a sort does float32 rows; its sums come in another order.
    """
    if _fused(scores):
        from wavealign.methods._select_kernels import launch_top_p

        rows = scores.reshape(-1, scores.shape[-1])
        kept = torch.empty(1, *rows.shape, dtype=torch.bool, device=rows.device)
        launch_top_p(rows, kept, share, convention)
        return kept.view(scores.shape)
    values, ranks = scores.sort(dim=-1, descending=True, stable=True)
    sums = values.double().cumsum(-1)
    wanted = share * sums[..., -1:]
    if convention == "inclusive":
        keep = torch.zeros_like(sums, dtype=torch.bool)
        keep[..., 0] = True
        keep[..., 1:] = sums[..., :-1] < wanted
    else:
        keep = sums <= wanted
        keep[..., 0] = True
    return torch.zeros_like(keep).scatter_(-1, ranks, keep)


def _fused(scores: Tensor) -> bool:
    able = scores.is_cuda and scores.dtype == torch.float32 and installed("triton")
    if not (able and scores.numel()):
        return False
    from wavealign.methods._select_kernels import MOST_COLUMNS

    return scores.shape[-1] <= MOST_COLUMNS


def select_top_p(scores: Tensor, share: float, candidates: Tensor | None = None) -> Tensor:
    """`top_p`, inclusive, of many heads at once, wherever the scores lie.

    The host never waits, and what a sort needs is made for a part of the rows at a time:
    ``25 · N`` bytes for each of `_ROWS_ENTRIES` / N rows, not for all of them.

    Args:
        scores: float ``(..., N)``, not negative.
        share: of the row's sum over the candidates, above 0 and up to 1.
        candidates: bool, shaped as `scores`; nothing else is kept.

    Returns:
        bool ``(..., N)``. What scores 0 is never kept, so a row without candidates keeps nothing.
    """

    def chosen(part: Tensor, among: Tensor | None = None) -> Tensor:
        part = part if among is None else part.where(among, 0)
        return top_p(part, share, "inclusive") & (part > 0)

    return _by_parts(chosen, scores, *(() if candidates is None else (candidates,)))


def select_top_k(scores: Tensor, count: int | Tensor) -> Tensor:
    """The largest of each row, ties to the lower index, without a wait of the host.

    Args:
        scores: float ``(..., M, N)``, not negative.
        count: for all rows, or integers ``(...)``, one a head, cut to 1 .. N.

    Returns:
        bool ``(..., M, N)``.
    """
    N = scores.shape[-1]
    # Filled on the device: a number that is copied there makes the host wait.
    counts = count if isinstance(count, Tensor) else torch.full((), count, device=scores.device)
    counts = counts.clamp(1, N)
    counts = counts.reshape(*counts.shape, *[1] * (scores.ndim - 1 - counts.ndim))
    counts = counts.expand(scores.shape[:-1])

    def largest(part: Tensor, wanted: Tensor) -> Tensor:
        ranks = part.sort(dim=-1, descending=True, stable=True).indices
        keep = torch.arange(N, device=part.device) < wanted[:, None]
        return torch.zeros_like(part, dtype=torch.bool).scatter_(-1, ranks, keep)

    return _by_parts(largest, scores, counts)


def _by_parts(function: Callable[..., Tensor], scores: Tensor, *others: Tensor) -> Tensor:
    """A function of rows ``(rows, N)``, called for some of them at a time."""
    N = scores.shape[-1]
    rows = scores.reshape(-1, N)
    rest = [t.reshape(-1, N) if t.shape == scores.shape else t.reshape(-1) for t in others]
    keep = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    step = max(1, _ROWS_ENTRIES // N)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        keep[part] = function(rows[part], *(t[part] for t in rest))
    return keep.reshape(scores.shape)


def mask_future(logits: Tensor, first_query: int = 0, first_key: int = 0) -> None:
    """Take keys behind their query out of ``(queries, keys)``, in place.

    Args:
        logits: to become -inf there.
        first_query, first_key: positions of the first row and column.
    """
    queries, keys = (torch.arange(n, device=logits.device) for n in logits.shape)
    logits.masked_fill_(keys + first_key > queries[:, None] + first_query, -torch.inf)


def lower_triangle(like: Tensor, block_q: int, block_kv: int) -> Tensor:
    """Blocks that hold a key at or before one of the row's queries, bool, shaped as `like`.

    Args:
        like: ``(M, N)``, for its shape and device.
        block_q, block_kv: tokens of a block.
    """
    rows, columns = like.shape
    last_query = torch.arange(1, rows + 1, device=like.device) * block_q - 1
    first_key = torch.arange(columns, device=like.device) * block_kv
    visible: Tensor = first_key[None, :] <= last_query[:, None]
    return visible


def block_means(x: Tensor, block: int, padded: bool = False) -> Tensor:
    """Mean of every block of tokens, float32 ``(ceil(L / block), D)``.

    Args:
        x: ``(L, D)``.
        block: tokens per block.
        padded: divide a ragged last block by `block` instead of its own length.
    """
    L, D = x.shape
    whole = L // block
    means = x[: whole * block].float().reshape(whole, block, D).mean(1)
    if L % block == 0:
        return means
    tail = x[whole * block :].float()
    return torch.cat([means, (tail.sum(0) / (block if padded else len(tail)))[None]])
