"""One BLAS thread while an order is computed: results must not depend on the cores."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from threadpoolctl import threadpool_limits


class SingleThreadedBlas:
    """One BLAS thread while any thread of ours is inside.

    Results must not depend on the number of cores, and heads already run in parallel. The
    limit is the process's, so the first to enter sets it and the last to leave lifts it. Both
    happen in one thread of its own: threadpoolctl silently ignores a thread other than the one
    that set a limit last.
    """

    def __init__(self) -> None:
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._setter = ThreadPoolExecutor(1, thread_name_prefix="blas-limit")
        self._inside = 0
        self._limits: threadpool_limits | None = None

    def _begin_anew(self) -> None:
        """In a forked child: whichever thread held the lock, or set the limit, is gone."""
        limits = self._limits if self._inside else None
        self._begin()
        if limits is not None:
            limits.restore_original_limits()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._limits = self._setter.submit(threadpool_limits, limits=1).result()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._limits is not None:
                self._setter.submit(self._limits.restore_original_limits).result()


single_threaded_blas = SingleThreadedBlas()
