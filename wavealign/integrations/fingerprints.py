"""What tells the texts and the latents of a transformer's calls apart."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SAMPLED = 2**16  # elements of latents that are compared


@dataclass(frozen=True, eq=False)
class Latents:
    """What is known of a call's latents: a digest of all, and some of them on the host."""

    digest: str
    sample: Tensor

    @classmethod
    def of(cls, latents: Any, whole: bool) -> Latents:
        """Of a call's, with a digest only where ``whole``."""
        flat = latents.detach().reshape(-1) if isinstance(latents, Tensor) else torch.empty(0)
        sample = flat[:: max(1, len(flat) // _SAMPLED)].to("cpu", torch.float32)
        return cls(digest(latents) if whole else "", sample)

    def apart(self, other: Latents) -> float:
        """Their distance, as a share of the larger norm; infinite where they can't be compared."""
        if self.sample.shape != other.sample.shape or not len(self.sample):
            return math.inf
        largest = torch.maximum(self.sample.norm(), other.sample.norm())
        return float((self.sample - other.sample).norm() / largest)


def digest(*values: Any) -> str:
    """What tells values apart, those of tensors and of lists of them; the host waits for them."""
    found = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, Tensor):
            found.update(f"{tuple(value.shape)} {value.dtype}".encode())
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(data.numpy().data)
        else:
            parts = digest(*value) if isinstance(value, list | tuple) else repr(value)
            found.update(parts.encode())
    return found.hexdigest()
