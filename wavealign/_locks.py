"""A lock for what the whole process has once."""

from __future__ import annotations

import os
import threading


class ForkSafeLock:
    """A reentrant lock; a forked child has a new one, as whoever held it isn't there.

    For module level: it is remembered for good.
    """

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
