"""Counters of launches: a child process under the profiler runs a control, then each schedule once.

``python -m wavealign.gpu.counted FILE`` runs the job that `count_launches` left there. Only what
the rig marks is counted.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from wavealign.errors import MissingCapabilityError
from wavealign.gpu.backend import Backend
from wavealign.gpu.counters import Counters, check_control
from wavealign.gpu.execution import Execution
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.ncu import collect
from wavealign.gpu.registry import find_backend
from wavealign.gpu.rig import CudaRig, Rig
from wavealign.gpu.sizes import Sizes
from wavealign.order.schedule import Schedule

CONTROL_BYTES = 2**30

_START_S = 120.0  # torch, a compiler or two
_LAUNCH_S = 60.0

Work = Sequence[tuple[Sizes, Sequence[Schedule]]]
"""Sizes of launches, each with its schedules."""


def count_launches(
    backend: Backend, work: Work, seed: int, cache_control: str, device: str = "cuda"
) -> list[list[Counters]]:
    """Counters of every schedule of every mask, all from one child process.

    Args:
        backend: what runs them.
        work: what they run.
        seed: of Q, K and V.
        cache_control: see `collect`.
        device: ``"cuda"``, or ``"cpu"`` for a backend that runs there.

    Raises:
        MissingCapabilityError: no profiler, no permission, or a control kernel whose known
            traffic isn't what the counters say.
    """
    launches = sum(len(schedules) for _, schedules in work)
    kernels = backend.kernels_per_launch
    with tempfile.TemporaryDirectory(prefix="wavealign-") as folder:
        job = Path(folder) / "job.pickle"
        job.write_bytes(pickle.dumps((backend.name, device, seed, work)))
        control, *counted = collect(
            [sys.executable, "-m", "wavealign.gpu.counted", str(job)],
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


def run_job(path: Path) -> None:
    """Run a job that this user's own process wrote."""
    name, device, seed, work = pickle.loads(path.read_bytes())
    backend, rig = find_backend(name), CudaRig() if device == "cuda" else Rig()
    read = rig.reader(CONTROL_BYTES)  # what the counters must say of this is known
    read()  # compiled before anything is counted
    rig.count(read)
    for sizes, schedules in work:
        inputs = Inputs.random(sizes, rig.device, seed)
        for schedule in schedules:
            execution = Execution.of(backend, sizes, schedule, inputs)
            execution.run()
            rig.count(execution.run)


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
