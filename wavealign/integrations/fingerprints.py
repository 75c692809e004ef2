"""What a call of a transformer was given, kept small: what tells texts, grids and latents apart."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Names of arguments begin like these.
_TEXT = ("encoder_", "pooled_", "image_embeds")
_PLACES = ("num_frames", "height", "width", "video_coords", "indices_")
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


def digest_text(given: dict[str, Any]) -> str:
    """What tells texts apart, and images that stand for them, of a call's arguments."""
    return digest(*(given[name] for name in sorted(given) if name.startswith(_TEXT)))


def digest_places(given: dict[str, Any]) -> str:
    """What tells apart where tokens lie: sizes of latents, and what says places beside them."""
    videos = [(n, x.shape[1:]) for n, x in given.items() if isinstance(x, Tensor) and x.ndim == 5]
    beside = [(n, x) for n, x in given.items() if n.startswith(_PLACES)]
    return digest(sorted(videos), [part for pair in sorted(beside) for part in pair])


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
