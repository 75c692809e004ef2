"""Lists that follow a mask: made anew where it isn't the one that they were made from.

On a GPU the device compares, and kernels that find nothing to do end at once. The host waits for
neither, and never learns which it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOBODY = -1
_MOST_POLICIES = 64  # whose numbers are remembered


@dataclass(frozen=True, eq=False)
class Gate:
    """What kernels look at before they write: whether it is this call's turn.

    Attributes:
        source: bool ``[H, M, N]``, the mask that the lists are of.
        state: int32 ``[2]``: whose they are (`NOBODY`'s while they are written), and the last turn
            that had to write.
        turn: of this call.
        owner: of lists by this call's policies.
    """

    source: Tensor
    state: Tensor
    turn: int
    owner: int


class Following:
    """What a planner's lists were made from, known where the lists are."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        """Nothing was made yet.

        Args:
            shape: of masks, ``(H, M, N)``.
            device: of masks and lists.
        """
        self._shape, self._device, self._turn = shape, device, 0
        self._owners: dict[tuple[str, ...], int] = {}
        self._known = 0  # owners so far: a number never comes twice
        self._source: Tensor | None = None
        with torch.inference_mode(False):  # written in any mode later
            self._state = torch.tensor([NOBODY, 0], dtype=torch.int32, device=device)

    def begin(self) -> None:
        """Lists that are written from here on are no known mask's."""
        self._state[0].fill_(NOBODY)

    def gate(self, policies: tuple[str, ...]) -> Gate:
        """Of a call that follows.

        Args:
            policies: one a head.
        """
        if self._source is None:
            with torch.inference_mode(False):
                self._source = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        if policies not in self._owners:
            if len(self._owners) == _MOST_POLICIES:
                self._owners.clear()
            self._owners[policies] = self._known
            self._known += 1
        self._turn = self._turn % 2**30 + 1
        return Gate(self._source, self._state, self._turn, self._owners[policies])


def stands(gate: Gate, mask: Tensor) -> bool:
    """Whether lists on the CPU are this mask's, by the policies of this call."""
    return bool(gate.state[0] == gate.owner) and torch.equal(gate.source, mask)


def made(gate: Gate, mask: Tensor) -> None:
    """Lists on the CPU are this mask's from now on."""
    gate.source.copy_(mask)
    gate.state[0] = gate.owner
