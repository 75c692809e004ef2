"""What a run is: its launch, its result, files of rows, pairing and comparing.

Names load on first use: reading rows needs neither numpy nor scipy, comparing them does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names

if TYPE_CHECKING:
    from wavealign.runs.baseline import best_by_condition, change, mean_speedup, speedup
    from wavealign.runs.files import Loaded, Row, load_rows
    from wavealign.runs.launch import KEY_FIELDS, Launch, LaunchKeys
    from wavealign.runs.lines import ResultWriter
    from wavealign.runs.metrics import METRICS
    from wavealign.runs.pairing import Comparison, compare_rows
    from wavealign.runs.ranking import Ranking, rank
    from wavealign.runs.result import Environment, Outcome, Result, RunResult
    from wavealign.runs.trial import TrialRecord

_MODULES = {
    "baseline": ("best_by_condition", "change", "mean_speedup", "speedup"),
    "files": ("Loaded", "Row", "load_rows"),
    "launch": ("KEY_FIELDS", "Launch", "LaunchKeys"),
    "lines": ("ResultWriter",),
    "metrics": ("METRICS",),
    "pairing": ("Comparison", "compare_rows"),
    "ranking": ("Ranking", "rank"),
    "result": ("Environment", "Outcome", "Result", "RunResult"),
    "trial": ("TrialRecord",),
}

__all__ = [
    "KEY_FIELDS",
    "METRICS",
    "Comparison",
    "Environment",
    "Launch",
    "LaunchKeys",
    "Loaded",
    "Outcome",
    "Ranking",
    "Result",
    "ResultWriter",
    "Row",
    "RunResult",
    "TrialRecord",
    "best_by_condition",
    "change",
    "compare_rows",
    "load_rows",
    "mean_speedup",
    "rank",
    "speedup",
]

__getattr__ = lazy_names(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
