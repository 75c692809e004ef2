"""Trials on a Ray cluster: a task each, masks in the object store, GPUs as a resource."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from wavealign._extras import require
from wavealign.errors import MissingCapabilityError
from wavealign.masks.block_mask import BlockMask
from wavealign.runs.launch import Launch
from wavealign.runs.trial import TrialRecord
from wavealign.sweep.engines.job import MAX_DEATHS, Answer, Engine, Job, run_job
from wavealign.sweep.trial import Inputs


class RayEngine(Engine):
    """Ray's tasks; Ray runs one again whose worker died.

    Args:
        inputs: masks, put into the object store once each: a node fetches what it needs once.
        jobs: CPUs of the cluster, where it is started here.
        address: of a running cluster (``"auto"`` finds one on this machine).

    Raises:
        MissingCapabilityError: Ray isn't installed.
    """

    def __init__(self, inputs: Inputs, jobs: int, address: str | None) -> None:
        self._ray: Any = require("ray", "ray", "--executor ray")
        self.slots, self.inputs = jobs, inputs
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._running: dict[Any, Job] = {}

    def __enter__(self) -> RayEngine:
        ray = self._ray
        if self._address is None:
            # Not the default address, which is that of any cluster this machine happens to run.
            local = {"address": "local", "num_cpus": self.slots, "include_dashboard": False}
            ray.init(**local, log_to_driver=False)
        else:
            try:
                ray.init(address=self._address, log_to_driver=False)
            except ConnectionError as problem:
                raise MissingCapabilityError(
                    f"--address {self._address}: no Ray cluster answers there ({problem}); start "
                    "one with `ray start --head`. A cluster that wants a token wants the same "
                    "RAY_AUTH_TOKEN here."
                ) from problem
            self.slots = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._task = ray.remote(max_retries=MAX_DEATHS - 1)(run_job)
        self._masks = {digest: ray.put(mask) for digest, mask in self.inputs.masks.items()}
        self._devices = {name: ray.put(device) for name, device in self.inputs.devices.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()

    @property
    def gpus(self) -> int:
        """Those of the cluster."""
        return int(self._ray.cluster_resources().get("GPU", 0))

    def on_gpu(self, function: Callable[[Launch, BlockMask], Answer], spec: Launch) -> Answer:
        """See `Engine.on_gpu`: on a node that has one."""
        task = self._ray.remote(num_gpus=1)(function)
        try:
            answer: Answer = self._ray.get(task.remote(spec, self._masks[spec.mask_digest]))
        except self._ray.exceptions.RayTaskError as problem:
            raise problem.cause from None
        return answer

    def submit(self, job: Job) -> None:
        """Start a task; one that measures asks for a GPU."""
        spec = job.specs[0]
        task = self._task.options(num_gpus=1) if job.gpu else self._task
        reference = task.remote(job, self._masks[spec.mask_digest], self._devices.get(spec.device))
        self._running[reference] = job

    def next(self) -> list[TrialRecord]:
        """The records of the task that ends next."""
        (reference, *_), _ = self._ray.wait(list(self._running), num_returns=1)
        job = self._running.pop(reference)
        try:
            records: list[TrialRecord] = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:
            raise  # our own code failed, outside of a trial
        except self._ray.exceptions.RayError as problem:
            return job.died(f"{type(problem).__name__}: {str(problem).splitlines()[0]}")
        return records
