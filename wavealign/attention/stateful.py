"""`Attention`: one attention site over the steps of a denoising loop, with memory."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from wavealign.attention.inputs import Sequences, check_mask
from wavealign.attention.plans import Buffers, Plan, Prepared, prepare
from wavealign.attention.terms import Terms
from wavealign.errors import InputError, unknown_name
from wavealign.guard.decide import Decision
from wavealign.masks.block_mask import BlockMask
from wavealign.planning.planner import Planner
from wavealign.sim.power import REGIMES

_MOST_SHAPES = 16  # of calls that are remembered; the oldest goes
_SAMPLED_ROW = 16  # every so many rows of a mask tell how much it has changed


@dataclass(frozen=True)
class Reuse:
    """How long the guard's decision holds. Lists are always those of the mask at hand.

    Attributes:
        calls: at most so many calls share a decision; more where the launch is so short that
            looking at it would show.
        min_overlap: below this overlap with the mask that was decided for (shared blocks / blocks
            of either) the next call decides anew. The overlap is taken 1, 2, 4, ... calls after a
            decision and read when the device has it, one call late: nothing waits for it.

    Raises:
        InputError: no call, or an overlap outside 0 to 1.

    Example:
        >>> import wavealign as wa
        >>> site = wa.Attention("h200", wa.Reuse(calls=10, min_overlap=0.9), backend="reference")
        >>> wa.Reuse().calls
        64
    """

    calls: int = 64
    min_overlap: float = 0.7

    def __post_init__(self) -> None:
        if self.calls < 1 or not 0 <= self.min_overlap <= 1:
            raise InputError(
                f"reuse of {self.calls} calls, overlap {self.min_overlap}; expected at least 1 "
                "call and 0 to 1."
            )


@dataclass
class Statistics:
    """What an `Attention` has done.

    Attributes:
        calls: in all.
        decided: calls that asked the guard.
        planned: calls that made lists.
        reused: calls whose mask was the very tensor of the call before: nothing was made.
        skipped: calls that the guard left in today's order.
        changed: decisions that came early, because the mask had changed much.
        host_seconds: the host's time in planning and deciding, waiting for the guard included.
    """

    calls: int = 0
    decided: int = 0
    planned: int = 0
    reused: int = 0
    skipped: int = 0
    changed: int = 0
    host_seconds: float = 0.0


@dataclass(eq=False)
class _State:
    """Of one shape of calls."""

    prepared: Prepared
    planner: Planner
    decision: Decision | None = None
    plan: Plan | None = None
    age: int = 0
    made_for: tuple[weakref.ref[object], int] | None = None  # a mask a layer would add up
    decided_for: Tensor | None = None
    overlap: Tensor | None = None
    overlap_event: torch.cuda.Event | None = None


class Attention:
    """Attention at one place of a model, called once a denoising step.

    Memory: for each shape of calls ``4·H·M·(N + 5)`` bytes for lists (once for all that share
    `Buffers`) and ``H·M·N / 16`` of the mask that was decided for; it doesn't grow with calls. The
    last 16 shapes are remembered.

    Attributes:
        statistics: what it has done so far.

    Example:
        >>> import torch
        >>> import wavealign as wa
        >>> site = wa.Attention("h200", backend="reference")
        >>> q, k, v = torch.randn(3, 1, 2, 256, 64)
        >>> mask = torch.ones(2, 2, 2, dtype=torch.bool)
        >>> for step in range(3):
        ...     out = site(q, k, v, mask)
        >>> site.statistics.calls, site.statistics.planned, site.statistics.reused
        (3, 1, 2)
    """

    def __init__(
        self,
        profile: str | None = None,
        reuse: Reuse | None = None,
        *,
        policy: str = "auto",
        backend: str = "auto",
        objective: str = "time",
        layout: str = "bhsd",
        block: tuple[int, int] | None = None,
        regime: str = "steady",
        seed: int = 0,
        buffers: Buffers | None = None,
    ) -> None:
        """An attention without a past.

        Args:
            profile: device name or path; by default the GPU at hand.
            reuse: how long a decision holds.
            policy: ``"auto"`` or a policy's name.
            backend, layout, block: see `attend`.
            objective: ``"time"`` or ``"energy"``.
            regime: ``"steady"`` for a loop that keeps the card busy, or ``"single"``.
            seed: of the shuffled K/V orders.
            buffers: to share lists with others of the same stream.

        Raises:
            InputError: unknown names.
        """
        if regime not in REGIMES:
            raise unknown_name("regime", regime, REGIMES)
        self._buffers = buffers or Buffers()
        self._terms = Terms(policy, profile, backend, objective, seed)
        self._reuse = reuse or Reuse()
        self._layout, self._block, self._regime = layout, block, regime
        self._states: dict[object, _State] = {}
        self.statistics = Statistics()

    def explain(self) -> str:
        """The last decisions, one line a head."""
        plans = [s.plan.explain() for s in self._states.values() if s.plan is not None]
        return "\n".join(plans)

    @torch.compiler.disable
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask, *, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one step.

        Args:
            q, k, v, mask, return_lse: see `attend`.
        """
        sequences = Sequences.check(q, k, v, self._layout)
        started = time.perf_counter()
        plan = self._plan(sequences, mask)
        self.statistics.host_seconds += time.perf_counter() - started
        self.statistics.skipped += all(policy == "original" for policy in plan.policies)
        out, lse = plan.attend(sequences)
        return (sequences.output(out), lse) if return_lse else sequences.output(out)

    def _plan(self, sequences: Sequences, mask: Tensor | BlockMask) -> Plan:
        q, k = sequences.q, sequences.k
        if not isinstance(mask, Tensor | BlockMask):
            raise InputError(
                f"a mask of type {type(mask).__module__}.{type(mask).__name__}; expected a "
                "tensor or a wavealign.BlockMask."
            )
        # An inference tensor doesn't count its changes, so it is never known to be the same.
        known = not isinstance(mask, Tensor) or not mask.is_inference()
        version = mask._version if isinstance(mask, Tensor) and known else 0
        key = (tuple(mask.shape), q.shape, k.shape, q.dtype, q.device)
        state = self._states.get(key)
        self.statistics.calls += 1
        if state is not None and state.plan is not None and state.made_for is not None:
            made_for, made_version = state.made_for
            held = self._buffers.hold(state.planner, state)
            if held and made_for() is mask and made_version == version:
                self.statistics.reused += 1
                return state.plan
        heads, sizes = check_mask(mask, self._block, sequences.tokens, q.device)
        if state is None:
            prepared = prepare(self._terms, sequences.fitted(sizes), q.device, self._regime)
            state = _State(prepared, prepared.planner(self._buffers))
            if len(self._states) >= _MOST_SHAPES:
                self._states.pop(next(iter(self._states)))
            self._states[key] = state
        if state.prepared.guard is not None:
            if self._must_decide(state):
                self._decide(state, heads)
            self._look(state, heads)
            state.age += 1
        state.plan = state.prepared.decided(heads, state.planner, state.decision)
        self._buffers.take(state.planner, state)
        state.made_for = (weakref.ref(mask), version) if known else None
        self.statistics.planned += 1
        return state.plan

    def _must_decide(self, state: _State) -> bool:
        if state.decision is None:
            return True
        if state.age >= max(self._reuse.calls, state.decision.least_calls):
            return True
        done = state.overlap_event is None or state.overlap_event.query()
        if state.overlap is None or not done:
            return False
        changed = float(state.overlap) < self._reuse.min_overlap
        self.statistics.changed += changed
        return changed

    def _decide(self, state: _State, heads: Tensor) -> None:
        state.decision = state.prepared.decide(heads, state.planner, calls=self._reuse.calls)
        state.overlap, state.overlap_event, state.age = None, None, 0
        self.statistics.decided += 1
        if state.decision.note:  # it doesn't rest on blocks: no need to see how they change
            state.decided_for = None
            return
        sample = heads[:, ::_SAMPLED_ROW]
        if state.decided_for is None:
            with torch.inference_mode(False):
                state.decided_for = torch.empty(sample.shape, dtype=torch.bool, device=heads.device)
        state.decided_for.copy_(sample)

    def _look(self, state: _State, heads: Tensor) -> None:
        """Ask the device for the overlap with the mask that was decided for."""
        # Every so often: these few small kernels would show beside a short launch.
        if state.age == 0 or state.age & (state.age - 1) or state.decided_for is None:
            return
        sample = heads[:, ::_SAMPLED_ROW]
        shared = (sample & state.decided_for).sum()
        either = (sample | state.decided_for).sum()
        overlap = torch.where(either > 0, shared / either.clamp_min(1), 1.0).float()
        if not overlap.is_cuda:
            state.overlap = overlap
            return
        with torch.inference_mode(False):
            state.overlap = torch.empty((), device="cpu", pin_memory=True)
        state.overlap.copy_(overlap, non_blocking=True)
        state.overlap_event = torch.cuda.Event()
        state.overlap_event.record()
