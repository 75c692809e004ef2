"""Sparse methods over the steps of a denoising run: search, plan once, reuse.

Above `wavealign.attention`, because a session plans schedules and runs kernels; what a method
decides at a step lives below, in `wavealign.sessions.gsrs` and its neighbours.
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

_HOMES = {
    "SESSIONS": "wavealign.sessions.named",
    "AdaSpaSession": "wavealign.sessions.named",
    "GsrsSession": "wavealign.sessions.named",
    "LiteAttentionSession": "wavealign.sessions.named",
    "Session": "wavealign.sessions.session",
    "TopKSession": "wavealign.sessions.named",
    "make_session": "wavealign.sessions.named",
}

__all__ = [
    "SESSIONS",
    "AdaSpaSession",
    "GsrsSession",
    "LiteAttentionSession",
    "Session",
    "TopKSession",
    "make_session",
]

__getattr__ = lazy_names(__name__, _HOMES)
