"""How a mask comes from Q and K: the methods of sparse attention that people run on video."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wavealign.methods.registry import METHODS, Method, find_method

if TYPE_CHECKING:
    from wavealign.methods.make import head_mask, head_masks, make_mask
    from wavealign.methods.sources import FileSource, QKSource, TensorSource

_HOMES = {
    "FileSource": "wavealign.methods.sources",
    "QKSource": "wavealign.methods.sources",
    "TensorSource": "wavealign.methods.sources",
    "head_mask": "wavealign.methods.make",
    "head_masks": "wavealign.methods.make",
    "make_mask": "wavealign.methods.make",
}

__all__ = [
    "METHODS",
    "FileSource",
    "Method",
    "QKSource",
    "TensorSource",
    "find_method",
    "head_mask",
    "head_masks",
    "make_mask",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wavealign.methods' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
