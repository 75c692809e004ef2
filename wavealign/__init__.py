"""WaveAlign: order the rows of block-sparse attention so that what runs together reads together.

Names load on first use; importing the package imports neither numba, scipy, torch nor
matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavealign import _moved
from wavealign._lazy import lazy_names
from wavealign._version import __version__

if TYPE_CHECKING:
    from wavealign.attention import Attention, Plan, Reuse, attend, plan
    from wavealign.errors import InputError, MissingCapabilityError, WaveAlignError
    from wavealign.guard import Guard
    from wavealign.masks import BlockMask, load_mask, mask_stats, save_mask
    from wavealign.order import Schedule, build_schedule
    from wavealign.runs.result import RunResult
    from wavealign.sim import load_device, simulate

_HOMES = {
    "wavealign.attention": ("Attention", "Plan", "Reuse", "attend", "plan"),
    "wavealign.errors": ("InputError", "MissingCapabilityError", "WaveAlignError"),
    "wavealign.guard": ("Guard",),
    "wavealign.masks": ("BlockMask", "load_mask", "mask_stats", "save_mask"),
    "wavealign.order": ("Schedule", "build_schedule"),
    "wavealign.runs.result": ("RunResult",),
    "wavealign.sim": ("load_device", "simulate"),
}

__all__ = [
    "Attention", "BlockMask", "Guard", "InputError", "MissingCapabilityError", "Plan", "Reuse",
    "RunResult", "Schedule", "WaveAlignError", "__version__", "attend", "build_schedule",
    "load_device", "load_mask", "mask_stats", "plan", "save_mask", "simulate",
]  # fmt: skip

_moved.install()
_load = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES["wavealign.attention"]:
        from wavealign._extras import require

        require("torch", "gpu", f"wavealign.{name}")
    return _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
