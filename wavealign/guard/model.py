"""The guard's cost model: hits from the statistics, cycles, the clock that power leaves, time.

A head's cycles are its blocks at the compute limit, what misses and bandwidth add, and, for the
heads that close the launch, the workers' wait for the last one. The clock is the simulator's power
budget (`wavealign.sim.power`), solved for each head as if the launch consisted of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wavealign.guard.profile import GuardProfile, load_guard_profile
from wavealign.guard.statistics import HeadStatistics
from wavealign.sim.devices import DeviceProfile
from wavealign.sim.power import FloatArray, Timings, clocks_and_energies
from wavealign.sim.setup import Setup

SAWTOOTH = "nnz/shuffled+sawtooth"
RESYNC = "nnz-dealt/shuffled+phased"
CANDIDATES = ("original", SAWTOOTH, RESYNC)
"""What the guard chooses among."""

_SHARPNESS = 16  # of the bend from compute-bound to bandwidth-bound
_ROUNDS = 3
_LEAST_CYCLES = 1.0  # of a head without blocks
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
        cls, device: str | DeviceProfile, kernel: str | None = None, *,
        profile: str | GuardProfile | None = None, wave: int | None = None, head_dim: int = 128,
        dtype: str = "bf16", regime: str = "single",
    ) -> CostModel:  # fmt: skip
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

    def least_ms(self, blocks: int, rows: int, block_q: int, block_kv: int) -> float:
        """Time of a launch of so many kept blocks and rows, all in L2, at the highest clock.

        Args:
            blocks, rows: of all heads.
            block_q, block_kv: tokens of a block.
        """
        step = self.setup.kernel.step_cycles(block_q, block_kv, self.setup.head_dim)
        cycles = step * (blocks + rows * self.setup.kernel.row_start_blocks) / self.setup.wave
        return cycles / self.setup.device.clock_max_ghz * 1e-6

    def predict(
        self, heads: Sequence[HeadStatistics], block_q: int, block_kv: int
    ) -> list[tuple[Prediction, ...]]:
        """Every candidate for every head.

        Args:
            heads: of one launch, in order.
            block_q, block_kv: tokens of a block.
        """
        if not heads:
            return []
        setup = self.setup
        step = setup.kernel.step_cycles(block_q, block_kv, setup.head_dim)
        start = setup.kernel.row_start_blocks
        nnz = np.array([float(head.nnz) for head in heads])
        rows = np.array([float(head.rows) for head in heads])
        even = step * (nnz + rows * start) / setup.wave
        capacity = self.capacity_blocks(block_kv)
        hit = np.array([[self.hit(head, p, capacity) for p in CANDIDATES] for head in heads])
        # What the workers wait for falls on the heads that close the launch.
        tails = np.array([[h.tail_original] + [h.tail_nnz] * (len(CANDIDATES) - 1) for h in heads])
        closing = _closing_heads(heads, setup.wave)
        closes = np.arange(len(heads)) >= len(heads) - closing
        waits = np.where(closes[:, None], (tails - 1.0) * (even.sum() / closing), 0.0)
        timings = self._timings(even[:, None], waits, step, hit, nnz[:, None], (block_q, block_kv))
        no_energy = [[None] * len(CANDIDATES)] * len(heads)
        energy = no_energy if timings.energy_j is None else timings.energy_j.tolist()
        columns = zip(timings.time_ms.tolist(), energy, hit.tolist(), strict=True)
        return [
            tuple(Prediction(*figures) for figures in zip(CANDIDATES, *head, strict=True))
            for head in columns
        ]

    def hit(self, head: HeadStatistics, policy: str, capacity: int) -> float:
        """L2 hit ratio of a head under a policy.

        Args:
            head: its statistics.
            policy: one of `CANDIDATES`.
            capacity: K/V blocks that L2 holds.
        """
        if head.nnz == 0:
            return 1.0
        compulsory = head.working_set_blocks
        if policy == "original":
            hit = head.hit_original
        elif policy == SAWTOOTH:
            hit = head.hit_sawtooth
        else:
            waves = max(1.0, head.rows / self.setup.wave)
            again = self.profile.phased_sweeps if compulsory > capacity else 0.0
            hit = 1.0 - compulsory * (1.0 + again * (waves - 1.0)) / head.nnz
        return min(max(hit, 0.0), 1.0 - compulsory / head.nnz)

    def _timings(
        self, even: FloatArray, waits: FloatArray, step: float, hit: FloatArray,
        nnz: FloatArray, block: tuple[int, int],
    ) -> Timings:  # fmt: skip
        """Of every head (axis 0) under every candidate (axis 1), as if it were a launch."""
        setup, device = self.setup, self.setup.device
        miss = 1.0 - hit
        requested = nnz * setup.kv_bytes(block[1]) + 0.0 * hit
        flops = 4.0 * block[0] * block[1] * setup.head_dim * nnz + 0.0 * hit
        crossing = _CROSSING if setup.partitions > 1 else 0.0
        clock_ghz = np.full(hit.shape, device.clock_max_ghz)
        for _ in range(_ROUNDS):  # HBM's bytes per cycle depend on the clock, which depends on them
            stretch = self._stretch(step, setup.kv_bytes(block[1]), miss, crossing, clock_ghz)
            cycles = even * (stretch + self.profile.miss_stall_frac * miss) + waits
            timings = clocks_and_energies(
                device.power, device.clock_max_ghz, np.maximum(cycles, _LEAST_CYCLES), flops,
                requested * miss, requested * (1.0 + crossing), setup.regime,
            )  # fmt: skip
            clock_ghz = timings.clock_ghz
        return timings

    def _stretch(
        self, step: float, block_bytes: int, miss: FloatArray, crossing: float,
        clock_ghz: FloatArray,
    ) -> FloatArray:  # fmt: skip
        """Cycles with bandwidth as it is / cycles with as much as the workers ask for."""
        device = self.setup.device
        asked = self.setup.wave * block_bytes / step  # bytes per cycle at the compute limit
        l2 = device.l2_bytes_per_clock or math.inf
        hbm = device.hbm_bytes_per_s * device.hbm_usable_frac / (clock_ghz * 1e9)
        loads = (asked * (1.0 + crossing + miss) / l2, asked * miss / hbm)
        total: FloatArray = 1.0 + loads[0] ** _SHARPNESS + loads[1] ** _SHARPNESS
        return total ** (1 / _SHARPNESS)


def _closing_heads(heads: Sequence[HeadStatistics], wave: int) -> int:
    """How many heads at the end of the launch hold the rows that the workers wait for."""
    rows = np.cumsum([head.rows for head in reversed(heads)])
    return min(int(np.searchsorted(rows, wave)) + 1, len(heads))
