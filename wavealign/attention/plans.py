"""Plans: what was chosen for launches of one size, the guard's decision, the schedule."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from wavealign._devices import on_device
from wavealign.attention.backends import choose_backend
from wavealign.attention.inputs import Sequences, check_mask
from wavealign.attention.lanes import Lanes, make_room
from wavealign.attention.terms import Terms
from wavealign.errors import InputError
from wavealign.gpu.backend import Backend
from wavealign.gpu.execution import Execution
from wavealign.gpu.registry import registered
from wavealign.gpu.sizes import Sizes
from wavealign.guard.decide import Decision, Guard
from wavealign.guard.on_device import device_lengths, device_statistics
from wavealign.masks.block_mask import BlockMask
from wavealign.planning.layout import ListLayout
from wavealign.planning.lists import DeviceSchedule
from wavealign.planning.planner import Planner

_MOST_PLANNERS = 16  # that are remembered; the oldest goes


@dataclass(frozen=True, eq=False)
class Plan:
    """What `attend` executes.

    Attributes:
        schedule: on the device.
        sizes: of the launch; as far as they are known, where it was planned ahead.
        backend: that the schedule is laid out for.
        decision: the guard's; None where a policy was asked for.

    Example:
        >>> import torch
        >>> import wavealign as wa
        >>> mask = torch.ones(2, 4, 4, dtype=torch.bool).tril()
        >>> plan = wa.plan(mask, "resync", "h200", backend="reference")
        >>> print(plan.explain())
        head 0: resync, as asked
        head 1: resync, as asked
        >>> q, k, v = torch.randn(3, 1, 2, 512, 64)
        >>> wa.attend(q, k, v, plan=plan).shape
        torch.Size([1, 2, 512, 64])
    """

    schedule: DeviceSchedule
    sizes: Sizes
    backend: Backend
    decision: Decision | None

    @property
    def policies(self) -> tuple[str, ...]:
        """One a head (of all sequences in turn, where each has its own mask)."""
        return self.schedule.policies

    def explain(self) -> str:
        """One line a head: what is done, and why."""
        if self.decision is not None:
            return self.decision.explain()
        return "\n".join(f"head {h}: {p}, as asked" for h, p in enumerate(self.policies))

    def fitted(self, sequences: Sequences, backend: str = "auto") -> Plan:
        """This plan for a call's sequences.

        Raises:
            InputError: sequences of other sizes or on another device, sizes that the backend
                doesn't take, or another backend is asked for than the one planned for.
        """
        sizes, device, name = sequences.fitted(self.sizes), sequences.q.device, self.backend.name
        if self.schedule.table.device != device:
            raise InputError(f"the plan is on {self.schedule.table.device}, q on {device}.")
        if backend not in ("auto", name):
            raise InputError(
                f"backend='{backend}', but the plan is for '{name}'; plan for the other."
            )
        return dataclasses.replace(self, sizes=sizes, backend=choose_backend(name, sizes, device))

    def attend(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Attention of sequences of these sizes.

        Returns:
            Output ``[B, tokens_q, H, D]`` and log-sum-exp (natural logarithm) float32
            ``[B, H, tokens_q]``.
        """
        return Execution(self.backend, self.sizes, self.schedule, sequences).attend()


class Buffers:
    """Lists that several `Attention` share, so that a model's layers need them once, not each.

    The layers take turns: a planner's edition says whether another one planned in between. Every
    thread and CUDA stream has lists of its own; a copy has none yet.

    Attributes:
        captured: planners that a graph writes to, unseen: kept for good.
    """

    def __init__(self) -> None:
        self._lanes: Lanes[object, Planner] = Lanes()
        self.captured: set[Planner] = set()

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()

    def planner(
        self, shape: tuple[int, int, int], device: torch.device, wave: int, seed: int,
        layout: ListLayout,
    ) -> Planner:  # fmt: skip
        """The planner of these arguments for this thread and stream, made on first use.

        Args:
            shape, device, wave, seed, layout: see `Planner`.
        """
        key, planners = (shape, device, wave, seed, layout), self._lanes.here(device)
        if key not in planners:
            make_room(planners, _MOST_PLANNERS)
            planners[key] = Planner(shape, device, wave=wave, seed=seed, layout=layout)
        return planners[key]


