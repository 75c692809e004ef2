"""What runs trials: this machine's cores, a Ray cluster, a Dask cluster. Thin adapters.

An engine is given jobs and hands back their records. Queues, heartbeats and workers are the
library's; a job whose worker dies `MAX_DEATHS` times is handed back as failed.
"""

from __future__ import annotations

from wavealign.errors import InputError
from wavealign.sweep.engines.job import Engine
from wavealign.sweep.trial import Inputs


def make_engine(name: str, inputs: Inputs, jobs: int, address: str | None) -> Engine:
    """The engine of this name, not yet started.

    Args:
        name: of `wavealign.sweep.EXECUTORS`.
        inputs: masks and devices, sent once to each node.
        jobs: workers, where the engine starts its own.
        address: of a running cluster; None to start one on this machine.

    Raises:
        InputError: an address for the local engine.
        MissingCapabilityError: the library isn't installed.
    """
    if name == "local":
        if address is not None:
            raise InputError("--address is that of a cluster: it goes with --executor ray or dask.")
        from wavealign.sweep.engines.local import LocalEngine

        return LocalEngine(inputs, jobs)
    if name == "ray":
        from wavealign.sweep.engines.on_ray import RayEngine

        return RayEngine(inputs, jobs, address)
    from wavealign.sweep.engines.on_dask import DaskEngine

    return DaskEngine(inputs, jobs, address)
