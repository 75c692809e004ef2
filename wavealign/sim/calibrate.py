"""Fit a device profile's free figures to measured runs.

Two steps, each a bounded least-squares problem (scipy, trust region). First what decides
hits: the usable share of L2, the spread of the SMs' speeds, and how much of a miss prefetch
leaves exposed; residuals are hit ratios and, where known, the profiler's hit rates. Then, with
the traffic and cycles of that fit, what decides time: cycles of a block for each tile, and the
power budget (static, per FLOP, per byte from HBM and through L2); residuals are relative times
and, where the tensor pipes' activity was read, relative cycles, which tell the two apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavealign.errors import InputError
from wavealign.runs.result import Result
from wavealign.sim.devices import DeviceProfile, KernelProfile
from wavealign.sim.power import PowerProfile, clock_and_energy
from wavealign.sim.recordings import Recording
from wavealign.sim.setup import Setup
from wavealign.sim.simulate import run_schedule
from wavealign.sim.traffic import Traffic, launch_traffic

FloatArray = npt.NDArray[np.float64]

# name: (lowest, highest, finite-difference step), the step in shares of the value
_HIT_FIGURES = {
    "l2_usable_frac": (0.5, 1.0, 0.01),
    "sm_spread_frac": (0.0, 0.02, 0.08),
    "miss_exposed_blocks": (0.0, 0.1, 0.15),
}
_POWER_FIGURES = {
    "static_w": (20.0, 400.0), "flop_pj": (0.05, 5.0), "hbm_pj_per_byte": (5.0, 300.0),
    "l2_pj_per_byte": (0.0, 60.0), "settle_ms": (5.0, 1000.0),
}  # fmt: skip
_SECTOR_WEIGHT = 0.4  # a profiler's hit rate says half of the hit ratio again
_HIT_EVALUATIONS = 12


@dataclass(frozen=True)
class ReplayErrors:
    """Simulated minus measured, run by run; entries that weren't measured are left out.

    Attributes:
        hit_points: of the hit ratio, in points.
        sector_points: of the profiler's hit rate, in points.
        read_percent: of HBM reads, in percent of the requested bytes.
        time_percent: of the time, in percent of the measured one.
    """

    hit_points: FloatArray
    sector_points: FloatArray
    read_percent: FloatArray
    time_percent: FloatArray


def fitted_fields(profile: DeviceProfile, kernel: str) -> list[str]:
    """Names of the figures that `calibrate` fits, as in the profile's ``[source]`` table."""
    ours = [f.name for f in dataclasses.fields(KernelProfile)]
    names = [f"kernels.{kernel}.{n}" if n in ours else n for n in (*_HIT_FIGURES, "block_cycles")]
    return names + ([f"power.{name}" for name in _POWER_FIGURES] if profile.power else [])


def replay(recordings: Sequence[Recording], setup: Setup) -> list[Result]:
    """The simulator's row for each recording, over the cores."""

    def one(r: Recording) -> Result:
        return run_schedule(r.mask, r.schedule, setup, name=r.mask_name)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, recordings))


def replay_errors(recordings: Sequence[Recording], results: Sequence[Result]) -> ReplayErrors:
    """What the rows of `replay` are off by."""
    hits, sectors, reads, times = [], [], [], []
    for recording, result in zip(recordings, results, strict=True):
        measured = recording.measured
        if measured.l2_hit_frac is not None and result.l2_hit_frac is not None:
            hits.append(result.l2_hit_frac - measured.l2_hit_frac)
        if measured.lts_sector_hit_frac is not None and result.lts_sector_hit_frac is not None:
            sectors.append(result.lts_sector_hit_frac - measured.lts_sector_hit_frac)
        if measured.hbm_read_bytes is not None and result.hbm_read_bytes is not None:
            difference = result.hbm_read_bytes - measured.hbm_read_bytes
            reads.append(difference / result.l2_requested_bytes)
        if result.time_ms is not None:
            times.append(result.time_ms / measured.time_ms - 1.0)
    return ReplayErrors(*(100 * np.array(part) for part in (hits, sectors, reads, times)))


