"""Policy search: trials, spaces, the store that keeps them, and what runs them."""

from wavealign.runs.folder import read_manifest
from wavealign.runs.launch import Launch
from wavealign.runs.trial import TrialRecord
from wavealign.sweep.store import read_trials

__all__ = ["Launch", "TrialRecord", "read_manifest", "read_trials"]
