"""Lanes: what one thread on one CUDA stream has to itself, so that launches never meet in it."""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

import torch

from wavealign._devices import on_device

_MOST_STREAMS = 16  # of a thread that are remembered; the oldest goes

K = TypeVar("K")
V = TypeVar("V")


class Lane(dict[K, V]):
    """A dictionary of one thread and stream; unlike others it may be referred to weakly."""


class Lanes(Generic[K, V]):
    """A dictionary for each thread and CUDA stream, which goes when its thread ends.

    A copy, pickled or not, is empty.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self._all: weakref.WeakValueDictionary[object, Lane[K, V]] = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[type[Lanes[K, V]], tuple[()]]:
        return Lanes, ()

    def here(self, device: torch.device) -> Lane[K, V]:
        """The dictionary of this thread and of its current stream on a device."""
        own: dict[str, Lane[K, V]] = self._own.__dict__
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = f"{device}, stream {stream}"
        if key not in own:
            make_room(own, _MOST_STREAMS)
            self._all[threading.get_ident(), key] = own[key] = Lane()
        return own[key]

    def values(self) -> list[V]:
        """What all threads that haven't ended have, on all streams."""
        lanes = [reference() for reference in self._all.valuerefs()]
        return [value for lane in lanes if lane is not None for value in list(lane.values())]


def make_room(known: dict[K, V], most: int) -> None:
    """Let the oldest go where so many are remembered already, before another one is made."""
    if len(known) >= most:
        known.pop(next(iter(known)))


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured in a CUDA graph."""
    if device.type != "cuda":
        return False
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()
