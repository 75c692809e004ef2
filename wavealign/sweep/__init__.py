"""Policy search: trials, spaces, the store that keeps them, and what runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names

if TYPE_CHECKING:
    from wavealign.runs.folder import read_manifest
    from wavealign.runs.launch import Launch
    from wavealign.runs.trial import TrialRecord
    from wavealign.sweep.store import read_trials

_HOMES = {
    "wavealign.runs.launch": ("Launch",), "wavealign.runs.trial": ("TrialRecord",),
    "wavealign.runs.folder": ("read_manifest",), "wavealign.sweep.store": ("read_trials",),
}  # fmt: skip

__all__ = ["Launch", "TrialRecord", "read_manifest", "read_trials"]

SEARCHES = ("grid", "random", "tpe")
EXECUTORS = ("local", "ray", "dask")

__getattr__ = lazy_names(__name__, _HOMES)
