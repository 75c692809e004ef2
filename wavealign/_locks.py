"""A lock for what the whole process has once."""

from __future__ import annotations

import os
import threading


class ForkSafeLock:
    """Has a reentrant lock; a forked child has a new one, as whoever held it isn't there.

    For module level: it is remembered for good.

    Attributes:
        lock: to be entered, ``with its.lock:``. Methods of ours around it would have lines that
            Ctrl-C comes between, and then it would be held for good.
    """

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()
