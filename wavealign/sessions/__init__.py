"""Sparse methods over the steps of a denoising run: search, plan once, reuse.

Above `wavealign.attention`, because a session plans schedules and runs kernels. What a method
decides at a step is its rule, in `wavealign.sessions.gsrs` and its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names

if TYPE_CHECKING:
    from wavealign.sessions.named import (
        SESSIONS,
        AdaSpaSession,
        GsrsSession,
        LiteAttentionSession,
        TopKSession,
        make_session,
    )
    from wavealign.sessions.session import Session

__all__ = [
    "SESSIONS", "AdaSpaSession", "GsrsSession", "LiteAttentionSession", "Session", "TopKSession",
    "make_session",
]  # fmt: skip

_HOMES = {
    "wavealign.sessions.named": (
        "SESSIONS", "AdaSpaSession", "GsrsSession", "LiteAttentionSession", "TopKSession",
        "make_session",
    ),
    "wavealign.sessions.session": ("Session",),
}  # fmt: skip
__getattr__ = lazy_names(__name__, _HOMES)
