"""Threads, shared objects, changing masks and injected failures: every output right, or an error.

    python tests/stress.py --calls 10000 --threads 8 --seed 0

Threads share `Attention` objects, plans, sessions and enabled diffusers transformers, and call
them with masks of many sizes that are rewritten in place, in runs that are broken off anywhere. In
every other call an allocation, a launch or a line of WaveAlign's fails (`faults`). What a call
gives is compared with attention by its definition; it may fail with what was injected, or with a
refusal that its sort of calls may meet, and nothing else. The calls after a failure have to be
right again.

It prints what was called, injected, refused and found. Its exit code is 1 where anything was wrong,
or nothing was tried.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import random
import re
import sys
import threading
import time
import traceback
from collections import Counter as Counts
from dataclasses import dataclass, field

import torch
from faults import KINDS, Counter, launches_watched

from wavealign.errors import InputError
from wavealign.gpu.registry import registered

_MOST_SHOWN = 3
_MANY = 50  # calls of a sort, some of which have to fail
_HANGS_S = 120.0  # without the end of a call


def _places() -> dict[str, set[str]]:
    return {kind: set() for kind in KINDS}


@dataclass
class Tally:
    """What threads have seen.

    Attributes:
        calls: by sort.
        right: outputs that were compared and right, by sort.
        injected: exceptions that came out as they went in, by sort and kind.
        lost: places of exceptions that never came out: in a finalizer, or behind the end.
        refused: clear errors, by sort and what they say.
        bad: outputs that were wrong and errors that weren't clear, each told in full.
        seen, failed: places of each kind that calls passed, and those where one failed.
        seconds: all of it.
    """

    calls: Counts[str] = field(default_factory=Counts)
    right: Counts[str] = field(default_factory=Counts)
    injected: Counts[tuple[str, str]] = field(default_factory=Counts)
    lost: Counts[str] = field(default_factory=Counts)
    refused: Counts[tuple[str, str]] = field(default_factory=Counts)
    bad: list[str] = field(default_factory=list)
    seen: dict[str, set[str]] = field(default_factory=_places)
    failed: dict[str, set[str]] = field(default_factory=_places)
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """What a thread has counted, too."""
        for name in ("calls", "right", "injected", "lost", "refused"):
            getattr(self, name).update(getattr(other, name))
        for kind in KINDS:
            self.seen[kind] |= other.seen[kind]

    def count_injected(self, sort: str = "", kind: str = "") -> int:
        """Exceptions that came out, of a sort of calls or a kind alone where one is named."""
        return sum(
            count
            for (of_sort, of_kind), count in self.injected.items()
            if sort in ("", of_sort) and kind in ("", of_kind)
        )

    def problems(self) -> list[str]:
        """What must not be: what is bad, and what was never tried."""
        often = [sort for sort, count in self.calls.items() if count > _MANY]
        untried = [f"no {kind} failed" for kind in KINDS if not self.count_injected(kind=kind)]
        untried += [f"{sort}: no output was right" for sort in often if not self.right[sort]]
        untried += [f"{sort}: nothing failed" for sort in often if not self.count_injected(sort)]
        return [*self.bad, *untried]

    def report(self) -> str:
        """In lines, for people."""
        lines = [
            f"{self.calls.total()} calls in {self.seconds:.0f} s: {self.right.total()} right, "
            f"{self.count_injected()} failed as injected, {self.refused.total()} refused, "
            f"{len(self.bad)} wrong or unclear"
        ]
        for kind in KINDS:
            failed = len(self.failed[kind])
            lines.append(
                f"  {kind}: {self.count_injected(kind=kind)} injected, in {failed} of "
                f"{len(self.seen[kind] | self.failed[kind])} places"
            )
        for sort, count in sorted(self.calls.items()):
            injected = self.count_injected(sort)
            lines.append(f"  {sort}: {count} calls, {self.right[sort]} right, {injected} injected")
            lines += [
                f"    refused {count}: {told}"
                for (of_sort, told), count in self.refused.items()
                if of_sort == sort
            ]
        if self.lost:
            lines.append(f"  never came out: {self.lost.total()}")
        return "\n".join([*lines, *self.problems()[:_MOST_SHOWN]])


class Worker:
    """One thread's: its random numbers, what it has seen, and where its next call fails.

    Attributes:
        number: of the thread.
        random: decides what is called.
        tally: what came of it.
    """

    def __init__(self, number: int, seed: int, calls: int, share: float, total: Tally) -> None:
        """Before its first call.

        Args:
            number, seed: of its random numbers.
            calls: that it makes.
            share: of them that have a fault.
            total: of all threads: what is bad, and where calls failed.
        """
        self.number, self.tally, self._total = number, Tally(), total
        self.random = random.Random(f"{seed}, {number}")
        self._calls, self._share, self._counter = calls, share, Counter(number, total.failed)

    @property
    def done(self) -> bool:
        """Whether it has made its calls, or anything is bad."""
        return self.tally.calls.total() >= self._calls or bool(self._total.bad)

    def chance(self, share: float) -> bool:
        """True in such a share of cases."""
        return self.random.random() < share

    def call(self, sort, function, check, refusals=()) -> str:
        """One call, perhaps with a fault in it.

        Args:
            sort: of calls, for the tally.
            function: makes it.
            check: raises AssertionError for an output that isn't right.
            refusals: patterns of what it may be refused with.

        Returns:
            "right", "failed" as was injected, "interrupted" likewise, "refused", or "bad".
        """
        self.tally.calls[sort] += 1
        fault = self._counter.fault(sort) if self.chance(self._share) else None
        try:
            with fault or contextlib.nullcontext():
                out = function()
        except BaseException as problem:
            told = self._came_out(sort, fault, problem, refusals)
        else:
            told = self._checked(sort, fault, out, check)
        if fault is not None:
            self._counter.go_on(sort, fault)
            self.tally.seen[fault.kind] |= fault.seen
        return told

    def _checked(self, sort, fault, out, check) -> str:
        if fault is not None and fault.failed:
            self.tally.lost[fault.failed] += 1
        try:
            check(out)
        except AssertionError as problem:
            return self.bad(sort, problem, fault)
        self.tally.right[sort] += 1
        return "right"

    def _came_out(self, sort, fault, problem, refusals) -> str:
        if fault is not None and fault.raised(problem):
            self.tally.injected[sort, fault.kind] += 1
            return "interrupted" if fault.kind == "line" else "failed"
        for pattern in refusals:
            if isinstance(problem, InputError) and re.search(pattern, str(problem)):
                self.tally.refused[sort, pattern] += 1
                return "refused"
        return self.bad(sort, problem, fault)

    def bad(self, sort, problem, fault=None) -> str:
        """Keep what must not be."""
        told = "".join(traceback.format_exception(problem))
        failed = f", after {fault.kind} at {fault.failed}" if fault and fault.failed else ""
        self._total.bad.append(f"{sort}, thread {self.number}{failed}:\n{told}")
        return "bad"


def run(parts, *, calls, threads=8, seed=0, share=0.5, device="cpu") -> Tally:
    """Let threads call what the parts have to offer.

    Args:
        parts: functions of a worker that make a few calls, each with a weight.
        calls: of all threads together.
        threads, seed: how many, and what decides what they do.
        share: of calls that have a fault.
        device: on a GPU each thread has a stream of its own.
    """
    total, started = Tally(), time.perf_counter()
    each = -(-calls // threads)
    workers = [Worker(i, seed, each, share, total) for i in range(threads)]
    start, on_gpu = threading.Barrier(threads), device != "cpu"
    functions, weights = zip(*parts, strict=True)
    watched = map(registered, ("reference", "triton") if on_gpu else ("reference",))
    if on_gpu:
        torch.cuda.synchronize()

    def work(worker):
        stream = torch.cuda.stream(torch.cuda.Stream(device)) if on_gpu else None
        start.wait()
        try:
            with stream or contextlib.nullcontext():
                while not worker.done:
                    worker.random.choices(functions, weights)[0](worker)
        except BaseException as problem:
            worker.bad("a thread", problem)

    running = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with launches_watched(*watched):
            for thread in running:
                thread.start()
            _join(running, workers)
    finally:
        sys.setswitchinterval(before)
    for worker in workers:
        total.add(worker.tally)
    total.seconds = time.perf_counter() - started
    return total


def _join(running, workers) -> None:
    made, since = -1, time.monotonic()
    while alive := [thread for thread in running if thread.is_alive()]:
        alive[0].join(1.0)
        now = sum(worker.tally.calls.total() for worker in workers)
        if now != made:
            made, since = now, time.monotonic()
        elif time.monotonic() - since > _HANGS_S:
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError(f"{made} calls, and none in {_HANGS_S:.0f} s: threads hang")


@contextlib.contextmanager
def everything(seed=0, device="cpu"):
    """All parts; when it is left, after the threads have ended, nothing of theirs may be left.

    Args:
        seed: of what is called.
        device: where.
    """
    from stress_attention import Sessions, Sites, deciding_guard
    from stress_transformers import Transformers

    with deciding_guard():
        made = [*Sites.on(device, seed), Sessions(seed, device), Transformers(seed, device)]
        yield list(itertools.chain.from_iterable(part.offers() for part in made))
        gc.collect()
        for part in made:
            part.close()


def main() -> int:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--calls", type=int, default=10_000)
    options.add_argument("--threads", type=int, default=8)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--device", default="cpu")
    given = vars(options.parse_args())
    torch.set_num_threads(1)
    with everything(given["seed"], given["device"]) as parts:
        total = run(parts, **given)
    print(total.report())
    return 1 if total.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
