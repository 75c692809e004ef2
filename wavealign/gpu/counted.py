"""The child process under the profiler: a control kernel, then each schedule once.

``python -m wavealign.gpu.counted FOLDER`` runs the job that `write_job` left there. Only what
lies between the profiler's start and stop is counted: one kernel for each line of the job.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from wavealign.gpu.capabilities import Problem
from wavealign.masks.files import load_mask, save_mask
from wavealign.order.schedule import Schedule

CONTROL_BYTES = 2**30


def write_job(
    folder: Path, backend: str, problem: Problem, schedules: Sequence[Schedule], seed: int
) -> list[str]:
    """Leave a job in a folder; returns the command that runs it, one kernel a schedule plus one."""
    save_mask(folder / "mask.npz", problem.mask)
    for i, schedule in enumerate(schedules):
        schedule.save(folder / f"schedule{i}.npz")
    shapes = dataclasses.asdict(dataclasses.replace(problem, mask=None))  # type: ignore[arg-type]
    del shapes["mask"]
    job = {"backend": backend, "schedules": len(schedules), "seed": seed, "problem": shapes}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    return [sys.executable, "-m", "wavealign.gpu.counted", str(folder)]


def run_job(folder: Path) -> None:
    """Run the job of this folder on the current GPU."""
    import torch

    from wavealign.gpu._triton_kernels import STREAM_CHUNK, stream_read
    from wavealign.gpu.inputs import Inputs
    from wavealign.gpu.launch import Launch
    from wavealign.gpu.registry import find_backend

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    backend = find_backend(job["backend"])
    problem = Problem(load_mask(folder / "mask.npz").mask, **job["problem"])
    profiler = torch.cuda.cudart()

    source = torch.ones(CONTROL_BYTES // 4, device="cuda")
    sums = torch.empty(source.numel() // STREAM_CHUNK, device="cuda")
    stream_read(source, sums)
    torch.cuda.synchronize()
    profiler.cudaProfilerStart()
    stream_read(source, sums)
    torch.cuda.synchronize()
    profiler.cudaProfilerStop()
    del source, sums

    inputs = Inputs.random(problem, "cuda", job["seed"])
    for i in range(job["schedules"]):
        launch = Launch(backend, problem, Schedule.load(folder / f"schedule{i}.npz"), inputs)
        launch.run()  # compiled, and its memory allocated, before anything is counted
        torch.cuda.synchronize()
        profiler.cudaProfilerStart()
        launch.run()
        torch.cuda.synchronize()
        profiler.cudaProfilerStop()


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
