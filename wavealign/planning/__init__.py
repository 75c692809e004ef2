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
    "wavealign.planning.lists": ("DeviceSchedule",),
    "wavealign.planning.layout": ("ListLayout",),
    "wavealign.planning.planner": ("Planner",),
    "wavealign.planning.masks": ("dense_mask", "mask_from_lists", "mask_from_packed"),
}

__all__ = [
    "DeviceSchedule", "ListLayout", "Planner", "dense_mask", "mask_from_lists", "mask_from_packed",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _HOMES)
