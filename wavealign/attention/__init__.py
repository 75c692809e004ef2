"""Attention with WaveAlign underneath: plan, decide, run, return the same attention."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wavealign.attention' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
