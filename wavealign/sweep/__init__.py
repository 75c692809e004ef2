"""Policy search: trials, spaces, the store that keeps them, and what runs them."""

from wavealign.sweep.records import TrialRecord, TrialSpec
from wavealign.sweep.store import read_manifest, read_trials

__all__ = ["TrialRecord", "TrialSpec", "read_manifest", "read_trials"]
