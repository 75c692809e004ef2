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

import math
from dataclasses import dataclass
from typing import Literal

Regime = Literal["single", "steady"]
REGIMES: tuple[Regime, ...] = ("single", "steady")


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

    def mean_clock_frac(self, time_ms: float) -> float:
        """Mean clock of a single launch under the cap / the clock that it starts with."""
        share = time_ms / self.settle_ms
        settled = 1.0 if share == 0 else -math.expm1(-share) / share
        return self.steady_clock_frac + (1.0 - self.steady_clock_frac) * settled

    def watts(self, clock_ghz: float, work: Work) -> float:
        """P(f) of a launch, in W."""
        flop_pj = self.flop_pj * math.pow(clock_ghz / self.reference_ghz, self.flop_clock_exponent)
        per_cycle_pj = (
            work.flops * flop_pj
            + work.hbm_bytes * self.hbm_pj_per_byte
            + work.l2_bytes * self.l2_pj_per_byte
        ) / work.cycles
        return self.static_w + per_cycle_pj * clock_ghz * 1e-3  # pJ x GHz = mW


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
    """
    if work.cycles <= 0:
        return Timing(0.0, clock_max_ghz, 0.0 if power else None, False)
    if power is None:
        return Timing(work.cycles / clock_max_ghz * 1e-6, clock_max_ghz, None, False)
    if power.watts(clock_max_ghz, work) <= power.cap_w:
        clock_ghz, bound = clock_max_ghz, False
    else:
        from scipy.optimize import brentq  # only a capped launch pays for this import

        clock_ghz = float(
            brentq(lambda f: power.watts(f, work) - power.cap_w, 1e-3, clock_max_ghz, xtol=1e-6)
        )
        bound = True
    watts = power.cap_w if bound else power.watts(clock_ghz, work)
    time_ms = work.cycles / clock_ghz * 1e-6
    if bound:
        steady = regime == "steady"
        time_ms = time_ms / power.steady_clock_frac if steady else _single_ms(power, time_ms)
        clock_ghz = work.cycles / time_ms * 1e-6
    return Timing(time_ms, clock_ghz, watts * time_ms * 1e-3, bound)


def _single_ms(power: PowerProfile, start_ms: float) -> float:
    """Time of a single launch that would take `start_ms` at the clock that it starts with."""
    from scipy.optimize import brentq

    longest_ms = start_ms / power.steady_clock_frac
    return float(
        brentq(lambda t: t * power.mean_clock_frac(t) - start_ms, start_ms, longest_ms, xtol=1e-9)
    )
