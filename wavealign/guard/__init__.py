"""Is another order worth it? Cheap statistics, a calibrated cost model, a decision per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names

if TYPE_CHECKING:
    from wavealign.guard.decide import Decision, Guard
    from wavealign.guard.model import CostModel, Prediction
    from wavealign.guard.profile import GuardProfile, load_guard_profile
    from wavealign.guard.statistics import HeadStatistics, mask_statistics

_HOMES = {
    "wavealign.guard.model": ("CostModel", "Prediction"),
    "wavealign.guard.decide": ("Decision", "Guard"),
    "wavealign.guard.profile": ("GuardProfile", "load_guard_profile"),
    "wavealign.guard.statistics": ("HeadStatistics", "mask_statistics"),
}

__all__ = [
    "CostModel", "Decision", "Guard", "GuardProfile", "HeadStatistics", "Prediction",
    "load_guard_profile", "mask_statistics",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _HOMES)