@dataclass(frozen=True, eq=False)
class Prepared:
    """Launches of one size before their masks are looked at.

    Attributes:
        terms: what was asked for.
        sizes: of the launches.
        device: of masks and data.
        backend: that runs them.
        guard: None where a policy was asked for.
    """

    terms: Terms
    sizes: Sizes
    device: torch.device
    backend: Backend
    guard: Guard | None

    @functools.cached_property
    def wave(self) -> int:
        """Rows in flight that schedules are made for."""
        with on_device(self.device):
            return self.terms.wave(self.backend, self.sizes)

    def planner(self, buffers: Buffers | None = None, layout: ListLayout | None = None) -> Planner:
        """A planner for masks of these sizes.

        Args:
            buffers: shared with others; by default new ones.
            layout: of the lists; by default as the backend wants them.
        """
        layout = layout or self.backend.capabilities.layout_for(self.sizes)
        return (buffers or Buffers()).planner(
            self.sizes.shape, self.device, self.wave, self.terms.seed, layout
        )

    def decide(
        self, heads: Tensor, planner: Planner, *, uses: float = 1.0, calls: int | None = None
    ) -> Decision:
        """Ask the guard, which there is; the host waits where it looks at the launch.

        Args:
            heads: bool ``[H, M, N]``.
            planner: for such masks.
            uses: of a plan, that its planning is shared by.
            calls: that the decision serves; None where looking is free.
        """
        guard, shape, block = self.guard, planner.shape, (self.sizes.block_q, self.sizes.block_kv)
        assert guard is not None
        launches = None
        if not guard.looks(shape, block, calls):
            return guard.leave_alone(shape, block)
        if calls is not None:
            lengths, launches = device_lengths(heads, planner.wave)
            nnz = sum(head.nnz for head in lengths)
            if not guard.looks_closely(nnz, shape, block, calls):
                note = "too short a launch to look at its blocks: by the lengths of its rows alone"
                least = guard.least_calls(nnz, shape, block)
                return guard.decide(lengths, *block, uses, note, least)
        capacity = guard.model.capacity_blocks(self.sizes.block_kv)
        shuffled = planner.kv_orders("nnz/shuffled")
        found = device_statistics(
            heads, planner.wave, capacity, shuffled, self.terms.seed, launches
        )
        return guard.decide(found, *block, uses)

    def plan(
        self, heads: Tensor, planner: Planner, *, uses: float = 1.0, calls: int | None = None
    ) -> Plan:
        """Decide if there is a guard, and plan.

        Args:
            heads, planner, uses, calls: see `decide`.
        """
        decides = self.guard is not None
        decision = self.decide(heads, planner, uses=uses, calls=calls) if decides else None
        return self.decided(heads, planner, decision)

    def decided(
        self, heads: Tensor, planner: Planner, decision: Decision | None, *, follow: bool = False
    ) -> Plan:
        """Plan by a decision, or by the policy that was asked for.

        Args:
            heads: the mask ``[H, M, N]``.
            planner: makes the lists.
            decision: the guard's; None for the policy that was asked for.
            follow: leave the lists as they are where they are this mask's already.
        """
        policies = self.terms.policy if decision is None else decision.policies
        schedule = (planner.follow if follow else planner)(heads, policies)
        return Plan(schedule, self.sizes, self.backend, decision)


def prepare(
    terms: Terms,
    sizes: Sizes,
    device: torch.device,
    regime: str = "single",
    close_frac: float | None = None,
) -> Prepared:
    """Choose the backend, and ask for a guard where one decides.

    Args:
        terms: what is asked for.
        sizes: of the launches.
        device: of masks and data.
        regime, close_frac: the guard's.

    Raises:
        InputError: sizes that the backend doesn't take, or no profile for this GPU.
        MissingCapabilityError: no backend can run here, with the reasons.
    """
    backend = choose_backend(terms.backend, sizes, device)
    decides = terms.policy == "auto"
    with on_device(device):
        guard = terms.guard(backend, sizes, regime, close_frac) if decides else None
    return Prepared(terms, sizes, device, backend, guard)


def plan(
    mask: Tensor | BlockMask, policy: str = "auto", device_profile: str | None = None, *,
    block: tuple[int, int] | None = None, tokens: tuple[int, int] | None = None,
    backend: str = "auto", objective: str = "time", uses: float = 1.0, head_dim: int = 128,
    seed: int = 0,
) -> Plan:  # fmt: skip
    """Decide for a mask, and make the schedule on its device.

    With ``policy="auto"`` the host waits once, for the guard's ten numbers a head; with a named
    policy it never does.

    Args:
        mask: bool ``[H, M, N]`` or ``[B, H, M, N]``, or a `BlockMask`; lists and packed bits by way
            of `wavealign.planning.mask_from_lists` and `mask_from_packed`.
        policy: ``"auto"`` or a policy's name.
        device_profile: device name or path; by default the GPU at hand.
        block: tokens of a query and of a K/V block; by default 128x128, or the `BlockMask`'s own.
        tokens: query and key/value tokens; by default every block is full.
        backend: see `attend`.
        objective: ``"time"`` or ``"energy"``.
        uses: how often the plan is expected to be used.
        head_dim: elements per head.
        seed: of the shuffled K/V orders.

    Raises:
        InputError, MissingCapabilityError: see there; nothing is planned by halves.

    Example:
        >>> import torch
        >>> import wavealign as wa
        >>> mask = torch.ones(1, 4, 4, dtype=torch.bool).tril()
        >>> plan = wa.plan(mask, "nnz", "h200", backend="reference")
        >>> plan.schedule.table.tolist()  # slot in launch order → query block
        [[3, 2, 1, 0]]
    """
    terms = Terms(policy, device_profile, backend, objective, seed)
    device = None
    if isinstance(mask, BlockMask) and torch.cuda.is_available():
        anywhere = backend != "auto" and registered(backend).capabilities.anywhere
        device = None if anywhere else torch.device("cuda")
    heads, sizes = check_mask(mask, block, tokens, device)
    # Nobody knows the sequences yet: they are assumed to be bf16.
    prepared = prepare(terms, dataclasses.replace(sizes, head_dim=head_dim), heads.device)
    with on_device(heads):
        return prepared.plan(heads, prepared.planner(), uses=uses)
