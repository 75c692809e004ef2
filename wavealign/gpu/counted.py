"""Counters of launches: a child process under the profiler runs a control, then each schedule once.

``python -m wavealign.gpu.counted FOLDER`` runs the job that `count_launches` left there. Only what
lies between the profiler's start and stop is counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from wavealign.errors import MissingCapabilityError
from wavealign.gpu.backend import Backend
from wavealign.gpu.counters import Counters, check_control
from wavealign.gpu.ncu import collect
from wavealign.gpu.sizes import Sizes
from wavealign.masks.block_mask import BlockMask
from wavealign.masks.files import load_mask, save_mask
from wavealign.order.schedule import Schedule

CONTROL_BYTES = 2**30

_START_S = 120.0  # torch, a compiler or two
_LAUNCH_S = 60.0


def count_launches(
    backend: Backend,
    work: Sequence[tuple[BlockMask, Sizes, Sequence[Schedule]]],
    seed: int,
    cache_control: str,
) -> list[list[Counters]]:
    """Counters of every schedule of every mask, all from one child process.

    Args:
        backend: what runs them.
        work: masks, each with the sizes of its launches and their schedules.
        seed: of Q, K and V.
        cache_control: see `collect`.

    Raises:
        MissingCapabilityError: no profiler, no permission, or a control kernel whose known
            traffic isn't what the counters say.
    """
    launches = sum(len(schedules) for *_, schedules in work)
    kernels = backend.kernels_per_launch
    with tempfile.TemporaryDirectory(prefix="wavealign-") as name:
        folder = Path(name)
        for i, (mask, sizes, schedules) in enumerate(work):
            _write(folder / f"launch{i}", mask, sizes, schedules)
        job = {"backend": backend.name, "seed": seed, "problems": len(work)}
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
    return [[next(remaining) for _ in schedules] for *_, schedules in work]


def _write(folder: Path, mask: BlockMask, sizes: Sizes, schedules: Sequence[Schedule]) -> None:
    folder.mkdir()
    save_mask(folder / "mask.npz", mask)
    for i, schedule in enumerate(schedules):
        schedule.save(folder / f"schedule{i}.npz")
    shapes = {
        "batch": sizes.batch,
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "dtype": sizes.dtype,
    }
    text = json.dumps({"schedules": len(schedules), "shapes": shapes})
    (folder / "launch.json").write_text(text, encoding="utf-8")


def run_job(folder: Path) -> None:
    """Run the job of this folder on the current GPU."""
    from wavealign.gpu.registry import find_backend

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    backend = find_backend(job["backend"])
    _run_control()
    for i in range(job["problems"]):
        _run_launches(folder / f"launch{i}", backend, job["seed"])


def _run_control() -> None:
    """Read a GiB once: what the counters must say of this is known."""
    import torch

    from wavealign.gpu._triton_kernels import STREAM_CHUNK, stream_read

    source = torch.ones(CONTROL_BYTES // 4, device="cuda")
    sums = torch.empty(source.numel() // STREAM_CHUNK, device="cuda")
    stream_read(source, sums)  # compiled before anything is counted
    _counted(lambda: stream_read(source, sums))


def _run_launches(folder: Path, backend: Backend, seed: int) -> None:
    from wavealign.gpu.execution import Execution
    from wavealign.gpu.inputs import Inputs

    launch_job = json.loads((folder / "launch.json").read_text(encoding="utf-8"))
    sizes = Sizes.of(load_mask(folder / "mask.npz").mask, **launch_job["shapes"])
    inputs = Inputs.random(sizes, "cuda", seed)
    for i in range(launch_job["schedules"]):
        schedule = Schedule.load(folder / f"schedule{i}.npz")
        launch = Execution.of(backend, sizes, schedule, inputs)
        launch.run()
        _counted(launch.run)


def _counted(run: Callable[[], None]) -> None:
    import torch

    profiler = torch.cuda.cudart()
    torch.cuda.synchronize()
    profiler.cudaProfilerStart()
    run()
    torch.cuda.synchronize()
    profiler.cudaProfilerStop()


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
