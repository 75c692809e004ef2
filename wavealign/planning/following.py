"""Lists that follow a mask: made anew where it isn't the one that they were made from.

On a GPU the device itself compares, and plans where it must: the host waits for neither.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wavealign._devices import on_device
from wavealign.planning.conditional import NOBODY, Conditional, missing

_MOST_POLICIES = 4  # that are remembered; the oldest goes

Policies = tuple[str, ...]


@dataclass(eq=False)
class _Work:
    owner: int
    conditional: Conditional | None = None


class Following:
    """What a planner's lists were made from, known where the lists are."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        """Nothing was made yet.

        Args:
            shape: of masks, ``(H, M, N)``.
            device: of masks and lists.
        """
        with torch.inference_mode(False):  # written in any mode later
            self._state = torch.tensor([NOBODY, 0], dtype=torch.int32, device=device)
        self._shape, self._owners = shape, 0
        self._source: Tensor | None = None
        self._works: dict[Policies, _Work] = {}
        self._tells = device.type == "cpu" or missing(device) is None

    def begin(self) -> None:
        """Lists that are written from here on are no known mask's."""
        self._state[0].fill_(NOBODY)

    def update(self, kept: Tensor, policies: Policies, write: Callable[[Tensor], object]) -> None:
        """Write lists unless they are this mask's already, by these policies.

        Policies that come for the second time on a GPU are captured there, which takes the host
        some milliseconds once.

        Args:
            kept: bool ``[H, M, N]``, contiguous.
            policies: one a head.
            write: makes the lists from such a mask, on the current stream.
        """
        work = self._works.get(policies)
        if work is not None and self._tells:
            if not kept.is_cuda:
                assert self._source is not None
                if self._state[0] == work.owner and torch.equal(self._source, kept):
                    return
            elif self._followed(kept, work, write):
                return
        self.begin()
        if not self._tells:
            write(kept)
            return
        if self._source is None:
            with torch.inference_mode(False):
                self._source = torch.empty(self._shape, dtype=torch.bool, device=kept.device)
        self._source.copy_(kept)
        write(self._source)
        if work is None:
            work = self._remembered(policies)
        self._state[0].fill_(work.owner)

    def _remembered(self, policies: Policies) -> _Work:
        if len(self._works) >= _MOST_POLICIES:
            self._works.pop(next(iter(self._works)))
        work = self._works[policies] = _Work(self._owners)
        self._owners += 1
        return work

    def _followed(self, kept: Tensor, work: _Work, write: Callable[[Tensor], object]) -> bool:
        """Whether the device sees to it."""
        source = self._source
        assert source is not None
        if work.conditional is None:
            try:
                work.conditional = Conditional(lambda: write(source), self._state, work.owner)
            except RuntimeError as error:  # right all the same
                warnings.warn(
                    f"planning can't be captured here ({error}); every call plans.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                self._tells = False
                return False
        from wavealign.planning._list_kernels import note_changes

        with on_device(kept):
            note_changes(kept, source, self._state)
            work.conditional.launch()
        return True
