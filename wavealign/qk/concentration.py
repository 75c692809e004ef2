"""How concentrated a head's attention is, and the temperature that makes it so.

Published profiles of video models say, head by head, what share of the keys holds 95 % of a
query's attention (mean over queries; SVOO's profiles in the PyPI package sparsevideo 0.1.0,
all steps, layers and heads). A stand-in for such a model can be given the same spread of
concentrations over its heads by scaling its queries.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_MASS = 0.95
_SAMPLES = 64
_RANGE = (1 / 64, 64.0)

PROFILES = {
    "wan2.1": (0.010, 0.038, 0.135, 0.370, 0.725),
    "wan2.1-1.3b": (0.004, 0.012, 0.051, 0.183, 0.459),
    "hunyuan": (0.003, 0.009, 0.046, 0.190, 0.536),
}
"""Quantiles .1, .25, .5, .75 and .9, over all heads, of the share of keys that holds 95 %."""

_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def target_shares(profile: str, heads: int) -> list[float]:
    """The profile's shares at the quantiles ``(i + ½) / heads``, ascending.

    Between the published quantiles their logarithm is interpolated, beyond them it's cut off.
    """
    at = (np.arange(heads) + 0.5) / heads
    logs = np.interp(at, _QUANTILES, np.log(PROFILES[profile]))
    return [float(share) for share in np.exp(logs)]


def sorted_logits(q: Tensor, k: Tensor) -> Tensor:
    """Scores of evenly spread queries, each row descending, its largest at 0, ``(n, L)``."""
    L, D = q.shape
    count = min(_SAMPLES, L)
    rows = (torch.arange(count, device=q.device) * 2 + 1) * L // (2 * count)
    logits = q[rows].float() @ k.float().T / math.sqrt(D)
    logits = logits.sort(dim=-1, descending=True).values
    return logits - logits[:, :1]


def key_share(logits: Tensor, scale: float) -> float:
    """Share of the keys that holds 95 % of a query's attention, mean over the rows.

    Args:
        logits: of `sorted_logits`.
        scale: of the queries.
    """
    sums = (logits * scale).exp().cumsum(-1)
    counts = (sums < _MASS * sums[:, -1:]).sum(-1) + 1
    return float(counts.float().mean()) / logits.shape[-1]


def scale_for(logits: Tensor, share: float) -> float:
    """The scale of the queries at which `share` of the keys holds the mass.

    A larger scale needs fewer keys, so bisection finds it; what can't be reached within
    1/64 .. 64 gets the nearer end.
    """
    low, high = _RANGE
    for _ in range(24):
        middle = math.sqrt(low * high)
        if key_share(logits, middle) > share:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
