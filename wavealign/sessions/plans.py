"""Schedules that outlive the planner's buffers: one a layer and branch, as small as its rows."""

from __future__ import annotations

import dataclasses

import torch

from wavealign.attention.plans import Buffers, Plan, Prepared
from wavealign.planning.layout import ListLayout
from wavealign.planning.lists import DeviceSchedule

SEARCH_LOOK_FRAC = 0.01
"""Share of a plan's uses that the guard's look at a found mask may take.

More than `LOOK_FRAC`, which holds for calls that go on for long: nine steps pay for this one. What
there is to win in launches long enough is 2 to 6 % (docs/results/gsrs.md).
"""


class Planners:
    """Plans for all layers of a model with one set of buffers; what is kept is copied out."""

    def __init__(self) -> None:
        self._buffers = Buffers()

    def plan(self, keep: torch.Tensor, prepared: Prepared, uses: int, longest: int | None) -> Plan:
        """A plan with lists of its own.

        Args:
            keep: bool ``[B, H, M, N]``.
            prepared: for such masks; where it has a guard, the host waits for its numbers if the
                launch is long enough for a look.
            uses: steps that the plan serves.
            longest: K/V blocks of the longest row; None where the host doesn't know, then lists
                are N long.
        """
        planner = prepared.planner(self._buffers)
        # Made once and used so often: that is what looking has to pay for, too.
        plan = prepared.plan(keep.flatten(0, 1), planner, uses=uses, calls=uses)
        return dataclasses.replace(plan, schedule=own_copy(plan.schedule, longest))

    def lists(
        self, keep: torch.Tensor, prepared: Prepared, policies: tuple[str, ...]
    ) -> DeviceSchedule:
        """Lists of a mask for kernels with a row table, valid until the next call.

        Args:
            keep: the mask, bool ``[masks, H, M, N]``.
            prepared: backend and terms.
            policies: a head's each.
        """
        return prepared.planner(self._buffers, ListLayout())(keep.flatten(0, 1), policies)


def own_copy(schedule: DeviceSchedule, longest: int | None) -> DeviceSchedule:
    """The same schedule in buffers of its own, lists cut to the longest row."""
    H, M, width = schedule.indices.shape
    width = width if longest is None else max(1, min(width, longest))
    rows = torch.arange(H * M, dtype=torch.int64, device=schedule.starts.device)
    return dataclasses.replace(
        schedule, table=schedule.table.clone(), counts=schedule.counts.clone(), starts=rows * width,
        indices=schedule.indices[..., :width].clone(memory_format=torch.contiguous_format),
    )  # fmt: skip


def pack(keep: torch.Tensor) -> torch.Tensor:
    """Bits of a mask, as `wavealign.planning.mask_from_packed` reads them, uint8 ``[..., N / 8]``.

    A layer's candidates are kept for the whole run: eight times smaller, they may be.
    """
    bits = torch.nn.functional.pad(keep.to(torch.uint8), (0, -keep.shape[-1] % 8))
    weights = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8, device=keep.device)
    packed: torch.Tensor = (bits.reshape(*bits.shape[:-1], -1, 8) * weights).sum(
        -1, dtype=torch.uint8
    )
    return packed
