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
    "CostModel": "wavealign.guard.model",
    "Decision": "wavealign.guard.decide",
    "Guard": "wavealign.guard.decide",
    "GuardProfile": "wavealign.guard.profile",
    "HeadStatistics": "wavealign.guard.statistics",
    "Prediction": "wavealign.guard.model",
    "load_guard_profile": "wavealign.guard.profile",
    "mask_statistics": "wavealign.guard.statistics",
}

__all__ = [
    "CostModel",
    "Decision",
    "Guard",
    "GuardProfile",
    "HeadStatistics",
    "Prediction",
    "load_guard_profile",
    "mask_statistics",
]

__getattr__ = lazy_names(__name__, _HOMES)
