"""The guard's cost model: hits from the statistics, cycles, the clock that power leaves, time.

A head's cycles are its blocks at the compute limit, what misses and bandwidth add, and, for the
heads that close the launch, the workers' wait for the last one. The clock is the simulator's power
budget (`wavealign.sim.power`), solved for each head as if the launch consisted of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wavealign.guard.profile import GuardProfile, load_guard_profile
from wavealign.guard.statistics import HeadStatistics
from wavealign.sim.devices import DeviceProfile
from wavealign.sim.power import Work, clock_and_energy
from wavealign.sim.setup import Setup

SAWTOOTH = "nnz/shuffled+sawtooth"
LOCKSTEP = "nnz/shuffled+phased"
CANDIDATES = ("original", SAWTOOTH, LOCKSTEP)
"""What the guard chooses among."""

_SHARPNESS = 16  # of the bend from compute-bound to bandwidth-bound
_ROUNDS = 3
_CROSSING = 0.5  # share of requests that cross between two partitions


@dataclass(frozen=True)
class Prediction:
    """What a policy is expected to do to a head.

    Attributes:
        policy: one of `CANDIDATES`.
        time_ms: the head's share of the kernel's time, planning not included.
        energy_j: joules of its share; None where the device's power budget isn't known.
        hit: L2 hit ratio.
    """

    policy: str
    time_ms: float
    energy_j: float | None
    hit: float


@dataclass(frozen=True)
class CostModel:
    """Predicts every candidate for every head of a launch.

    Attributes:
        setup: device, kernel, rows in flight, element size.
        profile: the guard's constants.
    """

    setup: Setup
    profile: GuardProfile

    @classmethod
    def make(
        cls,
        device: str | DeviceProfile,
        kernel: str | None = None,
        *,
        profile: str | GuardProfile | None = None,
        wave: int | None = None,
        head_dim: int = 128,
        dtype: str = "bf16",
        regime: str = "single",
    ) -> CostModel:
        """From names.

        Args:
            device, kernel, wave, head_dim, dtype, regime: see `Setup.make`.
            profile: guard profile, its name or path; by default the device's own.

        Raises:
            InputError: unknown names.
        """
        setup = Setup.make(device, kernel, wave=wave, head_dim=head_dim, dtype=dtype, regime=regime)
        if profile is None:
            profile = setup.device.name
        found = profile if isinstance(profile, GuardProfile) else load_guard_profile(profile)
        return cls(setup, found)

    def capacity_blocks(self, block_kv: int) -> int:
        """K/V blocks that L2 holds for the snapshots of `mask_statistics`."""
        held = self.setup.device.l2_effective_bytes * self.profile.capacity_frac
        return max(1, int(held / self.setup.kv_bytes(block_kv)))

    def predict(
        self, heads: Sequence[HeadStatistics], block_q: int, block_kv: int
    ) -> list[tuple[Prediction, ...]]:
        """Every candidate for every head.

        Args:
            heads: of one launch, in order.
            block_q, block_kv: tokens of a block.
        """
        step = self.setup.kernel.step_cycles(block_q, block_kv, self.setup.head_dim)
        start = self.setup.kernel.row_start_blocks
        even = [step * (head.nnz + head.rows * start) / self.setup.wave for head in heads]
        closing = _closing_heads(heads, self.setup.wave)
        predictions = []
        for h, head in enumerate(heads):
            row = []
            for policy in CANDIDATES:
                tail = head.tail_original if policy == "original" else head.tail_nnz
                waiting = (tail - 1.0) * sum(even) / closing
                waits = waiting if h >= len(heads) - closing else 0.0
                row.append(self._one(head, policy, (even[h], waits, step), (block_q, block_kv)))
            predictions.append(tuple(row))
        return predictions

    def hit(self, head: HeadStatistics, policy: str, capacity: int) -> float:
        """L2 hit ratio of a head under a policy."""
        if head.nnz == 0:
            return 1.0
        compulsory = head.working_set_blocks
        if policy == "original":
            hit = head.hit_original
        elif policy == SAWTOOTH:
            hit = head.hit_sawtooth
        else:
            sweeps = max(1.0, head.rows / self.setup.wave)
            again = self.profile.lockstep_sweeps if compulsory > capacity else 0.0
            hit = 1.0 - compulsory * (1.0 + again * (sweeps - 1.0)) / head.nnz
        return min(max(hit, 0.0), 1.0 - compulsory / head.nnz)

    def _one(
        self,
        head: HeadStatistics,
        policy: str,
        cycles: tuple[float, float, float],
        block: tuple[int, int],
    ) -> Prediction:
        even, waits, step = cycles
        setup, device = self.setup, self.setup.device
        hit = self.hit(head, policy, self.capacity_blocks(block[1]))
        miss = 1.0 - hit
        requested = head.nnz * setup.kv_bytes(block[1])
        crossing = _CROSSING if setup.partitions > 1 else 0.0
        clock_ghz = device.clock_max_ghz
        for _ in range(_ROUNDS):  # HBM's bytes per cycle depend on the clock, which depends on them
            stretch = self._stretch(step, setup.kv_bytes(block[1]), miss, crossing, clock_ghz)
            work = Work(
                even * (stretch + self.profile.miss_stall_frac * miss) + waits,
                4.0 * block[0] * block[1] * setup.head_dim * head.nnz,
                requested * miss,
                requested * (1.0 + crossing),
            )
            timing = clock_and_energy(device.power, device.clock_max_ghz, work, setup.regime)
            clock_ghz = timing.clock_ghz
        return Prediction(policy, timing.time_ms, timing.energy_j, hit)

    def _stretch(
        self, step: float, block_bytes: int, miss: float, crossing: float, clock_ghz: float
    ) -> float:
        """Cycles with bandwidth as it is / cycles with as much as the workers ask for."""
        device = self.setup.device
        asked = self.setup.wave * block_bytes / step  # bytes per cycle at the compute limit
        l2 = device.l2_bytes_per_clock or math.inf
        hbm = device.hbm_bytes_per_s * device.hbm_usable_frac / (clock_ghz * 1e9)
        loads = (1.0, asked * (1.0 + crossing + miss) / l2, asked * miss / hbm)
        return math.pow(sum(math.pow(load, _SHARPNESS) for load in loads), 1 / _SHARPNESS)


def _closing_heads(heads: Sequence[HeadStatistics], wave: int) -> int:
    """How many heads at the end of the launch hold the rows that the workers wait for."""
    rows = 0
    for count, head in enumerate(reversed(heads), 1):
        rows += head.rows
        if rows >= wave:
            return count
    return len(heads)
