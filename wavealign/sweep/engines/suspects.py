"""Which of several jobs kills its workers, where the library can't say."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from wavealign.runs.trial import TrialRecord
from wavealign.sweep.engines.job import MAX_DEATHS, Job


class Suspects:
    """The order in which jobs start when workers die.

    Jobs that a worker died with are suspects: they run again one at a time, and one that dies
    then, alone, was it. Its neighbours are done by then.

    Args:
        start: hands a job to a worker.
        running: what is in flight: the library's futures → jobs.
    """

    def __init__(self, start: Callable[[Job], None], running: Mapping[Any, Job]) -> None:
        self._begin, self._running = start, running
        self._suspects: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._deaths: Counter[Job] = Counter()

    def add(self, job: Job) -> None:
        """A job to start, once there are no suspects."""
        self._waiting.append(job)
        self.start()

    def start(self) -> None:
        """Start what may be started: all that waits, or one suspect alone."""
        if self._suspects:
            if not self._running:
                self._begin(self._suspects.popleft())
            return
        while self._waiting and not any(self._deaths[job] for job in self._running.values()):
            self._begin(self._waiting.popleft())

    def died(self, job: Job, why: str) -> list[TrialRecord] | None:
        """A worker died with this job: its records, if it was alone; else None, it runs again."""
        self._deaths[job] += 1
        if self._deaths[job] >= MAX_DEATHS:
            return job.died(why)
        self._suspects.append(job)
        return None