def calibrate(
    recordings: Sequence[Recording],
    profile: DeviceProfile,
    kernel: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> DeviceProfile:
    """The profile with its free figures fitted to measured runs.

    Args:
        recordings: the runs to fit.
        profile: where to start from; what isn't fitted is kept.
        kernel: which of its kernels ran; by default its first.
        progress: called with a line from time to time.

    Raises:
        InputError: fewer runs or masks than can determine the figures.
    """
    entry = profile.kernel(kernel)
    tiles = sorted({(r.mask.block_q, r.mask.block_kv) for r in recordings})
    free = len(_HIT_FIGURES) + len(tiles) + (len(_POWER_FIGURES) if profile.power else 0)
    masks = {r.mask.digest for r in recordings}
    with_hits = [r for r in recordings if r.measured.l2_hit_frac is not None]
    if len(with_hits) < 2 * free or len(masks) < 2:
        raise InputError(
            f"{len(with_hits)} runs with hit ratios of {len(masks)} masks can't determine {free} "
            f"figures; expected at least {2 * free} runs of 2 masks or more, beside those held "
            "out. Measure more masks, or every head on its own: wavealign validate --per-head "
            "--counters."
        )
    fitted = _fit_hits(with_hits, profile, entry, progress)
    # Twice: what bandwidth adds to the cycles depends on the cycles of a block.
    for _ in range(2):
        fitted = _fit_times(recordings, fitted, fitted.kernels[entry.name], tiles, progress)
    return fitted


def _fit_hits(
    recordings: Sequence[Recording], profile: DeviceProfile, entry: KernelProfile,
    progress: Callable[[str], None],
) -> DeviceProfile:  # fmt: skip
    from scipy.optimize import least_squares

    lowest, highest, steps = (np.array(c) for c in zip(*_HIT_FIGURES.values(), strict=True))

    def residuals(figures: FloatArray) -> FloatArray:
        setup = Setup.make(_with_hit_figures(profile, entry, figures), entry.name)
        errors = replay_errors(recordings, replay(recordings, setup))
        progress(
            "  ".join(f"{n} {v:.5f}" for n, v in zip(_HIT_FIGURES, figures, strict=True))
            + f"  hit ratio off by {np.abs(errors.hit_points).mean():.2f} points"
        )
        return np.concatenate([errors.hit_points, _SECTOR_WEIGHT * errors.sector_points])

    start = np.array([profile.l2_usable_frac, entry.sm_spread_frac, entry.miss_exposed_blocks])
    # From 0 no finite difference leads anywhere.
    start = np.clip(start, np.maximum(lowest, 1e-3), highest * 0.999)
    best = least_squares(
        residuals, start, bounds=(lowest, highest), x_scale=start, diff_step=steps,
        max_nfev=_HIT_EVALUATIONS, loss="soft_l1",
    )  # fmt: skip
    return _with_hit_figures(profile, entry, best.x)


def _with_hit_figures(
    profile: DeviceProfile, entry: KernelProfile, figures: FloatArray
) -> DeviceProfile:
    usable, spread, exposed = map(float, figures)
    kernel = dataclasses.replace(entry, sm_spread_frac=spread, miss_exposed_blocks=exposed)
    return dataclasses.replace(_with_kernel(profile, kernel), l2_usable_frac=usable)


def _with_kernel(profile: DeviceProfile, kernel: KernelProfile) -> DeviceProfile:
    return dataclasses.replace(profile, kernels={**profile.kernels, kernel.name: kernel})


def _fit_times(
    recordings: Sequence[Recording], profile: DeviceProfile, entry: KernelProfile,
    tiles: list[tuple[int, int]], progress: Callable[[str], None],
) -> DeviceProfile:  # fmt: skip
    from scipy.optimize import least_squares

    setup = Setup.make(profile, entry.name)
    with ThreadPoolExecutor() as pool:
        traffic = list(pool.map(lambda r: launch_traffic(r.mask, r.schedule, setup), recordings))
    measured_ms = np.array([r.measured.time_ms for r in recordings])
    tile_of = np.array([tiles.index((r.mask.block_q, r.mask.block_kv)) for r in recordings])
    measured = np.array([_cycles(r, setup) for r in recordings])
    simulated = np.array([part.cycles for part in traffic])
    known = np.isfinite(measured)
    start_cycles = np.array([entry.step_cycles(*tile, entry.head_dim) for tile in tiles])
    power = profile.power
    power_start = [getattr(power, name) for name in _POWER_FIGURES] if power else []

    def unpack(figures: FloatArray) -> tuple[FloatArray, PowerProfile | None]:
        if power is None:
            return figures, None
        changed = dict(zip(_POWER_FIGURES, map(float, figures[len(tiles) :]), strict=True))
        return figures[: len(tiles)], dataclasses.replace(power, **changed)

    def residuals(figures: FloatArray) -> FloatArray:
        cycles, trial = unpack(figures)
        times = [
            _time_ms(part, r, setup, trial, cycles[t] / start_cycles[t])
            for part, r, t in zip(traffic, recordings, tile_of, strict=True)
        ]
        trial_cycles = simulated[known] * (cycles / start_cycles)[tile_of][known]
        off = (np.array(times) / measured_ms - 1.0, trial_cycles / measured[known] - 1.0)
        return 100 * np.concatenate(off)

    limits = list(_POWER_FIGURES.values()) if power else []
    lowest = np.array([*(0.5 * start_cycles), *(low for low, _ in limits)])
    highest = np.array([*(2.0 * start_cycles), *(high for _, high in limits)])
    start = np.clip(np.array([*start_cycles, *power_start]), lowest * 1.001, highest * 0.999)
    best = least_squares(residuals, start, bounds=(lowest, highest), x_scale=start, loss="soft_l1")
    cycles, fitted_power = unpack(best.x)
    off = np.abs(residuals(best.x)[: len(recordings)]).mean()
    progress(f"time off by {off:.2f} % in the fit")
    rounded = {tile: round(float(c), 1) for tile, c in zip(tiles, cycles, strict=True)}
    kernel = dataclasses.replace(entry, block_cycles={**entry.block_cycles, **rounded})
    return dataclasses.replace(_with_kernel(profile, kernel), power=fitted_power)


def _cycles(recording: Recording, setup: Setup) -> float:
    """Cycles of a measured run from its tensor activity; NaN where that wasn't read."""
    active = recording.measured.tensor_active_frac
    if not active:
        return float("nan")
    flops = setup.flops(recording.mask, recording.mask.nnz)
    return flops / (active * setup.device.sms * setup.device.flop_per_clock_sm)


def _time_ms(
    traffic: Traffic, recording: Recording, setup: Setup, power: PowerProfile | None, factor: float
) -> float:
    """Of a recorded launch whose cycles are `factor` times those simulated."""
    work = traffic.work(recording.mask, setup)
    scaled = dataclasses.replace(work, cycles=work.cycles * factor)
    return clock_and_energy(power, setup.device.clock_max_ghz, scaled, "single").time_ms
