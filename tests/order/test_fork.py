"""A forked child plans and simulates as its parent did: nothing waits for a thread that is gone."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

FORK = """
import os, sys, threading, time
import numpy as np
import wavealign
import wavealign.order.graphs as graphs
from threadpoolctl import threadpool_info
from wavealign.order.blas import single_threaded_blas

mask = wavealign.BlockMask.from_dense(np.random.default_rng(0).random((2, 40, 40)) < 0.3)
policies = ("original", "resync", "svd+nnz", "spectral+nnz", "kmeans", "rcm")


def reads():
    return [wavealign.simulate(mask, policy=p, device="h200").hbm_read_bytes for p in policies]


def blas_threads():
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


before, threads = reads(), blas_threads()
if sys.argv[1] == "inside":  # another thread computes an order when the process forks
    entered, leave = threading.Event(), threading.Event()

    def compute():
        with single_threaded_blas, graphs._metis_lock.lock:
            entered.set()
            leave.wait()

    threading.Thread(target=compute, daemon=True).start()
    entered.wait()
child = os.fork()
if child == 0:
    same = graphs._metis_lock.lock.acquire(timeout=10)
    same = same and reads() == before and blas_threads() == threads
    os._exit(0 if same else 3)
end = time.monotonic() + 60
while time.monotonic() < end:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.05)
os.kill(child, 9)
sys.exit("the child hangs")
"""


@pytest.mark.parametrize("when", ["idle", "inside"])
def test_a_forked_child_gets_the_same_answers(when):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, when],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
