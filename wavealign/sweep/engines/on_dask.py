"""Trials on a Dask cluster: a task each, masks scattered to the workers once."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from concurrent.futures import CancelledError
from typing import Any

from wavealign._extras import require
from wavealign.errors import MissingCapabilityError, WaveAlignError
from wavealign.runs.trial import TrialRecord
from wavealign.sweep.engines.job import MAX_DEATHS, Engine, Job, run_job
from wavealign.sweep.engines.suspects import Suspects
from wavealign.sweep.trial import Inputs

_SCATTERS = 5
_NEW_WORKER_S = 60.0


class DaskEngine(Engine):
    """Dask's tasks; its scheduler says which of them a worker died with: suspects, all of them.

    Args:
        inputs: masks, scattered when first needed, and again if all workers that held one died.
        jobs: workers of one thread, where the cluster is started here.
        address: of a running scheduler, e.g. ``"tcp://10.0.0.1:8786"``.

    Raises:
        MissingCapabilityError: distributed isn't installed.
    """

    def __init__(self, inputs: Inputs, jobs: int, address: str | None) -> None:
        self._dask: Any = require("dask", "dask", "--executor dask")
        self._distributed: Any = require("distributed", "dask", "--executor dask")
        self.slots, self.inputs, self._address = jobs, inputs, address
        self._running: dict[Any, Job] = {}
        self._scattered: dict[str, Any] = {}
        self._order = Suspects(self._run, self._running)
        self._lost: Counter[Job] = Counter()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> DaskEngine:
        distributed = self._distributed
        # What a died worker's tasks come to is said by their records.
        for name in ("distributed.nanny", "distributed.scheduler"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with contextlib.ExitStack() as stack:
            where = self._address
            if where is None:
                failures = {"distributed.scheduler.allowed-failures": 0}  # `Suspects` retries
                stack.enter_context(self._dask.config.set(failures))
                workers = {"n_workers": self.slots, "threads_per_worker": 1, "processes": True}
                cluster = distributed.LocalCluster(**workers, dashboard_address=None)
                where = stack.enter_context(cluster)
            try:
                self._client = stack.enter_context(distributed.Client(where))
            except OSError as problem:
                raise MissingCapabilityError(
                    f"--address {where}: no Dask scheduler answers there ({problem}); start one "
                    "with `dask scheduler`, and workers with `dask worker`."
                ) from problem
            if self._address is not None:
                self._client.wait_for_workers(1)
                self.slots = max(1, sum(self._client.nthreads().values()))
            self._completed = distributed.as_completed()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.cancel(list(self._running), force=True)
        self._stack.close()

    def submit(self, job: Job) -> None:
        """Start a task, or keep it until no suspect is left."""
        self._order.add(job)

    def _run(self, job: Job) -> None:
        spec = job.specs[0]
        device = self.inputs.devices.get(spec.device)
        future = self._client.submit(run_job, job, self._mask(spec.mask_digest), device, pure=False)
        self._running[future] = job
        self._completed.add(future)

    def next(self) -> list[TrialRecord]:
        """The records of the task that ends next."""
        while True:
            self._order.start()
            future = next(self._completed)
            job = self._running.pop(future)
            try:
                records: list[TrialRecord] = future.result()
                return records
            except self._distributed.scheduler.KilledWorker:
                if killed := self._order.died(job, "KilledWorker"):
                    return killed
            except CancelledError:
                # The workers that held its mask, or its result, died before it was fetched. That
                # isn't this job's doing, unless it happens to it again and again.
                self._lost[job] += 1
                if self._lost[job] > 2 * MAX_DEATHS:
                    return job.died("its mask was lost with its workers, again and again")
                self._scattered.pop(job.specs[0].mask_digest, None)
                self._run(job)

    def _mask(self, digest: str) -> Any:
        held = self._scattered.get(digest)
        if held is None or held.status != "finished":
            held = self._scattered[digest] = self._scatter(digest)
        return held

    def _scatter(self, digest: str) -> Any:
        """Send a mask to all workers; again, where one dies meanwhile."""
        for _ in range(_SCATTERS):
            try:
                self._client.wait_for_workers(1, timeout=_NEW_WORKER_S)
                return self._client.scatter(self.inputs.masks[digest], broadcast=True, hash=False)
            except OSError as problem:  # CommClosedError and TimeoutError are
                last = problem
        raise WaveAlignError(
            f"a mask can't be sent to the Dask workers ({type(last).__name__}: {last}); finished "
            "trials are kept."
        ) from last
