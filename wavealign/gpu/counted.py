"""Counters of launches: a child process under the profiler runs a control, then each schedule once.

``python -m wavealign.gpu.counted FOLDER`` runs the job that `count_launches` left there. Only what
lies between the profiler's start and stop is counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from wavealign.errors import MissingCapabilityError
from wavealign.gpu.backend import Backend
from wavealign.gpu.capabilities import Problem
from wavealign.gpu.counters import Counters, check_control
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.launch import Launch
from wavealign.gpu.ncu import collect
from wavealign.gpu.registry import find_backend
from wavealign.gpu.rig import CudaRig, Rig
from wavealign.masks.files import load_mask, save_mask
from wavealign.order.schedule import Schedule

CONTROL_BYTES = 2**30

_START_S = 120.0  # torch, a compiler or two
_LAUNCH_S = 60.0


def count_launches(
    backend: Backend,
    work: Sequence[tuple[Problem, Sequence[Schedule]]],
    seed: int,
    cache_control: str,
    device: str = "cuda",
) -> list[list[Counters]]:
    """Counters of every schedule of every problem, all from one child process.

    Args:
        backend: what runs them.
        work: problems, each with its schedules.
        seed: of Q, K and V.
        cache_control: see `collect`.
        device: ``"cuda"``, or ``"cpu"`` for a backend that runs there.

    Raises:
        MissingCapabilityError: no profiler, no permission, or a control kernel whose known
            traffic isn't what the counters say.
    """
    launches = sum(len(schedules) for _, schedules in work)
    kernels = backend.kernels_per_launch
    with tempfile.TemporaryDirectory(prefix="wavealign-") as name:
        folder = Path(name)
        for i, (problem, schedules) in enumerate(work):
            _write(folder / f"launch{i}", problem, schedules)
        job = {
            "backend": backend.name,
            "device": device,
            "seed": seed,
            "problems": len(work),
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        control, *counted = collect(
            [sys.executable, "-m", "wavealign.gpu.counted", name],
            expected=1 + launches * kernels,
            cache_control=cache_control,
            timeout_s=_START_S + launches * _LAUNCH_S,
        )
    if reason := check_control(control, CONTROL_BYTES):
        raise MissingCapabilityError(f"the counters of this GPU can't be trusted: {reason}")
    # Of the kernels of a launch the slowest one is the attention.
    slowest = [
        max(counted[i : i + kernels], key=lambda c: c.time_ms or 0.0)
        for i in range(0, len(counted), kernels)
    ]
    remaining = iter(slowest)
    return [[next(remaining) for _ in schedules] for _, schedules in work]


def _write(folder: Path, problem: Problem, schedules: Sequence[Schedule]) -> None:
    folder.mkdir()
    save_mask(folder / "mask.npz", problem.mask)
    for i, schedule in enumerate(schedules):
        schedule.save(folder / f"schedule{i}.npz")
    shapes = {
        "batch": problem.batch,
        "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
        "dtype": problem.dtype,
    }
    text = json.dumps({"schedules": len(schedules), "shapes": shapes})
    (folder / "launch.json").write_text(text, encoding="utf-8")


def run_job(folder: Path) -> None:
    """Run the job of this folder on the current GPU, or where the job says."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    rig = CudaRig() if job["device"] == "cuda" else Rig()
    backend = find_backend(job["backend"])
    read = rig.reader(CONTROL_BYTES)  # what the counters must say of this is known
    read()  # compiled before anything is counted
    rig.count(read)
    for i in range(job["problems"]):
        _run_launches(folder / f"launch{i}", backend, job["seed"], rig)


def _run_launches(folder: Path, backend: Backend, seed: int, rig: Rig) -> None:
    launch_job = json.loads((folder / "launch.json").read_text(encoding="utf-8"))
    problem = Problem(load_mask(folder / "mask.npz").mask, **launch_job["shapes"])
    inputs = Inputs.random(problem, rig.device, seed)
    for i in range(launch_job["schedules"]):
        launch = Launch(backend, problem, Schedule.load(folder / f"schedule{i}.npz"), inputs)
        launch.run()
        rig.count(launch.run)


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
