"""Where a launch's rows stand: from row orders to slots, in torch operations.

`place` is the readable twin of the Triton kernels in `_row_kernels`, which make the row orders that
need no more than lengths themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wavealign.planning.recipes import Recipe

KINDS = {
    ("original", False): 0,
    ("original", True): 1,
    ("nnz", False): 2,
    ("nnz-dealt", False): 3,
}
"""Row orders that the kernels make: (row order, sorted inside of waves) → number."""


@dataclass(frozen=True, eq=False)
class Placed:
    """Rows in launch order.

    Attributes:
        slots: int64 ``[H, M]``, query block → slot.
        lengths: int32 ``[H, M]``, slot → K/V blocks that its row keeps.
        backwards: bool ``[H, M]``, by query block: rows of odd waves, of heads that sweep.
    """

    slots: Tensor
    lengths: Tensor
    backwards: Tensor


def kinds_of(recipes: Sequence[Recipe]) -> tuple[int, ...] | None:
    """The kernels' number of each head's row order; None where one isn't theirs."""
    kinds = [KINDS.get((recipe.rows, recipe.inside_waves)) for recipe in recipes]
    return None if None in kinds else tuple(kind for kind in kinds if kind is not None)


def place(order: Tensor, counts: Tensor, sawtooth: Tensor, wave: int) -> Placed:
    """Put rows where an order says.

    Args:
        order: int64 ``[H, M]``, slot → query block.
        counts: int32 ``[H, M]``, by query block.
        sawtooth: bool ``[H]``: heads whose odd waves go backwards.
        wave: rows in flight, W.
    """
    slots = torch.argsort(order, dim=-1)
    backwards = (slots // wave % 2 == 1) & sawtooth[:, None]
    return Placed(slots, counts.gather(-1, order), backwards)
