"""AdaSpa: a fixed sparsity, searched anew at a few steps against the first one's log-sum-exp.

After Xia et al., "Training-free and Adaptive Sparse Attention for Efficient Long Video Generation"
(arXiv 2502.21079). The first search weighs blocks with the exact log-sum-exp of every row and
keeps it; later ones divide by what was kept, which saves a pass and is wrong by as much as the
log-sum-exp has moved. Every row of a head keeps the same number of blocks; heads that keep much of
their attention give blocks to those that keep least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wavealign.errors import InputError
from wavealign.gpu.importance.attend import attend_with_importance
from wavealign.methods.context import keep_text
from wavealign.methods.select import select_top_k
from wavealign.numbers import flag, number, share
from wavealign.sessions.rule import Found, Memory, SearchesAtSteps, StepCall, all_finite

_GOOD_RECALL = 0.8
_OVERFLOW = (
    "NaN or infinity in the scores of q and k, or scores so far above those of the first search "
    "that its log-sum-exp can't divide them; expected finite numbers, or cached_lse=False"
)


@dataclass(frozen=True)
class AdaSpa(SearchesAtSteps):
    """When AdaSpa searches, and what it keeps; the paper's values by default.

    Attributes:
        search_steps: from 0, ascending; the paper has 10 steps of full attention before.
        sparsity: share of a row's blocks that is left out.
        steps: of the run.
        head_adaptive: the n heads of highest recall get sparsity (1 + s) / 2, the n of lowest
            (3 s - 1) / 2, where n heads have a recall above 0.8 (at most half of them, so that no
            head is both).
        cached_lse: later searches use the first one's log-sum-exp; False weighs exactly.
        dense_text: blocks that hold text are always kept.
        name: in reports.

    Raises:
        InputError: see `SearchesAtSteps.check_steps`; a sparsity outside [0, 1), or below 1/3 with
            `head_adaptive`.
    """

    takes_schedule: ClassVar[bool] = False

    search_steps: Sequence[int] = (10, 30)
    sparsity: float = 0.8
    steps: int = 50
    head_adaptive: bool = True
    cached_lse: bool = True
    dense_text: bool = True
    name: str = "adaspa"

    def __post_init__(self) -> None:
        for name in ("head_adaptive", "cached_lse", "dense_text"):
            flag(name, getattr(self, name))
        self.check_steps()
        share("1 - sparsity", 1 - number("sparsity", self.sparsity))
        if self.head_adaptive and self.sparsity < 1 / 3:
            raise InputError(
                f"sparsity {self.sparsity} with head-adaptive budgets; (3 s - 1) / 2 must not be "
                "negative, so expected at least 1/3, or head_adaptive=False."
            )

    def search(self, call: StepCall, memory: Memory, attend: Callable[[], Tensor]) -> Found:
        """See `Rule.search`: full attention, and weights by the log-sum-exp of the memory.

        Args:
            call, memory, attend: see `Rule.search`.
        """
        del attend
        found = attend_with_importance(
            call.q, call.k, call.v, block=call.block, reference_lse=memory.lse
        )
        counts: int | Tensor = _blocks(1 - self.sparsity, found.weights.shape[-1])
        if self.head_adaptive:
            counts = head_budgets(found.weights, self.sparsity)
        keep = select_top_k(found.weights, counts)
        if self.dense_text:
            keep_text(keep, call.q.shape[1], call.text_tokens, call.block)
        finite = all_finite(found.weights, found.lse)
        if memory.lse is not None:
            return Found(found.out, keep, memory, finite, _OVERFLOW)
        if self.cached_lse:
            memory = Memory(lse=found.lse)
        return Found(found.out, keep, memory, finite)


def head_budgets(weights: Tensor, sparsity: float) -> Tensor:
    """K/V blocks that a row of each head keeps, int64 ``[B, H]``; the host never waits.

    Recall is what the top blocks hold of the head's summed weights, which needn't be 1 a row.

    Args:
        weights: ``[B, H, M, N]``.
        sparsity: s of `AdaSpa`.
    """
    H, N = weights.shape[1], weights.shape[3]
    kept = select_top_k(weights, _blocks(1 - sparsity, N))
    total = weights.sum((-2, -1), dtype=torch.float64)
    recall = (weights * kept).sum((-2, -1), dtype=torch.float64) / total
    good = (recall > _GOOD_RECALL).sum(-1, keepdim=True).clamp_max(H // 2)
    place = recall.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    budgets = torch.full_like(place, _blocks(1 - sparsity, N))
    budgets = budgets.masked_fill(place < good, _blocks((1 - sparsity) / 2, N))
    return budgets.masked_fill(place >= H - good, _blocks(3 * (1 - sparsity) / 2, N))


def _blocks(share: float, columns: int) -> int:
    return max(1, round(share * columns))
