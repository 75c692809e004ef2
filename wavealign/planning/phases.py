"""Where each row enters its pass over K/V: `phased`, with its two recurrences.

A list schedule of the launch says when each row starts and on which worker; that takes row
lengths only, but runs through the whole launch, head after head. Given those times, a row's entry
depends on the entries of the head's rows in flight: a recurrence over slots, independent from
head to head. On a GPU the first is one Triton program that starts as many rows at once as the
order of events allows, the second one program a head. On the CPU both are the numba kernel
behind `build_schedule`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wavealign.order.visits import BLOCK_TICKS, START_TICKS
from wavealign.planning.following import Gate


def entry_skips(
    order: Tensor, counts: Tensor, lengths: Tensor, places: Tensor, phased: Tensor, wave: int,
    columns: int, gate: Gate | None = None,
) -> Tensor:  # fmt: skip
    """How many entries of its list each row leaves for the end of its pass.

    Args:
        order: int32 ``[H, M]``, slot → query block.
        counts: int32 ``[H, M]``, by query block.
        lengths: the same by slot.
        places: int32 ``[H, M, width]``, each row's places in its head's K/V order, ascending.
        phased: bool ``[H]``: heads whose rows do so; rows of others begin at 0.
        wave: rows in flight, W.
        columns: N.
        gate: on a GPU, of a call that follows.

    Returns:
        int32 ``[H, M]``, by query block.
    """
    if order.is_cuda:
        from wavealign.planning._phase_kernels import launch_phases

        return launch_phases(
            order, counts, lengths, places, phased, wave, columns, BLOCK_TICKS, START_TICKS, gate
        )
    from wavealign.order._kernels import phase_rows

    H, M = order.shape
    free = np.zeros(wave, dtype=np.int64)
    identity = np.arange(columns, dtype=np.int32)
    skips = torch.zeros(H, M, dtype=torch.int32, device="cpu")
    for h in range(H):
        length = counts[h].numpy().astype(np.int64)
        indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
        held = np.arange(places.shape[-1]) < length[:, None]
        lists = places[h].numpy()[held].astype(np.int32)
        first = lists.copy()
        phase_rows(order[h].numpy(), indptr, lists, identity, free, BLOCK_TICKS, START_TICKS)
        if not phased[h]:
            continue
        for row in np.flatnonzero(length):
            own = first[indptr[row] : indptr[row + 1]]
            skips[h, row] = int(np.searchsorted(own, lists[indptr[row]]))
    return skips
