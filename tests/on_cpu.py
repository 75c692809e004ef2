"""Measuring without a GPU: a backend on the CPU, a clock that ticks, the readings of a card."""

from __future__ import annotations

import contextlib

from wavealign.gpu.rig import Rig
from wavealign.gpu.telemetry import DeviceState, Summary

TICK_S = 0.125
"""A power of two: sums of it are exact."""


class TickingRig(Rig):
    """The CPU by a clock that goes on by a tick whenever it is read: a launch takes 125 ms.

    Attributes:
        turns: of the launches that were timed apart from each other.
    """

    def __init__(self):
        super().__init__()
        self.now, self.turns = 0.0, []

    def seconds(self):
        self.now += TICK_S
        return self.now

    def pauser(self):
        return self.turns.append


class Readings:
    """A card that takes 100 J in each interval that is sampled."""

    def __init__(self, name="NVIDIA H200", energy_j=100.0, throttle=("a", "b")):
        self.name, self.summary_ = name, Summary(1.5, 650.0, 70.0, throttle, energy_j)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self):
        return DeviceState(self.name, "580.1", 1.9, 600.0, 700.0, 60.0, (), 1.0)

    @contextlib.contextmanager
    def sample(self):
        yield self

    def summary(self):
        return self.summary_
