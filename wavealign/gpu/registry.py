"""The backends, by name."""

from __future__ import annotations

from wavealign.errors import MissingCapabilityError, unknown_name
from wavealign.gpu.backend import Backend

BACKEND_NAMES = ("fa4", "triton", "flex", "cudnn", "cudnn64", "flashinfer")


def backends() -> list[Backend]:
    """One of each, whether or not this installation can run it.

    Raises:
        MissingCapabilityError: torch isn't installed.
    """
    from wavealign._extras import require

    require("torch", "gpu", "a backend")
    from wavealign.gpu.cudnn import CudnnBlockSparse, CudnnBlockSparse64
    from wavealign.gpu.fa4 import FlashAttention4
    from wavealign.gpu.flashinfer import FlashInfer
    from wavealign.gpu.flex import FlexAttention
    from wavealign.gpu.row_table import TritonRows

    return [
        FlashAttention4(),
        TritonRows(),
        FlexAttention(),
        CudnnBlockSparse(),
        CudnnBlockSparse64(),
        FlashInfer(),
    ]


def find_backend(name: str) -> Backend:
    """The backend of this name; never another one in its place.

    Raises:
        InputError: no such name.
        MissingCapabilityError: it isn't installed, or it can't be given an order.
    """
    if name not in BACKEND_NAMES:
        raise unknown_name("backend", name, BACKEND_NAMES)
    backend = next(b for b in backends() if b.name == name)
    if reason := backend.missing():
        raise MissingCapabilityError(f"backend '{name}': {reason}.")
    return backend
