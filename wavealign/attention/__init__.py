"""Attention with WaveAlign underneath: plan, decide, run, return the same attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names

if TYPE_CHECKING:
    from wavealign.attention.call import attend
    from wavealign.attention.plans import Plan, plan
    from wavealign.attention.stateful import Attention, Reuse

_HOMES = {
    "Attention": "wavealign.attention.stateful",
    "Plan": "wavealign.attention.plans",
    "Reuse": "wavealign.attention.stateful",
    "attend": "wavealign.attention.call",
    "plan": "wavealign.attention.plans",
}

__all__ = ["Attention", "Plan", "Reuse", "attend", "plan"]

__getattr__ = lazy_names(__name__, _HOMES)
