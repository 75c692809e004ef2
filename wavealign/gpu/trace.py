"""When and where each CTA ran, recorded by WaveAlign's own kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from wavealign.gpu.capabilities import Problem
from wavealign.npz import save_npz
from wavealign.order.schedule import Schedule

if TYPE_CHECKING:
    from wavealign.gpu.row_table import TritonRows

TRACE_SCHEMA = "wavealign.trace/1"


def record_trace(
    backend: TritonRows, problem: Problem, schedule: Schedule, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Run one schedule with tracing.

    Args:
        backend, problem, schedule: what to run.
        seed: of Q, K and V.

    Returns:
        int64 ``[B * H * M, 4]`` in launch order: start and end in ns since the first start, SM,
        query block.
    """
    import torch

    from wavealign.gpu.inputs import Inputs
    from wavealign.gpu.launch import Launch
    from wavealign.gpu.lists import kernel_lists

    inputs = Inputs.random(problem, "cuda", seed)
    Launch(backend, problem, schedule, inputs).run()  # warm
    lists = kernel_lists(schedule, backend.capabilities)
    record = backend.trace(problem, lists, inputs)
    torch.cuda.synchronize()
    ran = record.cpu().numpy()
    ran[:, :2] -= ran[:, 0].min()
    blocks = np.tile(schedule.row_order.ravel(), problem.batch).astype(np.int64)
    return np.column_stack([ran, blocks])


def write_traces(
    path: Path, backend: TritonRows, problem: Problem, schedules: Sequence[Schedule], seed: int
) -> None:
    """Traces of several schedules: npz of `TRACE_SCHEMA` with an array a policy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    traces = {s.policy: record_trace(backend, problem, s, seed) for s in schedules}
    save_npz(path, {"schema": TRACE_SCHEMA, **traces})
