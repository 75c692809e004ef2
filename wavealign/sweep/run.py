"""The sweep itself: ask the search, keep an engine busy, store what comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from wavealign.runs.trial import TrialRecord
from wavealign.sweep.engines.job import Engine, Job
from wavealign.sweep.search import Search
from wavealign.sweep.store import Store

Stages = Callable[[int, str], AbstractContextManager[object]]
"""Begins a stage of at most so many trials, which are ``"simulated"`` or ``"measured"``."""


def run_search(
    search: Search,
    store: Store,
    engine: Engine,
    on_trial: Callable[[TrialRecord, bool], None],
    belady: bool = False,
) -> None:
    """Run every trial that the search asks for and the store doesn't hold.

    Args:
        search: asked for as many trials as the engine takes, and told how they ended.
        store: where each record goes before anybody is told.
        engine: entered.
        on_trial: called with each record, and whether it ran just now; a trial that the search
            draws again isn't called again.
        belady: also find the least that any replacement could read.
    """
    in_flight: set[str] = set()
    told: set[str] = set()

    def tell(record: TrialRecord, ran: bool) -> None:
        search.tell(record)
        if record.spec.identity not in told:
            told.add(record.spec.identity)
            on_trial(record, ran)

    most = engine.slots + (0 if search.learns else engine.lookahead)
    exhausted = False
    while True:
        while not exhausted and len(in_flight) < most:
            spec = search.ask()
            if spec is None:
                exhausted = True
            elif spec.identity in store.records:
                tell(store.records[spec.identity], False)
            elif spec.identity not in in_flight:
                engine.submit(Job((spec,), belady=belady))
                in_flight.add(spec.identity)
        if not in_flight:
            return
        for record in engine.next():
            store.append(record)
            in_flight.discard(record.spec.identity)
            tell(record, True)


def run_jobs(
    jobs: Sequence[Job],
    store: Store,
    engine: Engine,
    slots: int,
    on_trial: Callable[[TrialRecord, bool], None],
) -> None:
    """Run jobs, `slots` at a time; trials that the store holds are left out.

    Args:
        jobs: what runs.
        store: where each record goes before anybody is told.
        engine: entered.
        slots: jobs in flight.
        on_trial: called with each record, and whether it ran just now.
    """
    waiting = []
    for job in jobs:
        known = [store.records.get(spec.identity) for spec in job.specs]
        for record in known:
            if record is not None:
                on_trial(record, False)
        left = tuple(s for s, record in zip(job.specs, known, strict=True) if record is None)
        if left:
            waiting.append(dataclasses.replace(job, specs=left))
    waiting.reverse()
    in_flight = 0
    while waiting or in_flight:
        while waiting and in_flight < slots:
            engine.submit(waiting.pop())
            in_flight += 1
        records = engine.next()
        in_flight -= 1
        for record in records:
            store.append(record)
            on_trial(record, True)
