"""The sweep itself: ask the search, keep an engine busy, store what comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

from wavealign.runs.trial import TrialRecord
from wavealign.sweep.engines.job import Engine, Job
from wavealign.sweep.search import Search
from wavealign.sweep.store import Store

Stages = Callable[[int, str], AbstractContextManager[object]]
"""Begins a stage of at most so many trials, which are ``"simulated"`` or ``"measured"``."""

OnTrial = Callable[[TrialRecord, bool], None]
"""Called with a record, and whether it ran just now."""


def run_search(
    search: Search, store: Store, engine: Engine, on_trial: OnTrial, belady: bool = False,
) -> None:  # fmt: skip
    """Run every trial that the search asks for and the store doesn't hold.

    Args:
        search: asked for as many trials as the engine takes, and told how they ended.
        store: where each record goes before anybody is told.
        engine: entered.
        on_trial: a trial that the search draws again isn't called again.
        belady: also find the least that any replacement could read.
    """
    told: set[str] = set()
    asked: set[str] = set()

    def tell(record: TrialRecord, ran: bool) -> None:
        search.tell(record)
        if record.spec.named not in told:
            told.add(record.spec.named)
            on_trial(record, ran)

    def jobs() -> Iterator[Job]:
        while (spec := search.ask()) is not None:
            if (known := store.records.get(spec.named)) is not None:
                tell(known, False)
            elif spec.named not in asked:
                asked.add(spec.named)
                yield Job((spec,), belady=belady)

    # A job beyond each worker's own, so that none waits; not where the next depends on the last.
    run_jobs(jobs(), store, engine, engine.slots * (1 if search.learns else 2), tell)


def run_jobs(
    jobs: Iterable[Job], store: Store, engine: Engine, most: int, on_trial: OnTrial
) -> None:
    """Run jobs, so many at a time; each is asked for when there is room for it.

    Args:
        jobs: what runs.
        store: where each record goes before anybody is told.
        engine: entered.
        most: jobs in flight.
        on_trial: called with each record.
    """
    waiting, in_flight = iter(jobs), 0
    while True:
        for job in itertools.islice(waiting, most - in_flight):
            engine.submit(job)
            in_flight += 1
        if not in_flight:
            return
        records = engine.next()
        in_flight -= 1
        for record in records:
            store.append(record)
            on_trial(record, True)
