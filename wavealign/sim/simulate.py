"""Simulate: a mask under a policy (`simulate`), a launch, or a schedule that is at hand.

docs/simulator.md describes the two models, docs/fidelity.md how far they can be trusted.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from wavealign._version import __version__
from wavealign.masks.block_mask import BlockMask, need_block_mask
from wavealign.order.policies import build_schedule
from wavealign.order.schedule import Schedule
from wavealign.runs.launch import Launch
from wavealign.runs.result import Binding, Environment, Outcome, Result
from wavealign.sim.bounds import bounds
from wavealign.sim.devices import DEFAULT_DEVICE, DeviceProfile
from wavealign.sim.power import Timing
from wavealign.sim.setup import Setup
from wavealign.sim.traffic import Traffic, launch_traffic

_BINDS_FROM = 0.05  # share of the cycles from which bandwidth counts as what binds


def simulate(
    mask: BlockMask, policy: str | Schedule = "original",
    device: str | DeviceProfile = DEFAULT_DEVICE, kernel: str | None = None, *,
    l2_bytes: int | None = None, wave: int | None = None, head_dim: int = 128, dtype: str = "bf16",
    model: str = "full", regime: str = "single", seed: int = 0, name: str = "",
) -> Result:  # fmt: skip
    """Run all heads of a mask as one launch, in the simulator.

    Args:
        mask: the block mask.
        policy: a policy's name (``wavealign policies`` lists them) or a `Schedule`.
        device, kernel, l2_bytes, wave, head_dim, dtype, model, regime: see `Setup.make`.
        seed: of every random choice.
        name: the mask's name in the result.

    Returns:
        The result row; fields that the model can't give are None.

    Raises:
        InputError: unknown names, or a schedule that isn't this mask's.

    Example:
        >>> import numpy as np
        >>> import wavealign as wa
        >>> kept = np.random.default_rng(0).random((1, 300, 300)) < 0.3
        >>> mask = wa.BlockMask.from_dense(kept)
        >>> for policy in ("original", "resync"):
        ...     result = wa.simulate(mask, policy, device="h200", l2_bytes=8_000_000)
        ...     print(f"{result.policy}: {result.l2_hit_frac:.0%} hits, {result.time_ms:.2f} ms")
        original: 71% hits, 0.40 ms
        resync: 94% hits, 0.35 ms
    """
    need_block_mask(mask)
    setup = Setup.make(
        device, kernel,
        l2_bytes=l2_bytes, wave=wave, head_dim=head_dim, dtype=dtype, model=model, regime=regime,
    )  # fmt: skip
    if isinstance(policy, Schedule):
        policy.check(mask)
    else:
        policy = build_schedule(mask, policy, setup.wave, seed)
    return run_schedule(mask, policy, setup, seed=seed, name=name)


def simulate_launch(
    launch: Launch, mask: BlockMask, device: DeviceProfile | None = None, *,
    schedule: Schedule | None = None, belady: bool = False,
) -> Result:  # fmt: skip
    """Simulate a launch.

    Args:
        launch: what runs, and on what; one that says its head_dim and dtype.
        mask: the heads that run.
        device: the profile of ``launch.device``; by default that of its name.
        schedule: the one of ``launch.policy``, where it is at hand; else it is built.
        belady: see `run_schedule`.

    Returns:
        The result. Its launch says more: what the mask, the profile and its L2 were.

    Raises:
        InputError: an unknown policy, device, kernel, model or regime.
    """
    setup = Setup.of(launch, device)
    if schedule is None:
        schedule = build_schedule(mask, launch.policy, setup.wave, launch.seed)
    return run_schedule(
        mask, schedule, setup,
        seed=launch.seed, name=launch.mask, heads=launch.heads, head=launch.head, belady=belady,
    )  # fmt: skip


def run_schedule(
    mask: BlockMask, schedule: Schedule, setup: Setup, *, seed: int = 0, name: str = "",
    heads: str | None = None, head: int | None = None, belady: bool = False,
) -> Result:  # fmt: skip
    """Simulate a schedule that is known to fit the mask (see `Schedule.check`).

    Args:
        mask, schedule: what runs.
        setup: on what.
        seed, name, heads, head: see `Setup.launch`.
        belady: also replay the launch with the best possible replacement, which takes longer
            than the simulation itself.
    """
    launch = setup.launch(mask, schedule.policy, seed=seed, name=name, heads=heads, head=head)
    with ThreadPoolExecutor(1) as pool:  # beside the simulation, where a core is free
        replay = pool.submit(_belady, mask, schedule, setup) if belady else None
        traffic = launch_traffic(mask, schedule, setup)
        belady_bytes = replay.result() if replay is not None else None
    timing, hbm_ms = launch_times(mask, traffic, setup)
    time_ms = max(timing.time_ms, hbm_ms)
    limits = bounds(mask, schedule, setup, traffic, time_ms)
    requested, read = traffic.requested_bytes, traffic.hbm_read_bytes
    outcome = Outcome(
        time_ms=time_ms, l2_hit_frac=1.0 - read / requested if requested else None,
        lts_sector_hit_frac=traffic.sector_hit_frac, l2_requested_bytes=requested,
        fabric_bytes=traffic.crossing_bytes, hbm_read_bytes=read,
        compulsory_bytes=limits.compulsory_bytes, belady_bytes=belady_bytes,
        imbalance_frac=traffic.idle_frac,
        clock_ghz=timing.clock_ghz if setup.device.power is not None else None,
        energy_j=timing.energy_j if time_ms == timing.time_ms else None, limit_ms=limits.limit_ms,
        gap=limits.gap, intensity_flop_per_byte=limits.intensity_flop_per_byte,
        roofline=limits.roofline, bound=_binding(traffic, timing, hbm_ms),
    )  # fmt: skip
    return Result(launch, outcome, Environment(__version__))


def launch_times(mask: BlockMask, traffic: Traffic, setup: Setup) -> tuple[Timing, float]:
    """Clock, energy and time of a launch's cycles, and the ms that HBM needs for its bytes.

    A launch lasts the longer of the two times.

    Args:
        mask, traffic, setup: of the launch.
    """
    device = setup.device
    timing = setup.timing(traffic.work(mask, setup))
    hbm_ms = traffic.hbm_read_bytes / (device.hbm_bytes_per_s * device.hbm_usable_frac) * 1e3
    return timing, hbm_ms


def _belady(mask: BlockMask, schedule: Schedule, setup: Setup) -> int:
    from wavealign.sim.curve import belady_read_bytes

    return belady_read_bytes(mask, schedule, setup, setup.capacity_blocks(mask))


def _binding(traffic: Traffic, timing: Timing, hbm_ms: float) -> Binding:
    """The resource that sets the time: ``hbm``, ``l2``, ``power`` (by the clock) or ``tensor``."""
    if hbm_ms > timing.time_ms:
        return "hbm"
    added: dict[Binding, float] = {"l2": traffic.l2_cycles, "hbm": traffic.hbm_cycles}
    most = max(added, key=lambda name: added[name])
    if added[most] > _BINDS_FROM * traffic.cycles:
        return most
    return "power" if timing.power_bound else "tensor"
