"""A schedule on a backend: move rows into launch order, run, move the output back."""

from __future__ import annotations

import dataclasses

import torch

from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Problem
from wavealign.gpu.inputs import Inputs, on_device
from wavealign.gpu.lists import as_executed, kernel_lists
from wavealign.gpu.move import gather_blocks, scatter_blocks, scatter_lse
from wavealign.order.schedule import Schedule


class Launch:
    """One schedule, ready to run on a GPU; buffers are allocated once.

    Attributes:
        executed: the schedule that runs: the given one, but for what the kernel insists on
            (`as_executed`).
        moves_rows: whether `gather` and `scatter` do anything: not for a backend that takes the
            row order as a table.
        buffers: what a launch writes, where that is fixed.
    """

    def __init__(
        self, backend: Backend, problem: Problem, schedule: Schedule, inputs: Inputs
    ) -> None:
        mask, q = problem.mask, inputs.q
        self.executed = as_executed(schedule, mask, backend.capabilities)
        self.moves_rows = backend.capabilities.rows == "gathered"
        self._inputs = inputs
        self._block = mask.block_q
        self._order = on_device(schedule.row_order, q.device)
        self._q = q
        if self.moves_rows:
            B, _, H, D = q.shape
            self._q = torch.zeros(B, mask.M * mask.block_q, H, D, dtype=q.dtype, device=q.device)
            self._out = torch.empty_like(q)
            self._lse = torch.empty(B, H, mask.tokens_q, device=q.device)
            self.gather()
        lists = kernel_lists(self.executed, backend.capabilities)
        self._kernel: BoundKernel = backend.bind(
            problem, lists, dataclasses.replace(inputs, q=self._q)
        )
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """What a launch writes, where that is fixed."""
        return self._kernel.buffers

    def gather(self) -> None:
        """Bring Q's rows into launch order."""
        if self.moves_rows:
            gather_blocks(self._inputs.q, self._order, self._block, self._q)

    def run(self) -> None:
        """Start the kernel alone."""
        self._result = self._kernel.launch()

    def scatter(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The last run's output ``[B, tokens_q, H, D]`` and LSE ``[B, H, tokens_q]``, in order."""
        if self._result is None:
            raise RuntimeError("run comes before scatter")
        out, lse = self._result
        if not self.moves_rows:
            return out, lse
        scatter_blocks(out.contiguous(), self._order, self._block, self._out)
        scatter_lse(lse, self._order, self._block, self._lse)
        return self._out, self._lse

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All three: attention of the inputs."""
        self.gather()
        self.run()
        return self.scatter()
