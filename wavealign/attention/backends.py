"""Which kernel runs a call."""

from __future__ import annotations

import torch

from wavealign.errors import InputError, MissingCapabilityError
from wavealign.gpu.backend import Backend
from wavealign.gpu.registry import PREFERRED, registered
from wavealign.gpu.sizes import Sizes


def choose_backend(name: str, sizes: Sizes, device: str | torch.device) -> Backend:
    """The backend of this name, or the first that fits.

    Args:
        name: ``"auto"`` (`PREFERRED` in turn), or a backend.
        sizes: of the call.
        device: of the tensors.

    Raises:
        InputError: an unknown name, or sizes that the backend would compute wrongly.
        MissingCapabilityError: no GPU, or nothing installed that fits, with every reason.
    """
    candidates = [registered(known) for known in (PREFERRED if name == "auto" else (name,))]
    on_gpu = torch.device(device).type == "cuda"
    if not on_gpu and not all(b.capabilities.anywhere for b in candidates):
        raise MissingCapabilityError(
            f"backend '{name}' needs q, k and v on an NVIDIA GPU, they are on {device}; "
            "backend='reference' computes the same anywhere, slowly."
        )
    capability = torch.cuda.get_device_capability(device) if on_gpu else None
    reasons = []
    for backend in candidates:
        if missing := backend.missing():
            reasons.append(f"'{backend.name}': {missing}")
        elif refusal := backend.capabilities.refusal(sizes, capability):
            if name != "auto":
                raise InputError(f"backend '{name}' {refusal}.")
            reasons.append(f"'{backend.name}' {refusal}")
        else:
            return backend
    raise MissingCapabilityError(f"no backend for this call: {'; '.join(reasons)}.")


def rows_in_flight(backend: Backend, sizes: Sizes) -> int | None:
    """W of a backend on the current GPU; None for one that needs none (the profile's W then)."""
    if backend.capabilities.anywhere:
        return None
    processors = torch.cuda.get_device_properties().multi_processor_count
    return int(processors * backend.rows_per_sm(sizes))
