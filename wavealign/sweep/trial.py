"""One trial: from a resolved spec to the record of how it ended."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from wavealign.masks.block_mask import BlockMask
from wavealign.order import Schedule, build_schedule
from wavealign.runs.launch import Launch
from wavealign.runs.trial import TrialRecord
from wavealign.sim.devices import DeviceProfile
from wavealign.sim.simulate import simulate_launch


@dataclass(frozen=True)
class Inputs:
    """What trials need besides their specs.

    Attributes:
        masks: by digest, the heads of one launch each.
        devices: profiles by the name that specs give them.
    """

    masks: Mapping[str, BlockMask]
    devices: Mapping[str, DeviceProfile]


def run_trial(
    spec: Launch, mask: BlockMask, device: DeviceProfile, belady: bool = False
) -> TrialRecord:
    """Simulate a trial; whatever goes wrong is its record's error.

    The result depends on the arguments alone. Planning and simulation run in one thread, so that
    as many trials as cores don't get into each other's way.

    Args:
        spec: what to try.
        mask: the heads that run: ``mask.digest == spec.mask_digest``.
        device: the profile of ``spec.device``.
        belady: also find the least that any replacement could read, which takes longer than the
            simulation itself.
    """
    start = time.perf_counter()
    planning_ms: float | None = None
    try:
        schedule, planning_ms = plan(spec, mask)
        result = simulate_launch(spec, mask, device, schedule=schedule, belady=belady)
    except Exception as problem:  # a trial that fails is a result, too
        return failed(spec, problem, planning_ms, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    return TrialRecord(spec, "done", result, None, planning_ms, seconds, worker_name())


def plan(spec: Launch, mask: BlockMask) -> tuple[Schedule, float]:
    """A trial's schedule, and the milliseconds that making it took."""
    start = time.perf_counter()
    schedule = build_schedule(mask, spec.policy, spec.wave, spec.seed)
    return schedule, (time.perf_counter() - start) * 1e3


def failed(
    spec: Launch,
    problem: str | Exception,
    planning_ms: float | None = None,
    seconds: float = 0.0,
) -> TrialRecord:
    """The record of a trial that failed, or that its worker didn't live to write.

    Args:
        spec: what was tried.
        problem: why it failed.
        planning_ms, seconds: of the record, as far as it came.
    """
    error = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
    return TrialRecord(spec, "failed", None, error, planning_ms, seconds, worker_name())


def worker_name() -> str:
    """This process: host and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"
