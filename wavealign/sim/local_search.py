"""Local search over row orders with the simulator in the loop: how far from the best possible?

What it finds is a local optimum: an order at least as good as the cheap ones that it starts from,
so an upper bound of what the best order needs. It can't show that nothing better exists.
docs/results/orders.md says what it found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from wavealign.errors import InputError, unknown_name
from wavealign.masks.block_mask import BlockMask, Int32Array
from wavealign.order.context import OrderContext
from wavealign.order.parameters import format_arguments
from wavealign.order.policies import Policy, parse_policy, visiting_lists
from wavealign.order.schedule import Schedule
from wavealign.order.visits import VisitOrder
from wavealign.sim.moves import Moves
from wavealign.sim.setup import Setup
from wavealign.sim.simulate import launch_times
from wavealign.sim.traffic import launch_traffic

OBJECTIVES = ("time", "reads")

START_ROWS = (
    "nnz", "nnz-dealt", "profile-bisect+nnz", "pd-bisect+nnz", "nnz-bucket+svd+nnz",
    "nnz-bucket+svd", "svd+nnz", "svd", "original+nnz", "original",
)  # fmt: skip
"""Cheap row orders: the best is where the search starts, the others lend pieces."""

BATCH = 4
"""Proposals made from one order and simulated side by side; the best of them is considered."""

_FIRST_HEAT = 0.3  # of the median worsening of the first proposals: a few % of those are accepted
_LAST_HEAT = 0.003


@dataclass(frozen=True)
class Improved:
    """What a search found.

    Attributes:
        schedule: the best schedule, its policy naming the start and the search.
        start_policy: the order that it started from: the best of the cheap ones.
        objective: ``"time"`` or ``"reads"``.
        start: simulated ms, or bytes read from HBM, of the start; the whole launch.
        best: of `schedule`; never more than `start`.
        evaluations: simulations spent, at most those allowed.
        accepted: orders that the search moved to.
        interrupted: stopped by Ctrl-C.
    """

    schedule: Schedule
    start_policy: str
    objective: str
    start: float
    best: float
    evaluations: int
    accepted: int
    interrupted: bool


def improve(
    mask: BlockMask, policy: str | Policy, setup: Setup, evaluations: int, *,
    objective: str = "time", seed: int = 0, jobs: int = 1,
    progress: Callable[[int, float], None] = lambda done, best: None,
) -> Improved:  # fmt: skip
    """Search better row orders for a policy's visit order.

    The policy's rows and `START_ROWS` are simulated with its visits, and the search starts from
    the best. Heads are improved in turn, each simulated together with the head that follows it
    in the launch (its rows fill the SMs that end early), and a head's new order is kept if the
    whole launch gains. Moves: two rows change places, of any length or of a similar one; two
    stretches of slots change places; a stretch moves elsewhere or turns around; rows of a
    few waves are put in the order that another cheap order has them in; rows of the last waves
    change places. The best of `BATCH` proposals is accepted by simulated annealing.

    Args:
        mask: the mask of one launch.
        policy: where to start, and the visit order, which is kept (`phased` entries follow
            the rows).
        setup: device, kernel, model and regime.
        evaluations: simulations to spend, the cheap orders' included.
        objective: ``"time"``, or ``"reads"``: bytes read from HBM.
        seed: of the policy's and the search's random choices.
        jobs: threads; the result doesn't depend on it.
        progress: called with the evaluations done and the best value so far.

    Returns:
        The best schedule found. Ctrl-C ends the search early with the best so far.

    Raises:
        InputError: an unknown policy or objective, or too few evaluations to simulate the
            cheap orders and one batch a head.
    """
    recipe = policy if isinstance(policy, Policy) else parse_policy(policy)
    if objective not in OBJECTIVES:
        raise unknown_name("objective", objective, OBJECTIVES)
    starts = _starts(recipe)
    least = len(starts) + mask.H * (BATCH + 2)
    if evaluations < least:
        raise InputError(
            f"{evaluations} evaluations; expected at least {least}: {len(starts)} orders to start "
            f"from, and {BATCH + 2} for each of {mask.H} heads."
        )
    search = _Search(mask, recipe.visits, setup, objective, seed, jobs)
    with ThreadPoolExecutor(jobs) as search.pool:
        return search.run(starts, evaluations, progress)


def _starts(recipe: Policy) -> list[Policy]:
    """The policy, then the cheap row orders with its visits."""
    rows, slash, visits = recipe.name.partition("/")
    if recipe.visits.shuffled and not slash:  # an alias brings its own visits
        names = [n for n in ("shuffled", "sawtooth", "phased") if getattr(recipe.visits, n)]
        slash, visits = "/", "+".join(names) + format_arguments(recipe.visit_parameters)
    return [recipe, *(parse_policy(name + slash + visits) for name in START_ROWS if name != rows)]


@dataclass
class _Search:
    """The launch, and what has been spent on it."""

    mask: BlockMask
    visits: VisitOrder
    setup: Setup
    objective: str
    seed: int
    jobs: int
    pool: ThreadPoolExecutor = field(init=False)
    found: Int32Array = field(init=False)
    spent: int = 0
    accepted: int = 0

    def run(
        self, starts: Sequence[Policy], evaluations: int, progress: Callable[[int, float], None]
    ) -> Improved:
        mask = self.mask
        whole = _Window(self, mask, 0)
        contexts = [OrderContext(self.setup.wave, self.seed, h) for h in range(mask.H)]
        orders = [np.stack([*map(p.row_order, mask.heads(), contexts)]) for p in starts]
        values = self.evaluate(whole, orders)
        first = int(np.argmin(values))
        best_order, best = orders[first].copy(), values[first]
        start, interrupted = best, False

        def keep(h: int) -> None:
            """Take what was found for head `h`, if the whole launch gains."""
            nonlocal best_order, best
            trial = best_order.copy()
            trial[h] = self.found
            value = self.evaluate(whole, [trial])[0]
            if value < best:
                best_order, best = trial, value

        h, self.found = 0, best_order[0]
        try:
            progress(self.spent, best)
            for h in range(mask.H):
                heads = range(h, min(h + 2, mask.H))
                part = len(heads) < mask.H
                window = _Window(self, mask.select_heads(heads), h) if part else whole
                self.found = best_order[h]
                # Each head has an equal share of what is left; one is for the check.
                until = self.spent + (evaluations - self.spent) // (mask.H - h) - 1
                self.anneal(window, best_order, h, orders, until, progress)
                keep(h)
        except KeyboardInterrupt:
            interrupted = True
            keep(h)
        name = f"{starts[first].name} (improved, {self.spent} evaluations, seed {self.seed})"
        schedule = Schedule(best_order, mask.indptr, whole.lists(best_order), mask.shape, name)
        return Improved(
            schedule, starts[first].name, self.objective, start, best, self.spent, self.accepted,
            interrupted,
        )  # fmt: skip

    def evaluate(self, window: _Window, orders: Sequence[Int32Array]) -> list[float]:
        """The objective of each order of the window's heads."""
        self.spent += len(orders)
        return list(self.pool.map(window.value, orders))

    def anneal(
        self, window: _Window, launch: Int32Array, h: int, pool: Sequence[Int32Array], until: int,
        progress: Callable[[int, float], None],
    ) -> None:  # fmt: skip
        """Search head `h`; `found` is the best order so far."""
        rng = np.random.default_rng([self.seed, h, 0x5EA2C4])
        moves = Moves(self.mask.head(h).row_nnz, self.setup.wave, [order[h] for order in pool])
        others = launch[h + 1 : h + window.mask.H]
        current = launch[h]
        begun = self.spent
        heat = math.inf
        now = best = self.evaluate(window, [np.stack([current, *others])])[0]
        while (count := min(BATCH, until - self.spent)) > 0:
            proposals = [moves.propose(current, rng) for _ in range(count)]
            values = self.evaluate(window, [np.stack([p, *others]) for p in proposals])
            if math.isinf(heat):
                worse = [v - now for v in values if v > now]
                heat = float(np.median(worse)) if worse else 0.0
            done = (self.spent - begun) / max(1, until - begun)
            temperature = heat * _FIRST_HEAT * (_LAST_HEAT / _FIRST_HEAT) ** done
            chosen = int(np.argmin(values))
            worsening = values[chosen] - now
            if worsening <= 0 or (
                temperature > 0 and rng.random() < math.exp(-worsening / temperature)
            ):
                current, now = proposals[chosen], values[chosen]
                self.accepted += 1
            if now < best:
                self.found, best = current, now
            progress(self.spent, best)


class _Window:
    """Consecutive heads of the launch that are simulated together."""

    def __init__(self, search: _Search, mask: BlockMask, first_head: int) -> None:
        self.search, self.mask, self.first_head = search, mask, first_head
        plain = VisitOrder(shuffled=search.visits.shuffled, seed=search.visits.seed)
        self._unturned = visiting_lists(
            mask, np.empty((mask.H, 0), np.int32), plain, search.setup.wave, search.seed,
            search.jobs, first_head=first_head,
        )  # fmt: skip

    def lists(self, row_order: Int32Array) -> Int32Array:
        search = self.search
        return visiting_lists(
            self.mask, row_order, search.visits, search.setup.wave, search.seed,
            first_head=self.first_head, unturned=self._unturned,
        )  # fmt: skip

    def value(self, row_order: Int32Array) -> float:
        mask, setup = self.mask, self.search.setup
        schedule = Schedule(row_order, mask.indptr, self.lists(row_order), mask.shape, "")
        traffic = launch_traffic(mask, schedule, setup)
        if self.search.objective == "reads":
            return float(traffic.hbm_read_bytes)
        timing, hbm_ms = launch_times(mask, traffic, setup)
        return max(timing.time_ms, hbm_ms)
