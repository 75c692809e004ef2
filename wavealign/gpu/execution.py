"""A schedule over Q, K and V: rows into launch order, the kernel, its output back."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from wavealign._devices import on_device
from wavealign.errors import InputError
from wavealign.gpu.backend import Backend
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.move import gather_blocks, scatter_blocks, scatter_lse
from wavealign.gpu.sizes import Sizes
from wavealign.order.schedule import Schedule
from wavealign.planning.lists import DeviceSchedule


class Execution:
    """One schedule on one backend, ready to run; buffers are allocated once, Q is gathered.

    Attributes:
        backend, sizes, lists, inputs: what runs.
        moves_rows: whether `gather` and `scatter` do anything: not for a backend that takes the
            row order as a table.
        buffers: what a run writes, where that is fixed.
    """

    def __init__(
        self, backend: Backend, sizes: Sizes, lists: DeviceSchedule, inputs: Inputs
    ) -> None:
        """Bind.

        Args:
            backend: that hasn't refused these sizes.
            sizes: of the launch.
            lists: heads of all sequences in turn, where each has its own mask.
            inputs: on the device of the lists.

        Raises:
            InputError: lists that were laid out for another kernel.
        """
        wanted = backend.capabilities.layout_for(sizes)
        if lists.layout != wanted:
            raise InputError(f"lists for {lists.layout}; backend '{backend.name}' reads {wanted}.")
        self.backend, self.sizes, self.lists, self.inputs = backend, sizes, lists, inputs
        self.moves_rows = wanted.gathers
        with on_device(inputs.q):
            arranged = inputs.arranged(backend.takes_strides() and not self.moves_rows)
            if sizes.masks == 1:
                self._parts = [_Part(backend, sizes, lists, arranged)]
            else:
                one, H = sizes.one_sequence(), sizes.H
                self._parts = [
                    _Part(backend, one, lists.heads(b * H, H), arranged.sequence(b))
                    for b in range(sizes.masks)
                ]
        self.buffers = tuple(buffer for part in self._parts for buffer in part.kernel.buffers)

    @classmethod
    def of(cls, backend: Backend, sizes: Sizes, schedule: Schedule, inputs: Inputs) -> Execution:
        """Of a schedule that lies on the host.

        Args:
            backend, sizes, inputs: of the launch.
            schedule: of all its heads.
        """
        layout = backend.capabilities.layout_for(sizes)
        return cls(backend, sizes, DeviceSchedule.of(schedule, layout, inputs.q.device), inputs)

    def over(self, inputs: Inputs) -> Execution:
        """The same schedule over other data."""
        return Execution(self.backend, self.sizes, self.lists, inputs)

    def gather(self) -> None:
        """Bring Q's rows into launch order again."""
        for part in self._parts:
            part.gather()

    def run(self) -> None:
        """Start the kernel alone."""
        with on_device(self.inputs.q):
            for part in self._parts:
                part.result = part.kernel.launch()

    def scatter(self) -> tuple[Tensor, Tensor]:
        """The last run's output ``[B, tokens_q, H, D]`` and LSE ``[B, H, tokens_q]``, in order."""
        outs, lses = zip(*(part.scatter() for part in self._parts), strict=True)
        return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))

    def attend(self) -> tuple[Tensor, Tensor]:
        """Run and scatter: attention of the inputs."""
        self.run()
        return self.scatter()


class _Part:
    """What runs under one mask: all sequences, or one of them."""

    def __init__(
        self, backend: Backend, sizes: Sizes, lists: DeviceSchedule, inputs: Inputs
    ) -> None:
        self._source, self._order, self._block = inputs.q, lists.table, sizes.block_q
        self._moves = lists.layout.gathers
        if self._moves:
            B, tokens, H, D = inputs.q.shape
            self._moved = inputs.q.new_empty(B, sizes.M * sizes.block_q, H, D)
            self._out = torch.empty_like(inputs.q)
            self._lse = torch.empty(B, H, tokens, dtype=torch.float32, device=inputs.q.device)
            self.gather()
            inputs = dataclasses.replace(inputs, q=self._moved)
        self.kernel = backend.bind(sizes, lists, inputs)
        self.result: tuple[Tensor, Tensor] | None = None

    def gather(self) -> None:
        if self._moves:
            gather_blocks(self._source, self._order, self._block, self._moved)

    def scatter(self) -> tuple[Tensor, Tensor]:
        if self.result is None:
            raise RuntimeError("run comes before scatter")
        out, lse = self.result
        if not self._moves:
            return out, lse
        scatter_blocks(out.contiguous(), self._order, self._block, self._out)
        scatter_lse(lse, self._order, self._block, self._lse)
        return self._out, self._lse


def resident(schedule: Schedule, blocks: int) -> Schedule:
    """The compute limit's schedule: the same rows and lengths, K/V folded into `blocks` blocks.

    It repeats blocks, so its output is no attention; only its time is of interest. With few
    enough blocks every read but the first few hits L2.
    """
    folded = (schedule.indices % min(blocks, max(1, schedule.shape[2] - 1))).astype(np.int32)
    return dataclasses.replace(schedule, indices=folded, policy=f"{schedule.policy} in L2")
