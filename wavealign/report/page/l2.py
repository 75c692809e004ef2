"""Which L2 a launch ran with: its device's own, or one that was asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache

from wavealign.errors import InputError
from wavealign.runs.launch import Launch
from wavealign.sim.setup import Setup


def given_l2(launch: Launch) -> int | None:
    """The L2 that was asked for; None for the device's own, and where nothing tells."""
    if _says(launch):
        return launch.l2_bytes
    own = _profile_l2(launch.device, launch.kernel, launch.model)
    return None if own in (None, launch.l2_capacity_bytes) else launch.l2_capacity_bytes


def has_own_l2(launches: Iterable[Launch]) -> Callable[[Launch], bool]:
    """Whether one of these launches had its device's own L2.

    Rows of earlier versions don't say. Theirs was the device's own where its profile has that
    size or, where no profile is at hand, where no other size was simulated.
    """
    sizes: defaultdict[tuple[object, ...], set[int | None]] = defaultdict(set)
    what = ("device", "kernel", "model")
    for launch in launches:
        if not _says(launch):
            sizes[launch.key(what)].add(launch.l2_capacity_bytes)

    def own(launch: Launch) -> bool:
        if _says(launch) or _profile_l2(launch.device, launch.kernel, launch.model) is not None:
            return given_l2(launch) is None
        return len(sizes[launch.key(what)]) == 1

    return own


def _says(launch: Launch) -> bool:
    """Whether a row says if an L2 was asked for: one that names its profile, or a card's."""
    return launch.source == "measured" or (launch.device_digest, launch.l2_bytes) != (None, None)


@cache
def _profile_l2(device: str, kernel: str, model: str | None) -> int | None:
    """What the shipped profile says of the L2 in this model; None where there is none."""
    try:
        return Setup.make(device, kernel, model=model or "full").l2_capacity_bytes
    except InputError:
        return None
