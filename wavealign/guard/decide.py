"""The decision: per head, the policy that is expected to take least time or energy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wavealign.errors import unknown_name
from wavealign.guard.model import CANDIDATES, CostModel, Prediction
from wavealign.guard.statistics import HeadStatistics, mask_statistics
from wavealign.masks.block_mask import BlockMask

OBJECTIVES = ("time", "energy")

LOOK_FRAC = 0.004
"""Share of the calls' time that looking at a launch may take."""


@dataclass(frozen=True)
class HeadDecision:
    """What the guard does with a head, and why.

    Attributes:
        head: its place in the launch.
        chosen: the policy's prediction.
        original: the prediction for today's order.
        best: the policy that takes least, planning, margin and hysteresis left aside.
        kept: whether `chosen` was only kept from an earlier decision.
        statistics: what the predictions rest on.
    """

    head: int
    chosen: Prediction
    original: Prediction
    best: Prediction
    kept: bool
    statistics: HeadStatistics

    @property
    def win_frac(self) -> float:
        """Expected time saved / the time of today's order, without planning."""
        before = self.original.time_ms
        return 1.0 - self.chosen.time_ms / before if before > 0 else 0.0

    def explain(self) -> str:
        """One line."""
        s, o, c = self.statistics, self.original, self.chosen
        facts = (
            f"density {s.density:.2f}, NNZ spread {s.spread:.2f}, working set "
            f"{s.working_set_blocks} blocks, {s.rows} rows"
        )
        if c.policy != "original":
            kept = ", kept from before" if self.kept else ""
            return (
                f"head {self.head}: {c.policy}{kept}, {o.time_ms:.3g} -> {c.time_ms:.3g} ms "
                f"({0.0 - self.win_frac:+.1%}), hits {o.hit:.1%} -> {c.hit:.1%} ({facts})"
            )
        why = "nothing is faster"
        if self.best.policy != "original":
            gain = 1.0 - self.best.time_ms / o.time_ms
            why = f"{self.best.policy} would save {gain:.2%}, not worth it"
        return (
            f"head {self.head}: original, {o.time_ms:.3g} ms at {o.hit:.1%} hits; {why} ({facts})"
        )


@dataclass(frozen=True)
class Decision:
    """What the guard does with a launch.

    Attributes:
        heads: head by head; empty where the launch wasn't looked at.
        plan_ms: planning time of the launch, for each use of the plan.
        left_alone: heads of a launch that wasn't looked at, which keep today's order.
        note: what the decision doesn't rest on, and why; empty where all was looked at.
        least_calls: calls that it has to serve, or looking cost more than `LOOK_FRAC` of them: a
            launch may turn out shorter than its sizes let expect.
    """

    heads: tuple[HeadDecision, ...]
    plan_ms: float
    left_alone: int = 0
    note: str = ""
    least_calls: int = 0

    @property
    def policies(self) -> tuple[str, ...]:
        """One name a head, as `Planner` takes them."""
        return tuple(head.chosen.policy for head in self.heads) or ("original",) * self.left_alone

    @property
    def win_frac(self) -> float:
        """Expected time saved, planning included / the time of today's order."""
        before = sum(head.original.time_ms for head in self.heads)
        after = sum(head.chosen.time_ms for head in self.heads) + self.plan_ms
        return 1.0 - after / before if before > 0 else 0.0

    def explain(self) -> str:
        """One line a head, and a note first where not all was looked at."""
        return "\n".join([*([self.note] if self.note else []), *(h.explain() for h in self.heads)])


