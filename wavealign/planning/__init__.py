"""Schedules made where the mask is, in torch: for every head at once, without a host in between.

The same schedules as `wavealign.order.build_schedule`, in the arrays that kernels read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names

if TYPE_CHECKING:
    from wavealign.planning.layout import ListLayout
    from wavealign.planning.lists import DeviceSchedule
    from wavealign.planning.masks import dense_mask, mask_from_lists, mask_from_packed
    from wavealign.planning.planner import Planner

_HOMES = {
    "DeviceSchedule": "wavealign.planning.lists",
    "ListLayout": "wavealign.planning.layout",
    "Planner": "wavealign.planning.planner",
    "dense_mask": "wavealign.planning.masks",
    "mask_from_lists": "wavealign.planning.masks",
    "mask_from_packed": "wavealign.planning.masks",
}

__all__ = [
    "DeviceSchedule",
    "ListLayout",
    "Planner",
    "dense_mask",
    "mask_from_lists",
    "mask_from_packed",
]

__getattr__ = lazy_names(__name__, _HOMES)
