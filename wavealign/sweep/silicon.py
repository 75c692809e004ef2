"""Silicon decides: measure finalists on a GPU, by the verb that `validate` uses."""

from __future__ import annotations

import time

from wavealign._extras import require
from wavealign.masks.block_mask import BlockMask
from wavealign.runs.launch import Launch
from wavealign.runs.trial import TrialRecord
from wavealign.sim.devices import device_of_gpu
from wavealign.sweep.finalists import Card
from wavealign.sweep.trial import failed, plan, worker_name


def find_card(*_: object) -> Card:
    """This machine's GPU, whatever is to run on it.

    Raises:
        MissingCapabilityError: there is none, or torch isn't installed or can't use it.
    """
    from wavealign.gpu.rig import find_gpu

    for module in ("torch", "pynvml"):
        require(module, "gpu", "sweep --gpu")
    rig = find_gpu("sweep --gpu", "; without --gpu the sweep is simulated")
    return Card(rig.name, device_of_gpu(rig.name) or rig.name)


def inspect_launch(spec: Launch, mask: BlockMask) -> tuple[Card, int]:
    """The GPU of this machine, and the rows in flight of a launch on it.

    Raises what measuring it would raise later, before anything runs.

    Args:
        spec: of a launch; its kernel is the name of a backend.
        mask: the heads that run.

    Raises:
        MissingCapabilityError: no GPU, or the backend isn't installed.
        InputError: a kernel that is no backend, or that can't compute this launch.
    """
    card = find_card()
    from wavealign.gpu.measure import sizes_of
    from wavealign.gpu.registry import find_backend
    from wavealign.gpu.rig import CudaRig

    return card, CudaRig().rows_in_flight(find_backend(spec.kernel), sizes_of(spec, mask))


def measure_launch(specs: tuple[Launch, ...], mask: BlockMask) -> list[TrialRecord]:
    """Measure several policies of one launch, timed in turns; each output is checked first.

    Whatever goes wrong is the error of the trials that have no row by then.

    Args:
        specs: measured ones that differ in policy alone.
        mask: the heads that run.
    """
    from wavealign.gpu.measure import measure
    from wavealign.gpu.rig import CudaRig
    from wavealign.gpu.telemetry import Telemetry

    start = time.perf_counter()
    records: list[TrialRecord] = []
    try:
        plans = {spec.policy: plan(spec, mask) for spec in specs}
        schedules = {policy: schedule for policy, (schedule, _) in plans.items()}
        with Telemetry() as telemetry:
            rows = measure(specs, mask, CudaRig(), telemetry, schedules=schedules)
            for spec, row in zip(specs, rows, strict=True):
                spent = (time.perf_counter() - start) / len(specs)
                ms = plans[spec.policy][1]
                records.append(TrialRecord(spec, "done", row, None, ms, spent, worker_name()))
    except Exception as problem:  # a trial that fails is a result, too
        records += [failed(spec, problem) for spec in specs[len(records) :]]
    return records
