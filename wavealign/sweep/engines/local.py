"""Trials on this machine's cores: a process pool that is replaced when a worker dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wavealign.errors import WaveAlignError
from wavealign.masks.block_mask import BlockMask
from wavealign.runs.trial import TrialRecord
from wavealign.sim.devices import DeviceProfile
from wavealign.sweep.engines.job import Engine, Job, run_job
from wavealign.sweep.engines.suspects import Suspects
from wavealign.sweep.trial import Inputs

_ARRAYS: dict[str, type[np.generic]] = {"indptr": np.int64, "indices": np.int32}


class LocalEngine(Engine):
    """A pool of processes.

    The pool can't say which of the jobs in flight killed a worker, so all of them are suspects.

    Args:
        inputs: masks (written once to a folder that the workers map) and devices.
        jobs: worker processes.
        per_process: jobs after which a worker is replaced; None for never.
    """

    def __init__(self, inputs: Inputs, jobs: int, per_process: int | None = None) -> None:
        self.slots, self.inputs, self._per_process = jobs, inputs, per_process
        self._pool: ProcessPoolExecutor | None = None
        self._running: dict[Future[list[TrialRecord]], Job] = {}
        self._order = Suspects(self._run, self._running)
        self._refused: list[Job] = []
        self._ended: deque[list[TrialRecord]] = deque()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LocalEngine:
        with contextlib.ExitStack() as stack:
            made = tempfile.TemporaryDirectory(prefix="wavealign-", ignore_cleanup_errors=True)
            self._folder = Path(stack.enter_context(made))
            try:
                self._masks = {
                    digest: _MappedMask.write(self._folder, mask)
                    for digest, mask in self.inputs.masks.items()
                }
            except OSError as problem:
                raise WaveAlignError(
                    f"{self._folder}: the masks, which workers share, can't be written there "
                    f"({problem}); make room, or set TMPDIR to a folder that has some."
                ) from problem
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_pool(kill=bool(self._running))
        self._stack.close()

    def submit(self, job: Job) -> None:
        """Start a job, or keep it until no suspect is left."""
        self._order.add(job)

    def next(self) -> list[TrialRecord]:
        """The records of the job that ends next."""
        while not self._ended:
            self._order.start()
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
            broken = False
            for future in done:
                problem = future.exception()
                if isinstance(problem, BrokenProcessPool):
                    broken = True
                elif problem is not None:
                    raise problem
                else:
                    self._ended.append(future.result())
                    del self._running[future]
            if broken:
                self._after_a_death()
        return self._ended.popleft()

    def _run(self, job: Job) -> None:
        if self._pool is None:
            known = (self._folder, self._masks, dict(self.inputs.devices))
            self._pool = ProcessPoolExecutor(
                self.slots, multiprocessing.get_context("spawn"), _start_worker, known,
                max_tasks_per_child=self._per_process,
            )  # fmt: skip
        try:
            with contextlib.ExitStack() as stack:
                if len(self._pool._processes or {}) < self.slots:  # a worker may be started
                    stack.enter_context(_interrupts_ignored())
                future = self._pool.submit(_work, job)
            self._running[future] = job
        except BrokenProcessPool:  # a worker died while idle: this job is innocent
            if not self._running:
                self._drop_pool(kill=True)
                self._run(job)
            else:
                self._refused.append(job)  # until `next` has met the break in those

    def _after_a_death(self) -> None:
        for future, job in self._running.items():
            if future.done() and future.exception() is None:
                self._ended.append(future.result())
            elif records := self._order.died(job, "killed, out of memory, or crashed"):
                self._ended.append(records)
        self._running.clear()
        self._drop_pool(kill=True)
        refused, self._refused = self._refused, []
        for job in refused:
            self._order.add(job)

    def _drop_pool(self, kill: bool) -> None:
        if self._pool is None:
            return
        if kill:
            # The pool has no public way to end a worker at work (Python 3.14 has kill_workers).
            for worker in list((self._pool._processes or {}).values()):
                worker.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None


@dataclass(frozen=True)
class _MappedMask:
    """A mask as files that every worker maps: one copy in this machine's memory."""

    stem: str
    shape: tuple[int, int, int]
    block: tuple[int, int]
    tokens: tuple[int, int]

    @classmethod
    def write(cls, folder: Path, mask: BlockMask) -> _MappedMask:
        stem = str(folder / mask.digest)
        for name in _ARRAYS:
            # Not `numpy.save`, which doesn't notice that a disk is full.
            with Path(f"{stem}.{name}").open("wb") as stream:
                stream.write(getattr(mask, name).data)
        block, tokens = (mask.block_q, mask.block_kv), (mask.tokens_q, mask.tokens_kv)
        return cls(stem, mask.shape, block, tokens)

    def read(self) -> BlockMask:
        indptr, indices = (
            _mapped_array(Path(f"{self.stem}.{name}"), dtype) for name, dtype in _ARRAYS.items()
        )
        return BlockMask(indptr, indices, *self.shape, *self.block, *self.tokens)


def _mapped_array(path: Path, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if not path.stat().st_size:  # of a mask that keeps nothing; it can't be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")


_masks: dict[str, BlockMask] = {}  # of this worker process, by digest
_mapped: Mapping[str, _MappedMask] = {}
_devices: Mapping[str, DeviceProfile] = {}


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Inside this block Ctrl-C does nothing here, nor ever in processes that it starts.

    A worker ignores it by itself, too, but only once it has imported what it needs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start_worker(
    folder: Path, masks: Mapping[str, _MappedMask], devices: Mapping[str, DeviceProfile]
) -> None:
    global _mapped, _devices
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that sweeps
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    _mapped, _devices = masks, devices


def _end_with_parent(folder: Path) -> None:
    """End when the process that sweeps was killed, and clear up what it couldn't."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _work(job: Job) -> list[TrialRecord]:
    spec = job.specs[0]
    if spec.mask_digest not in _masks:
        _masks[spec.mask_digest] = _mapped[spec.mask_digest].read()
    return run_job(job, _masks[spec.mask_digest], _devices.get(spec.device))
