"""`Attention`: one attention site over the steps of a denoising loop, with memory."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from wavealign._devices import on_device
from wavealign._locks import ForkSafeLock
from wavealign.attention import lanes
from wavealign.attention.inputs import LAYOUTS, Sequences, check_mask, need_mask
from wavealign.attention.plans import Buffers, Plan, Prepared, prepare
from wavealign.attention.terms import Terms
from wavealign.errors import InputError, unknown_name
from wavealign.guard.decide import Decision
from wavealign.masks.block_mask import BlockMask
from wavealign.numbers import block_size, number, whole_number
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
        InputError: no call, or an overlap outside 0 to 1, or what is no number.

    Example:
        >>> import wavealign as wa
        >>> site = wa.Attention("h200", wa.Reuse(calls=10, min_overlap=0.9), backend="reference")
        >>> wa.Reuse().calls
        64
    """

    calls: int = 64
    min_overlap: float = 0.7

    def __post_init__(self) -> None:
        overlap = number("min_overlap", self.min_overlap)
        if whole_number("calls", self.calls) < 1 or not 0 <= overlap <= 1:
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
        planned: calls that compared the mask with that of the lists at hand, and made lists where
            they differed.
        reused: calls that said ``same_mask``, and found their lists as they were: nothing was done.
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


_counting = ForkSafeLock()  # of all statistics


@dataclass(eq=False)
class _Made:
    """A plan, and what tells whether its lists still are a mask's."""

    plan: Plan
    edition: int  # of the planner
    mask: weakref.ref[object] | None  # a mask a layer would add up; None once it came again
    version: int


@dataclass(eq=False)
class _State:
    """Of one shape of calls."""

    prepared: Prepared
    planner: Planner
    decision: Decision | None = None
    made: _Made | None = None
    age: int = 0
    decided_for: Tensor | None = None
    overlap: Tensor | None = None
    overlap_event: torch.cuda.Event | None = None


