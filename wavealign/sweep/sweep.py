"""A whole sweep: masks, search, engine, store, and what a GPU says of the best."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wavealign.runs.trial import TrialRecord
from wavealign.sweep.conditions import resolve_conditions
from wavealign.sweep.engines import make_engine
from wavealign.sweep.gpu_phase import measure_finalists, prepare, require_gpu
from wavealign.sweep.masks import find_masks
from wavealign.sweep.run import OnTrial, Stages, run_search
from wavealign.sweep.search import make_search
from wavealign.sweep.space import Space
from wavealign.sweep.store import Store


@dataclass(frozen=True)
class Sweep:
    """What is swept, and by what.

    Attributes:
        space: axes, policies, parameters.
        patterns, block, key: of the masks, see `find_masks`.
        kind: of `wavealign.sweep.SEARCHES`.
        trials: to draw, where the search draws.
        seed: of the draws.
        objective: of `wavealign.runs.launch.OBJECTIVES`: what is minimised.
        belady: also find the least that any replacement could read.
        finalists: policies a mask to measure on a GPU then, beside `original`; None for none.
        executor, address, jobs: see `make_engine`.
    """

    space: Space
    patterns: Sequence[str]
    block: tuple[int, int] | None = None
    key: str | None = None
    kind: str = "grid"
    trials: int | None = None
    seed: int = 0
    objective: str = "time"
    belady: bool = False
    finalists: int | None = None
    executor: str = "local"
    address: str | None = None
    jobs: int = 1


class SweepInterruptedError(KeyboardInterrupt):
    """Ctrl-C; what had finished, so many trials, is kept and exported."""


def run_sweep(
    sweep: Sweep, out: str | Path, *, retry_failed: bool = False, stages: Stages,
    on_trial: OnTrial = lambda record, ran: None, note: Callable[[str], None] = lambda _: None,
) -> list[TrialRecord]:  # fmt: skip
    """Run a sweep, or what is left of one.

    Args:
        sweep: what is swept.
        out: folder of the store; trials that it holds aren't repeated.
        retry_failed: run those again that failed.
        stages: told when a stage begins: simulation, measurement.
        on_trial: called with each record of this sweep once, and whether it ran just now.
        note: told what people should know.

    Returns:
        The records, in the order in which they were told.

    Raises:
        InputError: anything that can't be swept, or a folder that holds another sweep.
        MissingCapabilityError: no GPU, or an extra isn't installed.
        StoreError: the disk refused a write.
        SweepInterruptedError: Ctrl-C.
    """
    if sweep.finalists is not None:
        require_gpu(sweep.executor)
    masks = find_masks(sweep.patterns, sweep.block, sweep.key, note)
    baselines, inputs = resolve_conditions(sweep.space, masks, sweep.objective, note)
    manifest = {
        "space": sweep.space.as_json(),
        "masks": [{"name": m.name, "digest": m.mask.digest, "shape": m.mask.shape} for m in masks],
        "paths": {m.name: m.path for m in masks},
        "devices": {name: device.digest for name, device in inputs.devices.items()},
        "search": {"kind": sweep.kind, "seed": sweep.seed if sweep.kind != "grid" else None},
        "trials": sweep.trials, "objective": sweep.objective, "belady": sweep.belady,
    }  # fmt: skip
    store = Store(out, manifest, note)
    search = make_search(
        sweep.space, baselines, sweep.kind, sweep.trials, sweep.seed, sweep.objective,
        store.draws, note,
    )  # fmt: skip
    engine = make_engine(sweep.executor, inputs, sweep.jobs, sweep.address)
    store.check()
    records: list[TrialRecord] = []

    def take(record: TrialRecord, ran: bool) -> None:
        records.append(record)
        on_trial(record, ran)

    with contextlib.ExitStack() as stack:
        stack.enter_context(engine)
        phase = prepare(engine, baselines) if sweep.finalists is not None else None
        stack.enter_context(store)
        if retry_failed:
            store.forget_failed()
        try:
            with stages(search.total, "simulated"):
                run_search(search, store, engine, take, sweep.belady)
            if phase is not None and sweep.finalists is not None:
                best = sweep.objective, sweep.finalists
                measure_finalists(phase, engine, store, *best, stages, take)
        except KeyboardInterrupt:
            _export(store, note)
            raise SweepInterruptedError(len(store.records)) from None
        _export(store, note)
    if sweep.kind != "grid":
        ran = sum(record.spec.source == "simulated" for record in records)
        note(f"{len(baselines)} baselines and {sweep.trials} draws came to {ran} different trials.")
    return records


def _export(store: Store, note: Callable[[str], None]) -> None:
    if not store.export():
        note("no results.parquet: it needs pyarrow (pip install 'wavealign[sweep]').")
