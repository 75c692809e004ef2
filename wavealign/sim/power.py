"""The clock from the power budget, and energy: time = cycles / clock.

A card at its power cap trades clock for watts. What a launch draws at clock f is

    P(f) = static + f · [ F·e_flop·(f / f0)^x + R·e_hbm + L·e_l2 ]

with F multiplications and additions, R bytes from HBM and L bytes through L2 *per cycle*. The
energy of a FLOP goes with the square of the voltage, which rises with the clock, the faster the
nearer the maximum. The clock that a launch starts with, f1, is the largest f with P(f) ≤ cap, or
the device's maximum. Where the cap binds, the clock then sinks towards that of the steady state,
s·f1, with the controller's time constant τ; over a launch of time T it averages

    f(T) = f1 · [ s + (1 - s) · (1 - exp(-T/τ)) · τ/T ]

docs/fidelity.md says what was measured.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from wavealign.runs.launch import Regime

FloatArray = npt.NDArray[np.float64]
Number = TypeVar("Number", float, FloatArray)

REGIMES: tuple[Regime, ...] = ("single", "steady")

_STEPS = 50
_PRECISION = 1e-13
_LEAST_GHZ = 1e-3


@dataclass(frozen=True)
class PowerProfile:
    """A device's power budget.

    Attributes:
        cap_w: board power cap.
        static_w: drawn whatever the launch does.
        flop_pj: picojoules per FLOP at `reference_ghz`.
        hbm_pj_per_byte: picojoules per byte read from HBM.
        l2_pj_per_byte: picojoules per byte through L2 (own lookups and crossings).
        reference_ghz: the clock that `flop_pj` holds for.
        flop_clock_exponent: x, how the energy of a FLOP grows with the clock.
        steady_clock_frac: s, clock of the steady state (launches back to back for seconds, card
            hot, controller settled) / clock that a launch starts with, where the cap binds.
        settle_ms: τ, with which the one becomes the other.
    """

    cap_w: float
    static_w: float
    flop_pj: float
    hbm_pj_per_byte: float
    l2_pj_per_byte: float
    reference_ghz: float
    flop_clock_exponent: float
    steady_clock_frac: float
    settle_ms: float

    def terms(
        self, cycles: Number, flops: Number, hbm_bytes: Number, l2_bytes: Number
    ) -> tuple[Number, Number]:
        """What f^(1+x) and f are multiplied by in P(f), f in GHz and P in W (pJ x GHz = mW).

        Args:
            cycles: of a launch.
            flops, hbm_bytes, l2_bytes: its work.
        """
        flop_pj = self.flop_pj * math.pow(self.reference_ghz, -self.flop_clock_exponent)
        moved_pj = hbm_bytes * self.hbm_pj_per_byte + l2_bytes * self.l2_pj_per_byte
        return flops * flop_pj / cycles * 1e-3, moved_pj / cycles * 1e-3

    def drawn_w(self, clock_ghz: Number, steep: Number, even: Number) -> Number:
        """P(f), with the factors of `terms`.

        Args:
            clock_ghz: f.
            steep, even: the factors.
        """
        risen: Number = clock_ghz ** (1.0 + self.flop_clock_exponent)
        return self.static_w + steep * risen + even * clock_ghz


@dataclass(frozen=True)
class Work:
    """What a launch does.

    Attributes:
        cycles: SM clock cycles from its start to its end.
        flops: floating-point operations.
        hbm_bytes: K/V bytes read from HBM.
        l2_bytes: K/V bytes through L2, own lookups and crossings.
    """

    cycles: float
    flops: float
    hbm_bytes: float
    l2_bytes: float


@dataclass(frozen=True)
class Timing:
    """Time and energy of a launch.

    Attributes:
        time_ms: kernel time.
        clock_ghz: SM clock.
        energy_j: joules, or None where the power budget isn't known.
        power_bound: whether the cap sets the clock.
    """

    time_ms: float
    clock_ghz: float
    energy_j: float | None
    power_bound: bool


def clock_and_energy(
    power: PowerProfile | None, clock_max_ghz: float, work: Work, regime: Regime
) -> Timing:
    """Solve the clock of a launch.

    Without a power profile the clock is the maximum and the energy unknown.

    Args:
        power: the budget; None where it isn't known.
        clock_max_ghz: highest SM clock.
        work: of the launch.
        regime: ``"single"`` or ``"steady"``.
    """
    if work.cycles <= 0:
        return Timing(0.0, clock_max_ghz, 0.0 if power else None, False)
    cycles, flops, hbm_bytes, l2_bytes = np.array(dataclasses.astuple(work))[:, None]
    found = clocks_and_energies(power, clock_max_ghz, cycles, flops, hbm_bytes, l2_bytes, regime)
    energy_j = None if found.energy_j is None else float(found.energy_j[0])
    bound = bool(found.power_bound[0])
    return Timing(float(found.time_ms[0]), float(found.clock_ghz[0]), energy_j, bound)


@dataclass(frozen=True)
class Timings:
    """Time and energy of several launches: arrays of one shape, fields as in `Timing`."""

    time_ms: FloatArray
    clock_ghz: FloatArray
    energy_j: FloatArray | None
    power_bound: npt.NDArray[np.bool_]


def clocks_and_energies(
    power: PowerProfile | None, clock_max_ghz: float, cycles: FloatArray, flops: FloatArray,
    hbm_bytes: FloatArray, l2_bytes: FloatArray, regime: Regime,
) -> Timings:  # fmt: skip
    """Solve the clocks of several launches, arrays of one shape; cycles above 0.

    Args:
        power: the budget; None where it isn't known.
        clock_max_ghz: highest SM clock.
        cycles, flops, hbm_bytes, l2_bytes: of each launch.
        regime: ``"single"`` or ``"steady"``.
    """
    clock_ghz = np.full(cycles.shape, clock_max_ghz)
    time_ms = cycles / clock_max_ghz * 1e-6
    bound = np.zeros(cycles.shape, dtype=np.bool_)
    if power is None:
        return Timings(time_ms, clock_ghz, None, bound)
    exponent = power.flop_clock_exponent
    steep, even = power.terms(cycles, flops, hbm_bytes, l2_bytes)
    drawn_w = power.drawn_w(clock_ghz, steep, even)
    bound = drawn_w > power.cap_w
    if not bound.any():
        return Timings(time_ms, clock_ghz, drawn_w * time_ms * 1e-3, bound)
    # P is convex and rises: from above, Newton's steps come down to the root and never pass it.
    start_ghz = clock_ghz.copy()
    for _ in range(_STEPS):
        slope = steep * (1.0 + exponent) * start_ghz**exponent + even
        step = np.where(bound, (power.drawn_w(start_ghz, steep, even) - power.cap_w) / slope, 0.0)
        start_ghz = np.maximum(start_ghz - step, _LEAST_GHZ)
        if (np.abs(step) <= _PRECISION * start_ghz).all():
            break
    start_ms = cycles / start_ghz * 1e-6
    steady_ms = start_ms / power.steady_clock_frac
    capped_ms = steady_ms if regime == "steady" else _single_ms(power, start_ms)
    time_ms = np.where(bound, capped_ms, time_ms)
    drawn_w = np.where(bound, power.cap_w, drawn_w)
    return Timings(time_ms, cycles / time_ms * 1e-6, drawn_w * time_ms * 1e-3, bound)


def _single_ms(power: PowerProfile, start_ms: FloatArray) -> FloatArray:
    """Times of single launches that would take `start_ms` at the clock that they start with.

    The t with t · f(t) / f1 = start_ms (above); the left side is concave in t and rises, so
    Newton's steps from below never pass the root.
    """
    s, settle_ms = power.steady_clock_frac, power.settle_ms
    time_ms = start_ms
    for _ in range(_STEPS):
        lag = np.exp(-time_ms / settle_ms)
        done_ms = s * time_ms + (1.0 - s) * settle_ms * (1.0 - lag)
        step = (start_ms - done_ms) / (s + (1.0 - s) * lag)
        time_ms = time_ms + step
        if (np.abs(step) <= _PRECISION * time_ms).all():
            break
    return time_ms
