"""A plan: the guard's decision for a mask, and the schedule made of it on the device."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from wavealign.attention.backends import BACKENDS, Choice, choose_backend, rows_in_flight
from wavealign.attention.inputs import Geometry, Sequences, check_mask, geometry
from wavealign.errors import InputError, unknown_name
from wavealign.guard.decide import OBJECTIVES, Decision, Guard
from wavealign.guard.model import CostModel
from wavealign.guard.on_device import device_lengths, device_statistics
from wavealign.masks.block_mask import BlockMask
from wavealign.planning.layout import ListLayout
from wavealign.planning.planner import DeviceSchedule, Planner
from wavealign.planning.recipes import Recipe
from wavealign.sim.devices import device_of_gpu, load_device

_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True, eq=False)
class Plan:
    """What `attend` executes.

    Attributes:
        schedule: on the device.
        sizes: of the mask.
        choice: the backend whose convention the schedule is in.
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
    sizes: Geometry
    choice: Choice
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


@dataclass(frozen=True)
class Terms:
    """What decides a plan besides the mask.

    Attributes:
        policy: ``"auto"`` (the guard decides) or one for all heads.
        device_profile: a device's name or path; None for the GPU at hand.
        backend: see `choose_backend`.
        objective: the guard's, ``"time"`` or ``"energy"``.
        seed: of the sweeps.

    Raises:
        InputError: unknown names.
    """

    policy: str = "auto"
    device_profile: str | None = None
    backend: str = "auto"
    objective: str = "time"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy != "auto":
            Recipe.parse(self.policy)
        if self.backend not in BACKENDS:
            raise unknown_name("backend", self.backend, BACKENDS)
        if self.objective not in OBJECTIVES:
            raise unknown_name("objective", self.objective, OBJECTIVES)
        if self.device_profile is not None:
            load_device(self.device_profile)

    def guard(
        self,
        sizes: Geometry,
        choice: Choice,
        head_dim: int,
        regime: str,
        close_frac: float | None = None,
    ) -> Guard:
        """A guard for launches of these sizes; the others as of `CostModel.make` and `Guard`.

        Raises:
            InputError: no profile for this GPU, and none given.
        """
        device = load_device(profile_name(self.device_profile))
        kernel = choice.name if choice.name in device.kernels else None
        # A block's cycles hold for the rows in flight that the profile's kernel has.
        wave = rows_in_flight(choice, sizes) if kernel is not None else None
        model = CostModel.make(device, kernel, wave=wave, head_dim=head_dim, regime=regime)
        return Guard(model, self.objective, close_frac)

    def wave(self, sizes: Geometry, choice: Choice) -> int:
        """Rows in flight: of the GPU, or of the profile where nothing runs on one."""
        found = rows_in_flight(choice, sizes)
        if found is not None:
            return found
        return CostModel.make(profile_name(self.device_profile)).setup.wave


def profile_name(given: str | None) -> str:
    """The device profile to plan by; warns once where it is another GPU's.

    Raises:
        InputError: none given, and no GPU, or one without a profile.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    own = device_of_gpu(gpu) if gpu else None
    if given is None:
        if own is None:
            # Without a GPU a policy needs a profile, too: for the rows in flight.
            rest = ", or a policy instead of 'auto'" if gpu else ""
            raise InputError(
                f"no device profile for {gpu or 'this machine, which has no NVIDIA GPU'}; name one "
                "of `wavealign devices` (attend and plan: device_profile='h200', else "
                f"profile='h200'){rest}."
            )
        return own
    named = load_device(given).name
    if gpu is not None and own != named and (given, gpu) not in _warned:
        _warned.add((given, gpu))
        warnings.warn(f"planning by profile '{given}' on a {gpu}.", UserWarning, stacklevel=3)
    return given


def plan(
    mask: torch.Tensor | BlockMask,
    policy: str = "auto",
    device_profile: str | None = None,
    *,
    block: tuple[int, int] | None = None,
    tokens: tuple[int, int] | None = None,
    backend: str = "auto",
    objective: str = "time",
    uses: float = 1.0,
    head_dim: int = 128,
    seed: int = 0,
) -> Plan:
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
        backend: ``"auto"``, ``"triton"``, ``"fa4"`` or ``"reference"``.
        objective: ``"time"`` or ``"energy"``.
        uses: how often the plan is expected to be used.
        head_dim: elements per head.
        seed: of the sweeps.

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
    if isinstance(mask, BlockMask):
        tokens = tokens or (mask.tokens_q, mask.tokens_kv)
        device = torch.device("cuda" if backend != "reference" else "cpu")
        like = torch.empty(0, device=device) if torch.cuda.is_available() else None
    else:
        like = None
    heads, size, batch = check_mask(mask, like, block)
    sizes = geometry(heads, batch, size, tokens)
    choice = choose_backend(backend, sizes, None, heads.device.type)
    planner = make_planner(heads, sizes, choice, terms)
    guard = terms.guard(sizes, choice, head_dim, "single") if policy == "auto" else None
    return make_plan(heads, sizes, choice, planner, terms, guard, uses=uses)


def make_planner(
    heads: torch.Tensor,
    sizes: Geometry,
    choice: Choice,
    terms: Terms,
    layout: ListLayout | None = None,
) -> Planner:
    """A planner for masks of these sizes; its lists are laid out as the backend wants them."""
    shape = (heads.shape[0], heads.shape[1], heads.shape[2])
    wave = terms.wave(sizes, choice)
    layout = layout or choice.layout(sizes)
    return Planner(shape, heads.device, wave=wave, seed=terms.seed, layout=layout)


def decide(
    heads: torch.Tensor,
    sizes: Geometry,
    planner: Planner,
    guard: Guard,
    seed: int,
    *,
    uses: float = 1.0,
    calls: int | None = None,
) -> Decision:
    """Ask the guard; the host waits where it looks at the launch.

    Args:
        heads: bool ``[H, M, N]``.
        sizes, planner, guard, seed: of the launch.
        uses: of a plan, that its planning is shared by.
        calls: that the decision serves; None where looking is free.
    """
    shape, block = (heads.shape[0], heads.shape[1], heads.shape[2]), (sizes.block_q, sizes.block_kv)
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
    capacity = guard.model.capacity_blocks(sizes.block_kv)
    sweeps = planner.sweeps("nnz/shuffled")
    found = device_statistics(heads, planner.wave, capacity, sweeps, seed, launches)
    return guard.decide(found, *block, uses)


def make_plan(
    heads: torch.Tensor,
    sizes: Geometry,
    choice: Choice,
    planner: Planner,
    terms: Terms,
    guard: Guard | None,
    *,
    uses: float = 1.0,
    calls: int | None = None,
) -> Plan:
    """Decide if there is a guard (see `decide`), and plan."""
    if guard is None:
        return Plan(planner(heads, terms.policy), sizes, choice, None)
    decision = decide(heads, sizes, planner, guard, terms.seed, uses=uses, calls=calls)
    return Plan(planner(heads, decision.policies), sizes, choice, decision)


def fitting_choice(
    sizes: Geometry, sequences: Sequences, backend: str, planned: Plan | None
) -> Choice:
    """The backend of a call; a plan's own, if there is one.

    Raises:
        InputError: another backend is asked for than the one planned for.
    """
    if planned is None:
        return choose_backend(backend, sizes, sequences, sequences.q.device.type)
    if backend not in ("auto", planned.choice.name):
        raise InputError(
            f"backend='{backend}', but the plan is for '{planned.choice.name}'; plan for the other."
        )
    return choose_backend(planned.choice.name, sizes, sequences, sequences.q.device.type)
