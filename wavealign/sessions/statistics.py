"""What a session has done: calls, plans, densities, time."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

Kind = Literal["full", "searched", "reused", "planned"]
KINDS: tuple[Kind, ...] = ("full", "searched", "reused", "planned")


@dataclass(frozen=True)
class SearchRecord:
    """One search of one layer and branch.

    Attributes:
        step, layer, branch: which.
        density: share of all blocks that were kept.
        evaluated: share of all blocks that were looked at.
        policies: of the schedule planned for them, each once; empty where nothing was planned,
            because no step follows.
    """

    step: int
    layer: int
    branch: str
    density: float
    evaluated: float
    policies: tuple[str, ...]


@dataclass(frozen=True)
class Statistics:
    """What a session has done so far, all layers and branches together.

    Attributes:
        full: calls of full attention that searched nothing.
        searched: calls that searched.
        reused: calls that attended to the blocks of an earlier search.
        plans: schedules made for reuse.
        searches: one record a search, in the order of the calls.
        seconds: time of each kind, "full", "searched", "reused" and "planned": on a GPU the
            device's (CUDA events around the call), else the host's. Moving tokens into order and
            back is part of it; planning isn't part of "searched".
    """

    full: int
    searched: int
    reused: int
    plans: int
    searches: tuple[SearchRecord, ...]
    seconds: dict[str, float]

    def density(self, step: int) -> float:
        """Mean density of the masks found at a step, over layers and branches (NaN if none)."""
        found = [record.density for record in self.searches if record.step == step]
        return sum(found) / len(found) if found else float("nan")


class Stopwatch:
    """Time by kind; on a GPU without making the host wait."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._pending: deque[tuple[Kind, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measure(self, kind: Kind, device: torch.device) -> Iterator[None]:
        """Add what happens inside, unless it fails."""
        if device.type != "cuda":
            started = time.perf_counter()
            yield
            self._seconds[kind] += time.perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        yield
        end.record(stream)
        self._pending.append((kind, begin, end))
        while self._pending and self._pending[0][2].query():
            self._settle()

    def seconds(self) -> dict[str, float]:
        """So far; waits for the device."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._settle()
        return dict(self._seconds)

    def _settle(self) -> None:
        kind, begin, end = self._pending.popleft()
        self._seconds[kind] += begin.elapsed_time(end) / 1e3


@dataclass
class Tally:
    """The counting side of `Statistics`."""

    calls: Counter[str] = field(default_factory=Counter)
    plans: int = 0
    # Densities stay on the device until somebody asks.
    searches: list[tuple[int, int, str, torch.Tensor, torch.Tensor | float, tuple[str, ...]]] = (
        field(default_factory=list)
    )
    watch: Stopwatch = field(default_factory=Stopwatch)

    def statistics(self) -> Statistics:
        """A snapshot; waits for the device."""
        records = tuple(
            SearchRecord(step, layer, branch, float(density), float(evaluated), policies)
            for step, layer, branch, density, evaluated, policies in self.searches
        )
        full, searched, reused = (self.calls[action] for action in ("full", "search", "reuse"))
        return Statistics(full, searched, reused, self.plans, records, self.watch.seconds())
