"""When and where each CTA ran, recorded by WaveAlign's own kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from wavealign.gpu.sizes import Sizes
from wavealign.npz import save_npz
from wavealign.order.schedule import Schedule

if TYPE_CHECKING:
    from wavealign.gpu.row_table import TritonRows

TRACE_SCHEMA = "wavealign.trace/1"


def record_trace(
    backend: TritonRows, sizes: Sizes, schedule: Schedule, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Run one schedule with tracing.

    Args:
        backend, sizes, schedule: what to run.
        seed: of Q, K and V.

    Returns:
        int64 ``[B * H * M, 4]`` in launch order: start and end in ns since the first start, SM,
        query block.
    """
    import torch

    from wavealign.gpu.execution import Execution
    from wavealign.gpu.inputs import Inputs

    launch = Execution.of(backend, sizes, schedule, Inputs.random(sizes, "cuda", seed))
    launch.run()  # warm
    record = backend.trace(sizes, launch.lists, launch.inputs)
    torch.cuda.synchronize(record.device)
    ran = record.cpu().numpy()
    ran[:, :2] -= ran[:, 0].min()
    blocks = np.tile(schedule.row_order.ravel(), sizes.batch).astype(np.int64)
    return np.column_stack([ran, blocks])


def write_traces(
    path: Path, backend: TritonRows, sizes: Sizes, schedules: Sequence[Schedule], seed: int
) -> None:
    """Traces of several schedules: npz of `TRACE_SCHEMA` with an array a policy.

    Args:
        path: of the file; its folder is made.
        backend, sizes, schedules, seed: see `record_trace`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    traces = {s.policy: record_trace(backend, sizes, s, seed) for s in schedules}
    save_npz(path, {"schema": TRACE_SCHEMA, **traces})
