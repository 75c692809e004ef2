"""Attention with WaveAlign underneath: plan, decide, run, return the same attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names

if TYPE_CHECKING:
    from wavealign.attention.call import attend
    from wavealign.attention.plans import Plan, plan
    from wavealign.attention.stateful import Attention, Reuse

_HOMES = {
    "wavealign.attention.stateful": ("Attention", "Reuse"),
    "wavealign.attention.plans": ("Plan", "plan"),
    "wavealign.attention.call": ("attend",),
}

__all__ = ["Attention", "Plan", "Reuse", "attend", "plan"]

__getattr__ = lazy_names(__name__, _HOMES)
