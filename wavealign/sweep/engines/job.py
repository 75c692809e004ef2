"""A job for a worker, and what an engine that runs jobs has to do."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from wavealign.masks.block_mask import BlockMask
from wavealign.runs.launch import Launch
from wavealign.runs.trial import TrialRecord
from wavealign.sim.devices import DeviceProfile
from wavealign.sweep.trial import Inputs, failed, run_trial

MAX_DEATHS = 2

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Job:
    """Work for one worker: trials of one mask.

    Attributes:
        specs: what to try; all of one mask.
        function: None to simulate; else makes the records: a function that workers can unpickle,
            called with the specs and the mask.
        belady: also find the least that any replacement could read.
        gpu: it needs a GPU of its own.
    """

    specs: tuple[Launch, ...]
    function: Callable[[tuple[Launch, ...], BlockMask], list[TrialRecord]] | None = None
    belady: bool = False
    gpu: bool = False

    def died(self, why: str) -> list[TrialRecord]:
        """The records of a job that killed its workers."""
        return [failed(spec, f"worker died {MAX_DEATHS} times: {why}") for spec in self.specs]


class Engine(abc.ABC):
    """Runs jobs; a context manager.

    Attributes:
        slots: workers: jobs that run at the same time, and as many again are worth having in
            flight, so that no worker waits for the next.
        inputs: masks and devices.
    """

    slots: int
    inputs: Inputs

    @abc.abstractmethod
    def __enter__(self) -> Engine: ...

    @abc.abstractmethod
    def __exit__(self, *_: object) -> None:
        """Stop, without waiting for jobs in flight."""

    @abc.abstractmethod
    def submit(self, job: Job) -> None:
        """Start a job."""

    @abc.abstractmethod
    def next(self) -> list[TrialRecord]:
        """The records of the job that ends next; waits for it."""

    @property
    def gpus(self) -> int | None:
        """GPUs that it gives to jobs; None where it can't, and this machine's is meant."""
        return None

    def on_gpu(self, function: Callable[[Launch, BlockMask], Answer], spec: Launch) -> Answer:
        """What a function says of a spec and its mask, asked where the GPU is."""
        return function(spec, self.inputs.masks[spec.mask_digest])


def run_job(job: Job, mask: BlockMask, device: DeviceProfile | None) -> list[TrialRecord]:
    """What a worker does with a job.

    Args:
        job: its specs share a mask and a device.
        mask: of the chosen heads.
        device: profile; None where the job has a function of its own.
    """
    if job.function is not None:
        return job.function(job.specs, mask)
    assert device is not None
    return [run_trial(spec, mask, device, job.belady) for spec in job.specs]
