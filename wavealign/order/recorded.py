"""Orders that were recorded of a run, and the schedule that they make of its mask.

A file of them (``wavealign.orders/1``, npz) holds of each head what its lists can be rebuilt from:

- ``row_order/ROWS``, ``[H, M]``: slot in launch order → query block, by the name of the row order;
- ``kv_order``, ``[H, N]``: place → K/V block, for policies that are `shuffled`;
- ``first_block/POLICY``, ``[H, M]``: the K/V block with which each query block begins, for policies
  that are `phased`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wavealign.errors import InputError
from wavealign.masks.block_mask import BlockMask
from wavealign.npz import NpzFile
from wavealign.order.context import OrderContext
from wavealign.order.policies import parse_policy
from wavealign.order.schedule import Schedule, read_numbers
from wavealign.order.visits import turn_lists

ORDERS_SCHEMA = "wavealign.orders/1"


def recorded_schedule(
    path: Path, mask: BlockMask, heads: Sequence[int], policy: str, wave: int
) -> Schedule | None:
    """The schedule that ran under `policy`.

    Args:
        path: file of recorded orders.
        mask: the heads that ran.
        heads: their places in the file.
        policy: its name, as in the file.
        wave: rows in flight that `sawtooth` reckoned with.

    Returns:
        The schedule; None where the file isn't there, is of another kind, or lacks this policy's
        orders.

    Raises:
        InputError: the file is damaged.
    """
    from wavealign.order._kernels import lists_in_kv_order

    if not path.exists():
        return None
    with NpzFile(path) as file:
        if "schema" not in file or file.text("schema") != ORDERS_SCHEMA:
            return None
        visits = parse_policy(policy).visits
        names = [f"row_order/{policy.partition('/')[0]}"]
        names += ["kv_order"] * visits.shuffled + [f"first_block/{policy}"] * visits.phased
        if not all(name in file for name in names):
            return None
        found = {}
        for name in names:
            shape = (None, mask.N if name == "kv_order" else mask.M)
            numbers = read_numbers(file, name, shape, mask.M if name == names[0] else mask.N)
            if len(numbers) <= max(heads):
                raise file.error(
                    f"'{name}' is of {len(numbers)} heads; expected {max(heads)}, too."
                )
            found[name] = numbers[list(heads)]
            orders = np.sort(found[name])
            if "first" not in name and (orders != np.arange(orders.shape[1])).any():
                raise file.error(f"'{name}' names a block of a head twice.")
    row_order, lists = found[names[0]], mask.indices.copy()
    for h, head in enumerate(mask.heads()):
        begin = mask.indptr[h * mask.M]
        part = lists[begin : begin + len(head.indices)]
        if visits.shuffled:
            lists_in_kv_order(head.indptr, head.indices, found["kv_order"][h], part)
        turn_lists(part, head, row_order[h], visits, OrderContext(wave))
        if visits.phased:
            firsts = found[names[-1]][h]
            for (start, end), first in zip(itertools.pairwise(head.indptr), firsts, strict=True):
                row = part[start:end]
                if len(row) and first not in row:
                    raise InputError(f"{path}: '{names[-1]}' begins a row with no block of it.")
                row[:] = np.roll(row, -np.argmax(row == first)) if len(row) else row
    return Schedule(row_order, mask.indptr, lists, mask.shape, policy)
