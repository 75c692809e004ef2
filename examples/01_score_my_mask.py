"""Score a block mask: what would a better row order be worth on a GPU?

You will learn how to load a mask file, how to see what the mask looks like to the cache, and how
to simulate the order that kernels use today beside a better one. Replace the path by your own
file; `docs/formats.md` says what such a file may hold.

    python examples/01_score_my_mask.py

It prints the statistics of eight heads and, for two policies, the share of K/V reads that hit L2,
the bytes read from HBM, and the time of the launch on an H200.
"""

import wavealign as wa

mask = wa.load_mask("data/xattention_75600.npz").mask
whole, per_head = wa.mask_stats(mask)
print(f"{mask.H} heads of {mask.M} x {mask.N} blocks, density {whole.density:.2f}")
for head in per_head:
    print(f"  head {head.head}: density {head.density:.2f}, NNZ spread {head.row_nnz_spread:.2f}")

original = wa.simulate(mask, "original", device="h200")
better = wa.simulate(mask, "resync", device="h200")
for result in (original, better):
    print(
        f"{result.policy:8}  {result.l2_hit_frac:6.1%} hits  "
        f"{result.hbm_read_bytes / 1e9:6.2f} GB from HBM  {result.time_ms:.2f} ms"
    )
print(f"resync is worth {original.time_ms / better.time_ms:.3f}x on this mask.")
