"""The backends, by name."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wavealign._extras import require
from wavealign.errors import MissingCapabilityError, unknown_name

if TYPE_CHECKING:
    from wavealign.gpu.backend import Backend


@dataclass(frozen=True)
class Refused:
    """A kernel that is known, and never launched.

    Attributes:
        name: as others call it.
        title: for people.
        reason: why it isn't.
    """

    name: str
    title: str
    reason: str

    def missing(self) -> str:
        """See `Backend.missing`."""
        return f"refused: {self.reason}"


_KNOWN: dict[str, str | Refused] = {
    "fa4": "wavealign.gpu.fa4:FlashAttention4",
    "triton": "wavealign.gpu.row_table:TritonRows",
    "flex": "wavealign.gpu.flex:FlexAttention",
    "cudnn": "wavealign.gpu.cudnn:CudnnBlockSparse",
    "cudnn64": "wavealign.gpu.cudnn:CudnnBlockSparse64",
    "reference": "wavealign.gpu.reference:Reference",
    "flashinfer": Refused(
        "flashinfer",
        "FlashInfer block-sparse attention",
        "its plan sorts rows by K/V length and deals them to a fixed grid, so the order of the "
        "rows in Q and in the mask decides nothing, and its public interface takes no order "
        "(flashinfer 0.7, PrefillSM90Plan)",
    ),
}
"""Name → class, or why there is none."""

BACKEND_NAMES = _KNOWN.keys()

PREFERRED = ("triton", "fa4")
"""What ``"auto"`` tries, in this order."""


def backends() -> list[Backend | Refused]:
    """One of each, whether or not this installation can run it.

    Raises:
        MissingCapabilityError: torch isn't installed.
    """
    return [known if isinstance(known, Refused) else _backend(known) for known in _KNOWN.values()]


def registered(name: str) -> Backend:
    """The backend of this name, whether or not this installation can run it.

    Raises:
        InputError: no such name.
        MissingCapabilityError: it can't be given an order, or torch isn't installed.
    """
    if name not in _KNOWN:
        raise unknown_name("backend", name, BACKEND_NAMES)
    known = _KNOWN[name]
    if isinstance(known, Refused):
        raise MissingCapabilityError(f"backend '{name}': {known.missing()}.")
    return _backend(known)


def find_backend(name: str) -> Backend:
    """The backend of this name; never another one in its place.

    Raises:
        InputError: no such name.
        MissingCapabilityError: it isn't installed, or it can't be given an order.
    """
    backend = registered(name)
    if reason := backend.missing():
        raise MissingCapabilityError(f"backend '{name}': {reason}.")
    return backend


@functools.cache
def _backend(home: str) -> Backend:
    """One a process: what a backend has compiled serves every launch."""
    require("torch", "gpu", "a backend")
    module, _, name = home.partition(":")
    made: Backend = getattr(importlib.import_module(module), name)()
    return made
