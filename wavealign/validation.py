"""Validate: run schedules on a real kernel, and hold the prediction against each measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wavealign.errors import InputError
from wavealign.gpu.backend import Backend
from wavealign.gpu.counted import count_launches
from wavealign.gpu.counters import Counters
from wavealign.gpu.measure import Options, measure, sizes_of
from wavealign.gpu.rig import Rig
from wavealign.gpu.sizes import Sizes
from wavealign.gpu.telemetry import Telemetry
from wavealign.masks import BlockMask, LoadedMask
from wavealign.order import Schedule, build_schedule
from wavealign.runs.launch import BASELINE, Launch, Regime
from wavealign.runs.result import Result
from wavealign.sim.devices import DeviceProfile, device_of_gpu, load_device
from wavealign.sim.simulate import simulate_launch
from wavealign.units import format_heads


@dataclass(frozen=True)
class Terms:
    """What is launched over each mask, and under which policies.

    Attributes:
        policies: their names.
        schedule_paths: schedule files that run beside them.
        regimes: ``"single"``, ``"steady"`` or both.
        whole_file: every head of the mask's file takes part.
        per_head: each head in a launch of its own, rather than all in one.
        batch, kv_heads, head_dim, dtype: see `Sizes`.
        wave: rows in flight that policies assume; None for SMs x rows per SM.
        seed: of Q, K, V and of every random choice.
        device_name: the profile to predict with; None for the card's own, if there is one.
        predict: simulate each launch that is measured.
        counters: read hardware counters, too.
        jobs: cores to plan with.
    """

    policies: Sequence[str]
    schedule_paths: Sequence[str] = ()
    regimes: Sequence[Regime] = ("single",)
    whole_file: bool = True
    per_head: bool = False
    batch: int = 1
    kv_heads: int | None = None
    head_dim: int = 128
    dtype: str = "bf16"
    wave: int | None = None
    seed: int = 0
    device_name: str | None = None
    predict: bool = True
    counters: bool = False
    jobs: int = 1


@dataclass(frozen=True, eq=False)
class Case:
    """What is measured together: launches of one mask that differ in policy and regime alone.

    Attributes:
        backend: what runs them.
        launches: single ones first.
        mask: the heads that run.
        schedules: by policy.
    """

    backend: Backend
    launches: Sequence[Launch]
    mask: BlockMask
    schedules: Mapping[str, Schedule]

    @property
    def sizes(self) -> Sizes:
        """The launch as the backend sees it."""
        return sizes_of(self.launches[0], self.mask)


def validate(
    masks: Sequence[tuple[LoadedMask, Sequence[int]]], backends: Sequence[Backend], terms: Terms,
    rig: Rig, telemetry: Telemetry, options: Options,
    stages: Callable[[int, str], AbstractContextManager[Any]],
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Case, Result, Result | None]]:  # fmt: skip
    """Measure every policy over every mask on every backend, each beside its prediction.

    Everything is planned, and may be refused, before this returns; iterating runs it.

    Args:
        masks: each with the indices of its heads in the file.
        backends: what runs, in turn.
        terms: what is launched.
        rig, telemetry: of the device that runs it.
        options: what is measured.
        stages: begins a case of so many steps that has this title; ``advance`` ends a step.
        note: told what is counted.

    Returns:
        Each launch as it is known: its case, what was measured, and the same launch simulated;
        None where nothing can be predicted.

    Raises:
        InputError: a backend that can't compute a mask, a policy or schedule named twice, a
            schedule of another mask, an unknown device.
    """
    gpu_name = telemetry.read().name
    name = terms.device_name or device_of_gpu(gpu_name)
    known = None if name is None else load_device(name)
    device, profile = known.name if known else gpu_name, known if terms.predict else None
    plans = [
        (b, [c for loaded, ids in masks for c in _cases(b, loaded, ids, terms, rig, device)])
        for b in backends
    ]

    def run() -> Iterator[tuple[Case, Result, Result | None]]:
        for backend, cases in plans:
            counted: Sequence[Sequence[Counters]] = [()] * len(cases)
            if terms.counters:
                note(f"{backend.name}: reading counters, {len(cases)} launches")
                work = [(case.sizes, list(case.schedules.values())) for case in cases]
                control, device_kind = options.cache_control, rig.device.type
                counted = count_launches(backend, work, terms.seed, control, device_kind)
            for case, counters in zip(cases, counted, strict=True):
                steps = len(case.launches) + options.dense
                steps += options.check * (1 + len(case.schedules))
                with stages(steps, f"{backend.name}, {case.launches[0].mask}") as stage:
                    rows = measure(
                        case.launches, case.mask, rig, telemetry, options,
                        backend=backend, schedules=case.schedules,
                        counters=dict(zip(case.schedules, counters, strict=False)),
                        progress=stage.advance,
                    )  # fmt: skip
                    for row in rows:
                        yield case, row, _predict(case, row, profile)

    return run()


def _cases(
    backend: Backend, loaded: LoadedMask, ids: Sequence[int], terms: Terms, rig: Rig, device: str
) -> Iterator[Case]:
    """One launch of all heads, or one a head."""
    for head in range(loaded.mask.H) if terms.per_head else (None,):
        mask = loaded.mask if head is None else loaded.mask.select_heads([head])
        own = ids if head is None else [ids[head]]
        sizes = Sizes.of(mask, terms.batch, terms.kv_heads, terms.head_dim, terms.dtype)
        rows = rig.rows_in_flight(backend, sizes)  # refuses, whoever says the wave
        wave = terms.wave or rows
        schedules = [build_schedule(mask, p, wave, terms.seed, terms.jobs) for p in terms.policies]
        files: dict[str, str] = {}
        for path in terms.schedule_paths:
            whole = terms.whole_file and head is None
            schedules.append(Schedule.fitting(path, mask, None if whole else own))
            files[schedules[-1].policy] = path
        by_policy = {schedule.policy: schedule for schedule in schedules}
        if len(by_policy) < len(schedules):
            raise InputError("a policy or schedule is named twice.")
        launch = Launch(
            source="measured",
            mask=loaded.name, mask_digest=mask.digest, heads=format_heads(own),
            head=None if head is None else own[0],
            policy=BASELINE, wave=wave, seed=terms.seed,
            device=device, kernel=backend.name, regime="single",
            batch=terms.batch, kv_heads=terms.kv_heads or mask.H,
            head_dim=terms.head_dim, dtype=terms.dtype,
        )  # fmt: skip
        launches = [
            replace(launch, policy=policy, schedule_file=files.get(policy), regime=regime)
            for regime in dict.fromkeys(terms.regimes)
            for policy in by_policy
        ]
        yield Case(backend, launches, mask, by_policy)


def _predict(case: Case, measured: Result, profile: DeviceProfile | None) -> Result | None:
    """The same launch in the simulator, in the order that the kernel really ran."""
    launch, sizes = measured.launch, case.sizes
    unmodelled = sizes.batch > 1 or sizes.heads_per_kv_head > 1
    if unmodelled or profile is None or case.backend.name not in profile.kernels:
        return None
    layout = case.backend.capabilities.layout_for(sizes)
    executed = layout.executed(case.schedules[launch.policy])
    return simulate_launch(launch, case.mask, profile, schedule=executed)


def trace_path(folder: Path, mask: str, head: int | None) -> Path:
    """Where the traces of a mask's launches go, or of one head's.

    Args:
        folder: of traces.
        mask: its file.
        head: where a launch is one head's.
    """
    return folder / f"{Path(mask).name}{'' if head is None else f'_head{head}'}.npz"


def trace_case(case: Case, folder: Path) -> Path:
    """Record when and where each CTA ran, for each schedule; the file that holds it.

    Args:
        case: on the backend `triton`.
        folder: gets a file a case (see `trace_path`).
    """
    from wavealign.gpu.row_table import TritonRows
    from wavealign.gpu.trace import write_traces

    assert isinstance(case.backend, TritonRows)
    first = case.launches[0]
    path = trace_path(folder, first.mask, first.head)
    write_traces(path, case.backend, case.sizes, list(case.schedules.values()), first.seed)
    return path