class Guard:
    """Decides launch after launch, and doesn't change its mind for little.

    A launch is planned as a whole, so planning is paid once for all of its heads: the guard
    compares no planning, planning without phases, and planning with them.

    Looking costs time as well. Where a decision serves a given number of calls, the guard looks at
    the blocks of a launch only if that takes at most `close_frac` of the calls' time, else at the
    lengths of its rows (how long the workers wait for the last), for at most `LOOK_FRAC`, else not
    at all.

    Attributes:
        model: the cost model.
        objective: ``"time"`` or ``"energy"``; both count planning, the latter as its share of the
            time at the same power.
        close_frac: share of the calls' time that looking at blocks may take; by default
            `LOOK_FRAC`.

    Example:
        >>> import numpy as np
        >>> import wavealign as wa
        >>> from wavealign.guard import CostModel
        >>> guard = wa.Guard(CostModel.make("h200"))
        >>> rng = np.random.default_rng(0)
        >>> shares = rng.lognormal(-1.5, 0.8, (1, 1200, 1))  # rows differ in length
        >>> sparse = rng.random((1, 1200, 1200)) < shares
        >>> for kept in (np.ones_like(sparse), sparse):
        ...     decision = guard.decide_mask(wa.BlockMask.from_dense(kept), uses=50)
        ...     print(f"{decision.policies[0]}: {decision.win_frac:.0%} less time expected")
        original: 0% less time expected
        nnz/shuffled+sawtooth: 21% less time expected
    """

    def __init__(
        self, model: CostModel, objective: str = "time", close_frac: float | None = None
    ) -> None:
        """A guard without a past.

        Raises:
            InputError: an unknown objective.
        """
        if objective not in OBJECTIVES:
            raise unknown_name("objective", objective, OBJECTIVES)
        self.model = model
        self.objective = objective
        self.close_frac = LOOK_FRAC if close_frac is None else close_frac
        self._before: tuple[str, ...] | None = None

    def forget(self) -> None:
        """Decide the next launch as if it were the first."""
        self._before = None

    def looks(self, shape: tuple[int, int, int], block: tuple[int, int], calls: int | None) -> bool:
        """Whether to look at a launch at all.

        Args:
            shape: H, M, N.
            block: tokens of a query and of a K/V block.
            calls: that the decision serves; None where looking is free.
        """
        if calls is None:
            return True
        H, M, N = shape
        most_ms = self.model.least_ms(H * M * N, H * M, *block)
        return self.model.profile.lengths_ms(H, M) <= LOOK_FRAC * calls * most_ms

    def looks_closely(
        self, nnz: int, shape: tuple[int, int, int], block: tuple[int, int], calls: int | None
    ) -> bool:
        """Whether to look at the blocks of a launch of `nnz` kept blocks.

        Args:
            nnz, shape, block, calls: see `looks`.
        """
        if calls is None:
            return True
        H, M, _ = shape
        launch_ms = self.model.least_ms(nnz, H * M, *block)
        return self.model.profile.look_ms(*shape) <= self.close_frac * calls * launch_ms

    def least_calls(self, nnz: int, shape: tuple[int, int, int], block: tuple[int, int]) -> int:
        """Calls that pay for having looked at the lengths of a launch of `nnz` kept blocks.

        Args:
            nnz, shape, block: see `looks`.
        """
        H, M, _ = shape
        launch_ms = self.model.least_ms(nnz, H * M, *block)
        if launch_ms == 0:
            return 0
        return math.ceil(self.model.profile.lengths_ms(H, M) / (LOOK_FRAC * launch_ms))

    def leave_alone(self, shape: tuple[int, int, int], block: tuple[int, int]) -> Decision:
        """The decision for a launch that isn't looked at."""
        H, M, N = shape
        most_ms = self.model.least_ms(H * M * N, H * M, *block)
        self._before = None
        note = f"{H} heads: original; looking would cost more than a launch of {most_ms:.2g} ms"
        return Decision((), 0.0, H, f"{note} can win")

    def decide_mask(self, mask: BlockMask, uses: float = 1.0, seed: int = 0) -> Decision:
        """Decide for a mask on the host, where looking is free.

        Args:
            mask: of one launch.
            uses: how often the plan is expected to be used.
            seed: of the shuffled visits.
        """
        capacity = self.model.capacity_blocks(mask.block_kv)
        heads = mask_statistics(mask, self.model.setup.wave, capacity, seed)
        return self.decide(heads, mask.block_q, mask.block_kv, uses)

    def decide(
        self, heads: Sequence[HeadStatistics], block_q: int, block_kv: int, uses: float = 1.0,
        note: str = "", least_calls: int = 0,
    ) -> Decision:  # fmt: skip
        """Decide for the heads of a launch, and remember.

        Args:
            heads: their statistics, in order.
            block_q, block_kv: tokens of a block.
            uses: how often the plan is expected to be used.
            note: what wasn't looked at, and why.
            least_calls: see `Decision`.
        """
        before = self._before if self._before and len(self._before) == len(heads) else None
        rows = self.model.predict(heads, block_q, block_kv)
        options = []
        for allowed in range(1, len(CANDIDATES) + 1):
            names = CANDIDATES[:allowed]
            chosen = [
                self._one([p for p in row if p.policy in names], before[h] if before else "")
                for h, row in enumerate(rows)
            ]
            plan_ms = self._plan_ms([p.policy for p, _ in chosen], heads) / uses
            options.append((self._total(chosen, plan_ms), -allowed, chosen, plan_ms))
        # A second switch, for the launch: planning must save more than the margin of everything.
        none, *others = options
        cost, _, chosen, plan_ms = min(others, key=lambda option: option[:2])
        if none[0] - cost <= self.model.profile.margin_frac * none[0]:
            cost, _, chosen, plan_ms = none
        decision = Decision(
            tuple(
                HeadDecision(h, p, row[0], min(row, key=self._cost), kept, heads[h])
                for h, (row, (p, kept)) in enumerate(zip(rows, chosen, strict=True))
            ),
            plan_ms,
            note=note,
            least_calls=least_calls,
        )
        self._before = decision.policies
        return decision

    def _one(self, row: Sequence[Prediction], before: str) -> tuple[Prediction, bool]:
        """A head's choice, and whether it is only kept from before."""
        profile, original = self.model.profile, self._cost(row[0])
        chosen = min(row, key=self._cost)
        if chosen is row[0] and len(row) > 1:
            # The launch is planned anyway, and near a tie order does more than snapshots show:
            # they know nothing of SMs that drift apart.
            other = min(row[1:], key=self._cost)
            near = self._cost(other) <= (1.0 + profile.margin_frac) * original
            chosen = other if near else chosen
        old = next((p for p in row if p.policy == before), None)
        if old is None or old is chosen:
            return chosen, False
        saved = self._cost(old) - self._cost(chosen)
        # Never keep what is expected to lose against today's order.
        if self._cost(old) <= original and saved <= profile.hysteresis_frac * original:
            return old, True
        return chosen, False

    def _cost(self, prediction: Prediction) -> float:
        if self.objective == "energy" and prediction.energy_j is not None:
            return prediction.energy_j
        return prediction.time_ms

    def _plan_ms(self, policies: Sequence[str], heads: Sequence[HeadStatistics]) -> float:
        if not heads:
            return 0.0
        return self.model.profile.plan_ms(policies, len(heads), heads[0].rows, heads[0].columns)

    def _total(self, chosen: Sequence[tuple[Prediction, bool]], plan_ms: float) -> float:
        cost = sum(self._cost(prediction) for prediction, _ in chosen)
        time_ms = sum(prediction.time_ms for prediction, _ in chosen)
        return cost * (1.0 + plan_ms / time_ms) if time_ms else 0.0
