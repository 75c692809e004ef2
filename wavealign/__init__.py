"""WaveAlign: order the rows of block-sparse attention so that what runs together reads together.

Names load on first use; importing the package imports neither numba, scipy, torch nor
matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wavealign._version import __version__

if TYPE_CHECKING:
    from wavealign.errors import InputError, MissingCapabilityError, WaveAlignError
    from wavealign.masks import BlockMask, load_mask, mask_stats, save_mask
    from wavealign.order import Schedule, build_schedule
    from wavealign.results import RunResult
    from wavealign.sim import load_device, simulate

_HOMES = {
    "BlockMask": "wavealign.masks",
    "InputError": "wavealign.errors",
    "MissingCapabilityError": "wavealign.errors",
    "RunResult": "wavealign.results",
    "Schedule": "wavealign.order",
    "WaveAlignError": "wavealign.errors",
    "build_schedule": "wavealign.order",
    "load_device": "wavealign.sim",
    "load_mask": "wavealign.masks",
    "mask_stats": "wavealign.masks",
    "save_mask": "wavealign.masks",
    "simulate": "wavealign.sim",
}

__all__ = [
    "BlockMask",
    "InputError",
    "MissingCapabilityError",
    "RunResult",
    "Schedule",
    "WaveAlignError",
    "__version__",
    "build_schedule",
    "load_device",
    "load_mask",
    "mask_stats",
    "save_mask",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wavealign' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
