"""What a run is: its launch, its result, files of rows, pairing and comparing.

Names load on first use: what a run is needs neither numpy nor scipy, comparing runs does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavealign._lazy import lazy_names

if TYPE_CHECKING:
    from wavealign.runs.baseline import best_by_condition
    from wavealign.runs.files import Row, load_rows
    from wavealign.runs.launch import KEY_FIELDS, Launch, LaunchKeys
    from wavealign.runs.lines import ResultWriter
    from wavealign.runs.metrics import METRICS
    from wavealign.runs.pairing import compare_rows
    from wavealign.runs.ranking import rank
    from wavealign.runs.result import Result, RunResult
    from wavealign.runs.trial import TrialRecord

__all__ = [
    "KEY_FIELDS", "METRICS", "Launch", "LaunchKeys", "Result", "ResultWriter", "Row", "RunResult",
    "TrialRecord", "best_by_condition", "compare_rows", "load_rows", "rank",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    dict.fromkeys(("KEY_FIELDS", "Launch", "LaunchKeys"), "wavealign.runs.launch")
    | dict.fromkeys(("Result", "RunResult"), "wavealign.runs.result")
    | dict.fromkeys(("Row", "load_rows"), "wavealign.runs.files")
    | {
        "METRICS": "wavealign.runs.metrics",
        "ResultWriter": "wavealign.runs.lines",
        "TrialRecord": "wavealign.runs.trial",
        "best_by_condition": "wavealign.runs.baseline",
        "compare_rows": "wavealign.runs.pairing",
        "rank": "wavealign.runs.ranking",
    },
)
