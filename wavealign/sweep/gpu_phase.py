"""Simulation proposes, silicon decides: the part of a sweep that runs on a GPU.

`prepare` asks the card before any work; `measure_finalists` measures after the simulation.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from wavealign.errors import InputError, MissingCapabilityError
from wavealign.runs.launch import Launch
from wavealign.sweep.engines.job import Engine, Job
from wavealign.sweep.engines.local import LocalEngine
from wavealign.sweep.finalists import Card, finalists, launch_on_card, launches, measured_spec
from wavealign.sweep.run import OnTrial, Stages, run_jobs
from wavealign.sweep.silicon import find_card, inspect_launch, measure_launch
from wavealign.sweep.store import Store


@dataclass(frozen=True)
class GpuPhase:
    """What is known of the card before anything runs.

    Attributes:
        card: the GPU.
        device: whose simulated trials propose.
        waves: launch (see `launch_on_card`) → rows in flight.
    """

    card: Card
    device: str
    waves: dict[Launch, int]


def require_gpu(executor: str) -> None:
    """Raise without a GPU on this machine, unless the executor brings its own.

    Raises:
        MissingCapabilityError: no GPU, no torch, no nvidia-ml-py.
    """
    if executor != "ray":
        find_card()


def prepare(engine: Engine, baselines: Sequence[Launch]) -> GpuPhase:
    """Ask the card about every launch that may be measured.

    Args:
        engine: entered; Ray's is asked for a GPU, else this machine's is meant.
        baselines: the conditions.

    Raises:
        MissingCapabilityError: no GPU, or a backend isn't installed.
        InputError: nothing is simulated for this card, or a kernel can't compute a mask.
    """
    if engine.gpus == 0:
        raise MissingCapabilityError(
            "sweep --gpu --executor ray needs a node with a GPU, and the cluster has none; add "
            "one, or measure on this machine with --executor local."
        )
    card, devices = engine.on_gpu(find_card, baselines[0]), engine.inputs.devices
    device = next((n for n, d in devices.items() if d.name == card.device), None)
    if device is None:
        raise InputError(
            f"--gpu: this is an {card.name}, and the sweep simulates {', '.join(devices)}; "
            f"add its profile, e.g. --device {card.device}, so that simulation can propose."
        )
    waves: dict[Launch, int] = {}
    for spec in baselines:
        launch = launch_on_card(spec)
        if spec.device == device and launch not in waves:
            found, waves[launch] = engine.on_gpu(inspect_launch, spec)
            if found.device != card.device:
                raise InputError(
                    f"--gpu: the cluster has an {card.name} and an {found.name}; measure on one "
                    "kind at a time."
                )
    return GpuPhase(card, device, waves)


def measure_finalists(
    phase: GpuPhase, engine: Engine, store: Store, objective: str, count: int, stages: Stages,
    on_trial: OnTrial,
) -> None:  # fmt: skip
    """Measure the best simulated policies of each mask, and `original`.

    Args:
        phase: what `prepare` found.
        engine: entered. Ray's runs a launch on each of its GPUs; else one at a time runs here,
            each in a process of its own, so that a launch that poisons CUDA harms no other.
        store: of the sweep.
        objective, count: see `finalists`.
        stages: told how many trials there are.
        on_trial: called with each record.
    """
    proposed = finalists(store.records.values(), objective, count, phase.device)
    seed = min((spec.seed for spec in proposed), default=0)
    specs = [
        measured_spec(spec, phase.card, phase.waves[launch_on_card(spec)], seed)
        for spec in proposed
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(stages(len(specs), "measured"))
        for known in filter(None, [store.records.get(spec.named) for spec in specs]):
            on_trial(known, False)
        left = [spec for spec in specs if spec.named not in store.records]
        jobs = [Job(group, measure_launch, gpu=True) for group in launches(left)]
        if not (gpus := engine.gpus):
            masks = {spec.mask_digest: engine.inputs.masks[spec.mask_digest] for spec in left}
            inputs = dataclasses.replace(engine.inputs, masks=masks)
            engine, gpus = stack.enter_context(LocalEngine(inputs, 1, per_process=1)), 1
        run_jobs(jobs, store, engine, gpus, on_trial)
