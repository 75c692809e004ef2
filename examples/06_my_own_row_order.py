"""Try a row order of your own: a function becomes a schedule, and the simulator judges it.

You will learn what a row order is allowed to be (any permutation of a head's query blocks), how to
make a `Schedule` from one, and how to compare it with the orders that ship. The order below puts
rows next to each other that begin at the same K/V block. To make your order a policy with a name,
see "Adding a row order" in CONTRIBUTING.md.

    python examples/06_my_own_row_order.py

It prints hit ratio, HBM reads and time of your order between `original` and `resync`.
"""

import numpy as np

import wavealign as wa


def by_first_block(head):
    """Slot in launch order -> query block: rows by their first K/V block, then long ones first."""
    first = np.full(head.M, head.N)  # rows without a block come last
    rows = np.flatnonzero(head.row_nnz)
    first[rows] = head.indices[head.indptr[rows]]
    return np.lexsort((-head.row_nnz, first // 16)).astype(np.int32)


mask = wa.load_mask("data/xattention_75600.npz").mask.select_heads([0, 1, 2])
row_order = np.stack([by_first_block(head) for head in mask.heads()])
# Each row visits its K/V blocks as the mask lists them: ascending.
mine = wa.Schedule(row_order, mask.indptr, mask.indices, mask.shape, "by-first-block")

for policy in ("original", mine, "resync"):
    result = wa.simulate(mask, policy, device="h100", l2_bytes=16_000_000)
    print(
        f"{result.policy:15} {result.l2_hit_frac:6.1%} hits  "
        f"{result.hbm_read_bytes / 1e9:6.2f} GB  {result.time_ms:.3f} ms"
    )
