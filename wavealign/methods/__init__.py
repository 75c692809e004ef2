"""How a mask comes from Q and K: the methods of sparse attention that people run on video."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names
from wavealign.methods.registry import METHODS, Method, find_method

if TYPE_CHECKING:
    from wavealign.methods.make import head_mask, head_masks, make_mask

_HOMES = {"wavealign.methods.make": ("head_mask", "head_masks", "make_mask")}

__all__ = ["METHODS", "Method", "find_method", "head_mask", "head_masks", "make_mask"]

__getattr__ = lazy_names(__name__, _HOMES)
