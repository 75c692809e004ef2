"""Q and K of video: where they come from, and how their tokens lie on the grid and in sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names
from wavealign.qk.grid import MODELS, TokenGrid, VideoModel, find_model
from wavealign.qk.orders import ORDERS, invert, token_order

if TYPE_CHECKING:
    from wavealign.qk.sources import FileSource, QKSource, TensorSource

_HOMES = {"wavealign.qk.sources": ("FileSource", "QKSource", "TensorSource")}

__all__ = [
    "MODELS", "ORDERS", "FileSource", "QKSource", "TensorSource", "TokenGrid", "VideoModel",
    "find_model", "invert", "token_order",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _HOMES)
