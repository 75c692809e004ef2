"""Simulation proposes: which policies of a sweep are worth measuring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from wavealign.runs.launch import BASELINE, OBJECTIVES, Launch
from wavealign.runs.trial import TrialRecord


@dataclass(frozen=True)
class Card:
    """The GPU that decides.

    Attributes:
        name: as the driver says it.
        device: name of its profile, or `name` where there is none.
    """

    name: str
    device: str


def finalists(
    records: Iterable[TrialRecord], objective: str, count: int, device: str
) -> list[Launch]:
    """The specs of the best policies of each mask, each mask's `original` before them.

    A policy counts with its best result over the waves, L2 sizes, models and seeds in which it
    was simulated, and stands once.

    Args:
        records: of the sweep.
        objective: of `OBJECTIVES`.
        count: policies a mask, without `original`.
        device: whose simulated trials are ranked.

    Returns:
        Simulated specs; masks, heads, kernels, regimes and head sizes in the order in which they
        come.
    """
    field = OBJECTIVES[objective]
    groups: dict[Launch, dict[str, tuple[float, Launch]]] = {}
    for record in records:
        spec, result = record.spec, record.result
        if spec.source != "simulated" or spec.device != device or result is None:
            continue
        if (value := getattr(result, field)) is None:
            continue
        best = groups.setdefault(launch_on_card(spec), {})
        if spec.policy not in best or value < best[spec.policy][0]:
            best[spec.policy] = (value, spec)
    chosen = []
    for best in groups.values():
        ranked = sorted(best.values(), key=lambda pair: (pair[0], pair[1].policy))
        chosen += [spec for _, spec in ranked if spec.policy == BASELINE]
        chosen += [spec for _, spec in ranked if spec.policy != BASELINE][:count]
    return chosen


def measured_spec(spec: Launch, card: Card, wave: int, seed: int) -> Launch:
    """What a finalist's spec becomes on the card: its wave, its L2, no model, one seed for all.

    Args:
        spec: of the simulated trial.
        card: the GPU.
        wave: the card's own.
        seed: of every random choice.
    """
    return dataclasses.replace(
        spec,
        source="measured", device=card.device, wave=wave, l2_bytes=None, model=None, seed=seed,
    )  # fmt: skip


def launch_on_card(spec: Launch) -> Launch:
    """What launches are told apart by on the card, which has its own wave and L2."""
    return dataclasses.replace(spec.baseline, wave=0, l2_bytes=None, model=None, seed=0)


def launches(specs: Iterable[Launch]) -> list[tuple[Launch, ...]]:
    """Measured specs by what is timed together, in turns: one launch, one seed, one regime."""
    groups: dict[Launch, list[Launch]] = {}
    for spec in specs:
        groups.setdefault(spec.baseline, []).append(spec)
    return [tuple(group) for group in groups.values()]
