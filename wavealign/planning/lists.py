"""A schedule as kernels read it: lists in one layout, wherever the schedule was made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wavealign.errors import InputError
from wavealign.masks.block_mask import HeadMask, row_pointers
from wavealign.order.schedule import Schedule
from wavealign.planning.layout import ListLayout


@dataclass(frozen=True, eq=False)
class DeviceSchedule:
    """A schedule as a kernel reads it.

    Attributes:
        table: int32 ``[H, M]``, slot → query block.
        counts: int32 ``[H, M]``, K/V blocks of each row: by query block, or by slot where the
            layout gathers rows.
        starts: int64 ``[H * M]``, where each row's list begins in `indices`.
        indices: int32 ``[H, M, width]``; what lies behind a row's list has no meaning.
        columns: N.
        layout: the convention of `counts` and `indices`.
        policies: one name a head.
    """

    table: Tensor
    counts: Tensor
    starts: Tensor
    indices: Tensor
    columns: int
    layout: ListLayout
    policies: tuple[str, ...]

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        layout: ListLayout | None = None,
        device: str | torch.device = "cpu",
    ) -> DeviceSchedule:
        """A host's schedule, in lists as wide as its longest row.

        Args:
            schedule: any; where the layout wants the last K/V block first, it needn't have it so.
            layout: by default that of a kernel with a row table.
            device: where the lists are to lie.
        """
        layout = layout or ListLayout()
        H, M, N = schedule.shape
        executed = layout.executed(schedule)
        indptr, indices = executed.indptr, executed.indices
        if layout.gathers:
            rows = (schedule.row_order + M * np.arange(H, dtype=np.int64)[:, None]).ravel()
            taken = HeadMask(indptr, indices, H * M, N).take_rows(rows)
            indptr, indices = taken.indptr, taken.indices
        counts = np.diff(indptr).astype(np.int32)
        width = max(1, int(counts.max()))
        lists = np.zeros((H * M, width), dtype=np.int32)
        held = np.arange(width) < counts[:, None]
        if layout.walks == "backwards":
            lists[::-1][held[::-1]] = indices[::-1]  # the last row first, and each from its end
        else:
            lists[held] = indices
        return cls(
            torch.tensor(schedule.row_order, dtype=torch.int32, device=device),
            torch.from_numpy(counts.reshape(H, M)).to(device),
            width * torch.arange(H * M, dtype=torch.int64, device=device),
            torch.from_numpy(lists.reshape(H, M, width)).to(device), N, layout,
            (schedule.policy,) * H,
        )  # fmt: skip

    @classmethod
    def full(
        cls, shape: tuple[int, int, int], layout: ListLayout, device: str | torch.device
    ) -> DeviceSchedule:
        """Every K/V block of every row, as they come: all rows read one list.

        Args:
            shape: ``(H, M, N)``.
            layout: how the kernel reads lists.
            device: of the lists.
        """
        H, M, N = shape
        every = torch.arange(N, dtype=torch.int32, device=device)
        every = every.roll(1) if layout.ragged_kv_first else every
        every = every.flip(0) if layout.walks == "backwards" else every
        table = torch.arange(M, dtype=torch.int32, device=device).repeat(H, 1)
        starts = torch.zeros(H * M, dtype=torch.int64, device=device)
        counts, lists = torch.full_like(table, N), every.expand(H, M, N)
        return cls(table, counts, starts, lists, N, layout, ("original",) * H)

    def heads(self, first: int, count: int) -> DeviceSchedule:
        """The schedule of only these heads, as a view."""
        own = slice(first, first + count)
        return dataclasses.replace(
            self,
            table=self.table[own],
            counts=self.counts[own],
            # Lists lie evenly: those of any heads begin where those of the first ones do.
            starts=self.starts[: count * self.table.shape[1]],
            indices=self.indices[own],
            policies=self.policies[own],
        )

    def to_schedule(self) -> Schedule:
        """The same schedule on the host; this waits for the device.

        Raises:
            InputError: another layout than the default one, or lists longer than `width`.
        """
        if self.layout != ListLayout():
            raise InputError("only lists by query block, walked forwards, make a Schedule.")
        H, M, width = self.indices.shape
        counts = self.counts.cpu().numpy().reshape(-1)
        if counts.size and counts.max() > width:
            raise InputError(f"a row keeps {counts.max()} K/V blocks, the lists hold {width}.")
        padded = self.indices.cpu().numpy().reshape(H * M, width)
        indices = padded[np.arange(width) < counts[:, None]]
        names = dict.fromkeys(self.policies)
        name = next(iter(names)) if len(names) == 1 else "mixed"
        pointers = row_pointers(counts)
        return Schedule(self.table.cpu().numpy(), pointers, indices, (H, M, self.columns), name)
