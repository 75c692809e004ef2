"""Silicon decides: measure finalists on a GPU through `wavealign.gpu.measure`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from wavealign._extras import require
from wavealign.errors import MissingCapabilityError
from wavealign.masks.block_mask import BlockMask
from wavealign.order import build_schedule
from wavealign.runs.launch import Launch
from wavealign.runs.trial import TrialRecord
from wavealign.sim.devices import device_of_gpu
from wavealign.sweep.finalists import Card
from wavealign.sweep.trial import failed, worker_name

if TYPE_CHECKING:
    from wavealign.gpu.sizes import Sizes


def find_card() -> Card:
    """This machine's GPU.

    Raises:
        MissingCapabilityError: there is none, or torch isn't installed or can't use it.
    """
    torch = require("torch", "gpu", "sweep --gpu")
    require("pynvml", "gpu", "sweep --gpu")
    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no CUDA device (driver missing, or none visible)"
        )
        raise MissingCapabilityError(
            f"sweep --gpu needs an NVIDIA GPU: {why}. `wavealign doctor` says more; without --gpu "
            "the sweep is simulated."
        )
    properties = torch.cuda.get_device_properties(0)
    return Card(
        properties.name,
        device_of_gpu(properties.name) or properties.name,
        properties.multi_processor_count,
        (properties.major, properties.minor),
    )


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
    from wavealign.gpu.registry import find_backend

    card = find_card()
    backend, sizes = find_backend(spec.kernel), sizes_of(spec, mask)
    backend.check(sizes, card.compute_capability)
    return card, card.sms * backend.rows_per_sm(sizes)


def sizes_of(spec: Launch, mask: BlockMask) -> Sizes:
    """The launch of a spec, as backends see it."""
    from wavealign.gpu.sizes import Sizes

    return Sizes.of(mask, head_dim=spec.head_dim, dtype=spec.dtype)


def measure_launch(specs: tuple[Launch, ...], mask: BlockMask) -> list[TrialRecord]:
    """Measure several policies of one launch, timed in turns; each output is checked first.

    Whatever goes wrong is the error of the trials that have no row by then.

    Args:
        specs: measured ones that differ in policy alone.
        mask: the heads that run.
    """
    from wavealign.gpu.measure import Case, Options, measure
    from wavealign.gpu.registry import find_backend
    from wavealign.gpu.telemetry import Telemetry

    first = specs[0]
    start = time.perf_counter()
    records: dict[str, TrialRecord] = {}
    planning_ms: dict[str, float] = {}
    schedules = []
    error = ""
    try:
        for spec in specs:
            planning_start = time.perf_counter()
            schedules.append(build_schedule(mask, spec.policy, spec.wave, spec.seed))
            planning_ms[spec.policy] = (time.perf_counter() - planning_start) * 1e3
        case = Case(
            mask,
            sizes_of(first, mask),
            schedules,
            first.mask,
            first.heads,
            None,
            first.device,
            first.wave,
        )
        steady = first.regime == "steady"
        options = Options(regimes=("steady",) if steady else ("single",), seed=first.seed)
        by_policy = {spec.policy: spec for spec in specs}
        with Telemetry() as telemetry:
            for row in measure(find_backend(first.kernel), case, options, telemetry):
                spent = time.perf_counter() - start
                records[row.policy] = TrialRecord(
                    by_policy[row.policy],
                    "done",
                    row,
                    None,
                    planning_ms[row.policy],
                    spent / len(specs),
                    worker_name(),
                )
    except Exception as problem:  # a trial that fails is a result, too
        error = f"{type(problem).__name__}: {problem}"
    return [
        records.get(spec.policy) or failed(spec, error or "the kernel gave no row")
        for spec in specs
    ]
