"""What torch code of several rooms needs of blocks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def fold_columns(values: Tensor, block: int) -> Tensor:
    """Sums of every `block` columns, ``(..., ceil(columns / block))``."""
    count = values.shape[-1] // block
    whole = count * block
    sums: Tensor = values[..., :whole].reshape(*values.shape[:-1], count, block).sum(-1)
    if whole == values.shape[-1]:
        return sums
    return torch.cat([sums, values[..., whole:].sum(-1, keepdim=True)], dim=-1)
