"""Jobs that workers of the engine tests import: one that kills its worker, one that waits."""

import os
import signal
import time

from wavealign.sweep.trial import failed


def kill_the_worker(specs, mask):
    os.kill(os.getpid(), signal.SIGKILL)


def slowly(specs, mask):
    """Long enough to be killed in the middle; harmless when it isn't."""
    time.sleep(1.0)
    return [failed(spec, "slow") for spec in specs]
