"""GSRS: growing sparsity, reduced search.

Attention is full up to the first search, which weighs all blocks and keeps, row by row, those
that hold a share p of the attention. These are the candidates of all later searches: p falls from
search to search, so that ever fewer are kept, but a block that one search dropped can come back at
the next. In between, the mask is reused.

After "Sparse Attention for Video Generation Acceleration via Growing Sparsity and Reduced Search";
what the paper's text leaves open (its block size, how it treats text) are options here.
The whole pipeline is `wavealign.sessions.GsrsSession`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from wavealign.errors import InputError
from wavealign.gpu.importance.attend import attend_with_importance
from wavealign.methods.context import keep_text
from wavealign.methods.select import select_top_k, select_top_p
from wavealign.numbers import flag, share, shares
from wavealign.sessions.rule import Found, Memory, SearchesAtSteps, StepCall, all_finite

SELECTS = ("top-p", "top-k")


@dataclass(frozen=True)
class Gsrs(SearchesAtSteps):
    """When GSRS searches, and what it keeps; the paper's values by default.

    Attributes:
        search_steps: from 0, ascending.
        p: the share of a row's attention that each search keeps, the block that crosses it
            included.
        steps: of the run.
        select: "top-p", or the ablation "top-k".
        keep: of "top-k": the share of the K/V blocks that every row keeps (the paper's
            ablation: 0.2).
        reduced: later searches look at the first one's blocks only. Not with "top-k": what a
            search may look at is then as much as it keeps, so the first mask would stay for good.
        dense_text: blocks that hold text are always kept (the paper's text doesn't say).
        name: in reports.

    Raises:
        InputError: see `SearchesAtSteps.check_steps`; shares outside (0, 1], or not one p a search.
    """

    takes_schedule: ClassVar[bool] = True

    search_steps: Sequence[int] = (10, 20, 30, 40)
    p: Sequence[float] = (0.95, 0.9, 0.85, 0.8)
    steps: int = 50
    select: str = "top-p"
    keep: float = 0.2
    reduced: bool = True
    dense_text: bool = False
    name: str = "gsrs"

    def __post_init__(self) -> None:
        for name in ("reduced", "dense_text"):
            flag(name, getattr(self, name))
        self.check_steps()
        if self.select not in SELECTS:
            raise InputError(f"select is '{self.select}'; expected {' or '.join(SELECTS)}.")
        if self.select == "top-k":
            share("keep", self.keep)
            if self.reduced:
                raise InputError("top-k with reduced search keeps its first mask; reduced=False.")
            return
        object.__setattr__(self, "p", shares("p", self.p))
        if len(self.p) != len(self.search_steps):
            raise InputError(
                f"{len(self.p)} values of p and {len(self.search_steps)} search steps; expected "
                "one p for each search."
            )

    def search(self, call: StepCall, memory: Memory, attend: Callable[[], Tensor]) -> Found:
        """See `Rule.search`: attention over the candidates, and their weights.

        Args:
            call, memory, attend: see `Rule.search`.
        """
        del attend
        among = memory.candidates
        found = attend_with_importance(
            call.q, call.k, call.v, block=call.block, schedule=call.schedule,
            candidates=among if call.schedule is None else None,
        )  # fmt: skip
        if self.select == "top-k":
            keep = select_top_k(found.weights, round(self.keep * found.weights.shape[-1]))
        else:
            keep = select_top_p(found.weights, self.p[self.search_steps.index(call.step)], among)
        if self.dense_text:
            keep_text(keep, call.q.shape[1], call.text_tokens, call.block)
        if self.reduced and among is None:
            memory = Memory(candidates=keep)
        return Found(found.out, keep, memory, all_finite(found.weights, found.lse))
