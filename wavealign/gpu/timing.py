"""Kernel times in two regimes: launches apart, and the steady state under load."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from wavealign.gpu.rig import Rig
from wavealign.gpu.telemetry import Telemetry

_BATCH_S = 0.2


@dataclass(frozen=True)
class SingleTime:
    """Launches apart from each other, each with a cold L2.

    Attributes:
        times_ms: one a launch.
    """

    times_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Half of the launches took no longer."""
        return statistics.median(self.times_ms)

    @property
    def spread_frac(self) -> float:
        """(Slowest - fastest) / median of the middle half: the interquartile range."""
        if len(self.times_ms) < 4:
            return (max(self.times_ms) - min(self.times_ms)) / self.median_ms
        low, _, high = statistics.quantiles(self.times_ms, n=4)
        return (high - low) / self.median_ms


@dataclass(frozen=True)
class SteadyTime:
    """Launches back to back for seconds, once clock and power have settled.

    Attributes:
        time_ms: per launch.
        repeats: launches that were measured.
        energy_j: per launch; None where the card counts no energy.
        clock_ghz: median SM clock.
        power_w: median.
        temperature_c: highest.
        throttle: NVML's reasons, joined by ``,``; empty if none, None if it doesn't say.
    """

    time_ms: float
    repeats: int
    energy_j: float | None
    clock_ghz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle: str | None


def time_single(
    launches: Mapping[str, Callable[[], object]], repeats: int, rig: Rig
) -> dict[str, SingleTime]:
    """Time launches one by one, candidates in turn, so that drift hits all of them alike.

    Before each launch the card cools while one SM spins, and its L2 is emptied.

    Args:
        launches: by name.
        repeats: rounds, in each of which every candidate has a turn.
        rig: what they run on.
    """
    pause = rig.pauser()
    for run in launches.values():
        run()
    rig.synchronize()
    times: dict[str, list[float]] = {name: [] for name in launches}
    names = list(launches)
    for turn in range(repeats):
        # Each round starts with another candidate, so that none always follows the same one.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            pause(turn)
            times[name].append(rig.time_ms(launches[name]))
    return {name: SingleTime(tuple(values)) for name, values in times.items()}


def time_call(run: Callable[[], object], rig: Rig, repeats: int = 5) -> float:
    """Median ms of a call, after one to warm up.

    Args:
        run: starts it.
        rig: of the device that runs it.
        repeats: calls that are timed.
    """
    run()
    return statistics.median(rig.time_ms(run) for _ in range(repeats))


def time_steady(
    run: Callable[[], None], settle_s: float, measure_s: float, rig: Rig, telemetry: Telemetry
) -> SteadyTime:
    """Repeat a launch until the card has settled, then measure.

    Time is wall time between two synchronisations, launches queued behind each other.

    Args:
        run: starts the launch.
        settle_s, measure_s: before, and while it is measured.
        rig, telemetry: of the device that runs it.
    """
    single_ms = time_call(run, rig, repeats=1)
    batch = max(1, round(_BATCH_S * 1e3 / max(single_ms, 1e-3)))

    def repeat_for(seconds: float) -> tuple[int, float]:
        count = 0
        started = rig.seconds()
        marks: list[Callable[[], None]] = []
        while rig.seconds() - started < seconds:
            for _ in range(batch):
                run()
            count += batch
            marks.append(rig.mark())
            # One batch ahead of the card: it never waits, and the queue stays short.
            if len(marks) > 1:
                marks.pop(0)()
        rig.synchronize()
        return count, rig.seconds() - started

    repeat_for(settle_s)
    with telemetry.sample() as sampled:
        count, seconds = repeat_for(measure_s)
    state = sampled.summary()
    return SteadyTime(
        1e3 * seconds / count, count,
        None if state.energy_j is None else state.energy_j / count,
        state.sm_clock_ghz, state.power_w, state.temperature_c,
        None if state.throttle is None else ",".join(state.throttle),
    )  # fmt: skip