class Attention:
    """Attention at one place of a model, called once a denoising step.

    Threads may share it: each, on each CUDA stream, has lists and decisions of its own, until it
    ends. A copy, pickled or not, has the same terms, and neither lists nor a past.

    Memory: for each thread, stream and shape of calls ``H·M·(5·N + 20)`` bytes for lists, for the
    mask that they are of and for making them (once for all that share `Buffers`; `svd` takes more,
    see `wavealign.planning.Planner`) and ``H·M·N / 16`` of the mask that was decided for; it
    doesn't grow with calls. The last 16 shapes are remembered.

    Attributes:
        statistics: what it has done so far.

    Example:
        >>> import torch
        >>> import wavealign as wa
        >>> site = wa.Attention("h200", backend="reference")
        >>> q, k, v = torch.randn(3, 1, 2, 256, 64)
        >>> mask = torch.ones(2, 2, 2, dtype=torch.bool)
        >>> for step in range(3):
        ...     out = site(q, k, v, mask, same_mask=step > 0)
        >>> site.statistics.calls, site.statistics.planned, site.statistics.reused
        (3, 1, 2)
    """

    def __init__(
        self, profile: str | None = None, reuse: Reuse | None = None, *, policy: str = "auto",
        backend: str = "auto", objective: str = "time", layout: str = "bhsd",
        block: tuple[int, int] | None = None, regime: str = "steady", seed: int = 0,
        buffers: Buffers | None = None,
    ) -> None:  # fmt: skip
        """An attention without a past.

        Args:
            profile: device name or path; by default the GPU at hand.
            reuse: how long a decision holds.
            policy: ``"auto"`` or a policy's name.
            backend, layout, block: see `attend`.
            objective: ``"time"`` or ``"energy"``.
            regime: ``"steady"`` for a loop that keeps the card busy, or ``"single"``.
            seed: of the shuffled K/V orders.
            buffers: to share lists with others.

        Raises:
            InputError: unknown names, or what is no `Reuse`.
        """
        if regime not in REGIMES:
            raise unknown_name("regime", regime, REGIMES)
        if layout not in LAYOUTS:
            raise unknown_name("layout", layout, LAYOUTS)
        if not isinstance(reuse, Reuse | None):
            raise InputError(f"reuse={reuse!r}; expected a wavealign.Reuse.")
        self._buffers = buffers or Buffers()
        self._terms = Terms(policy, profile, backend, objective, seed)
        self._reuse = reuse or Reuse()
        self._layout, self._regime = layout, regime
        self._block = block_size(block) if block is not None else None
        self._lanes: lanes.Lanes[object, _State] = lanes.Lanes()
        self.statistics = Statistics()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_lanes": lanes.Lanes(), "statistics": Statistics()}

    def explain(self) -> str:
        """The last decisions of all threads that haven't ended, one line a head."""
        made = [state.made for state in self._lanes.values()]
        return "\n".join(m.plan.explain() for m in made if m is not None)

    @torch.compiler.disable
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask, *,
        return_lse: bool = False, same_mask: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attention of one step.

        While a CUDA graph is captured, planning is recorded, too: replays follow what the mask
        holds then, by the decision of the last call before.

        Args:
            q, k, v, mask, return_lse: see `attend`.
            same_mask: this very tensor was the mask of the last such call, in whichever thread and
                however it ended, and nothing has written to it since, by whatever road: its lists
                are used again where they still stand. Torch doesn't see every change, so unless
                this is said, each call compares content (on a GPU the device does, and plans where
                it must).

        Raises:
            InputError: see `attend`; a capture before a first call on its stream.
        """
        if not same_mask:
            self._outdate(mask)
        sequences = Sequences.check(q, k, v, self._layout)
        started = time.perf_counter()
        with on_device(sequences.q):
            plan = self._plan(sequences, mask, same_mask)
            original = all(policy == "original" for policy in plan.policies)
            self._count(host_seconds=time.perf_counter() - started, skipped=original)
            out, lse = plan.attend(sequences)
        return (sequences.output(out), lse) if return_lse else sequences.output(out)

    def _outdate(self, mask: object) -> None:
        """Lists that any thread made of this mask don't stand, even if this call goes wrong."""
        for state in self._lanes.values():
            made = state.made
            if made is not None and made.mask is not None and made.mask() is mask:
                made.mask = None

    def _count(self, **more: float) -> None:
        with _counting.lock:
            for name, value in more.items():
                setattr(self.statistics, name, getattr(self.statistics, name) + value)

    def _plan(self, sequences: Sequences, mask: Tensor | BlockMask, same_mask: bool) -> Plan:
        q, k = sequences.q, sequences.k
        need_mask(mask)
        # An inference tensor doesn't count its changes.
        counts = isinstance(mask, Tensor) and not mask.is_inference()
        version = mask._version if isinstance(mask, Tensor) and counts else 0
        key = (tuple(mask.shape), q.shape, k.shape, q.dtype, q.device)
        states, captures = self._lanes.here(q.device), lanes.capturing(q.device)
        state = states.get(key)
        made = state.made if state is not None else None
        if captures and (made is None or isinstance(mask, BlockMask)):
            raise InputError(
                "a CUDA graph is being captured, and what this call needs from the host isn't "
                "there; expected a mask tensor on the device and a call like this one beforehand, "
                "in this thread and on the capture's stream (torch.cuda.graph(graph, stream=...)), "
                "or a plan made beforehand: attend(q, k, v, plan=wavealign.plan(...))."
            )
        self._count(calls=1)
        if same_mask and not captures and state is not None and made is not None:
            replayed = state.planner in self._buffers.captured
            stands = made.edition == state.planner.edition and not replayed
            known = made.mask is not None and made.mask() is mask
            if stands and known and made.version == version:
                self._count(reused=1)
                return made.plan
        heads, sizes = check_mask(mask, self._block, sequences.tokens, q.device)
        if state is None:
            prepared = prepare(self._terms, sequences.fitted(sizes), q.device, self._regime)
            state = _State(prepared, prepared.planner(self._buffers))
            lanes.make_room(states, _MOST_SHAPES)
            states[key] = state
        if captures:  # the guard would need the host
            self._buffers.captured.add(state.planner)
        else:
            state.made = None  # until this plan is whole
            if state.prepared.guard is not None:
                if self._must_decide(state):
                    self._decide(state, heads)
                self._look(state, heads)
                state.age += 1
        plan = state.prepared.decided(heads, state.planner, state.decision, follow=not captures)
        state.made = _Made(plan, state.planner.edition, weakref.ref(mask), version)
        self._count(planned=1)
        return plan

    def _must_decide(self, state: _State) -> bool:
        decision = state.decision
        if decision is None or state.age >= max(self._reuse.calls, decision.least_calls):
            return True
        done = state.overlap_event is None or state.overlap_event.query()
        if state.overlap is None or not done:
            return False
        changed = float(state.overlap) < self._reuse.min_overlap
        self._count(changed=changed)
        return changed

    def _decide(self, state: _State, heads: Tensor) -> None:
        state.decision = state.prepared.decide(heads, state.planner, calls=self._reuse.calls)
        state.overlap, state.overlap_event, state.age = None, None, 0
        self._count(decided=1)
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
        state.overlap_event.record(torch.cuda.current_stream(heads.device))
