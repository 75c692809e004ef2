"""Attention that says how much each K/V block mattered, and what that tells of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names

if TYPE_CHECKING:
    from wavealign.gpu.importance.attend import attend_with_importance
    from wavealign.gpu.importance.call import Importance

_HOMES = {
    "wavealign.gpu.importance.call": ("Importance",),
    "wavealign.gpu.importance.attend": ("attend_with_importance",),
}

__all__ = ["Importance", "attend_with_importance"]

__getattr__ = lazy_names(__name__, _HOMES)
