"""Many simulations of one mask over the cores: policies, given schedules, heads on their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from wavealign.masks.block_mask import BlockMask
from wavealign.order.policies import build_schedule
from wavealign.order.schedule import Schedule
from wavealign.runs.result import Result
from wavealign.sim.setup import Setup
from wavealign.sim.simulate import run_schedule
from wavealign.units import format_heads


@dataclass(frozen=True)
class Task:
    """One launch to simulate.

    Attributes:
        policy: a policy's name, or a schedule that fits the whole mask.
        head: position in the mask of the only head to launch, or None to launch all of them.
    """

    policy: str | Schedule
    head: int | None = None


@dataclass(frozen=True)
class Campaign:
    """What all tasks share.

    Attributes:
        mask: the mask, of the heads that take part.
        setup: device, kernel and L2.
        head_ids: for each head of `mask`, its index in the file.
        name: the mask's name.
        seed: of every random choice.
        belady: also find the least that any replacement could read.
    """

    mask: BlockMask
    setup: Setup
    head_ids: Sequence[int]
    name: str
    seed: int = 0
    belady: bool = False

    def run(self, tasks: Sequence[Task], workers: int, on_result: Callable[[Result], None]) -> None:
        """Simulate every task and hand the rows over in the order of `tasks`.

        Rows don't depend on `workers`. When interrupted, what had finished is handed over
        before the exception goes on.

        Args:
            tasks: in order.
            workers: threads.
            on_result: called with each row.
        """
        pool = ThreadPoolExecutor(workers)
        # Few tasks: let each order its heads in parallel instead.
        per_task = max(1, workers // len(tasks)) if tasks else 1
        futures = [pool.submit(self._one, task, per_task) for task in tasks]
        given = 0
        try:
            for future in futures:
                result = future.result()
                given += 1
                on_result(result)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            for future in futures[given:]:
                if _succeeded(future):
                    on_result(future.result())
            raise
        pool.shutdown()

    def _one(self, task: Task, jobs: int) -> Result:
        mask, schedule = self.mask, task.policy
        ids = list(self.head_ids)
        if task.head is not None:
            mask = mask.select_heads([task.head])
            ids = [ids[task.head]]
            if isinstance(schedule, Schedule):
                schedule = schedule.select_heads([task.head])
        if not isinstance(schedule, Schedule):
            schedule = build_schedule(mask, schedule, self.setup.wave, self.seed, jobs)
        head = None if task.head is None else ids[0]
        return run_schedule(
            mask, schedule, self.setup,
            seed=self.seed, name=self.name, heads=format_heads(ids), head=head, belady=self.belady,
        )  # fmt: skip


def _succeeded(future: Future[Result]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
