"""Compare policies at several sizes of L2: which order wins depends on the cache.

You will learn how to simulate one mask under many policies, how to give the simulated cache
another size, and when the fast model is enough. A policy is `ROWS[/VISITS]`, so
`nnz/shuffled+sawtooth` names an order of the rows and an order of each row's visits to its K/V
blocks; `wavealign policies` lists all of them.

    python examples/03_compare_policies.py

It prints a table of L2 hit ratios: one line a policy, one column an L2 size.
"""

import wavealign as wa

POLICIES = ("original", "svd+nnz", "nnz", "nnz/shuffled+sawtooth", "lockstep", "resync")
SIZES_MB = (2, 4, 8, 16, 32)

mask = wa.load_mask("data/xattention_75600.npz").mask.select_heads([0, 1])
print("L2 hit ratio, %" + " " * 8 + "".join(f"{size:>6} MB" for size in SIZES_MB))
best = dict.fromkeys(SIZES_MB, ("", 0.0))
for policy in POLICIES:
    line = f"{policy:23}"
    for size in SIZES_MB:
        # One LRU, about one and a half times as fast as the full model of two L2 partitions.
        result = wa.simulate(mask, policy, "h100", l2_bytes=size * 1_000_000, model="fast")
        line += f"{100 * result.l2_hit_frac:9.1f}"
        best[size] = max(best[size], (policy, result.l2_hit_frac), key=lambda found: found[1])
    print(line)
for size, (policy, _) in best.items():
    print(f"At {size} MB {policy} hits most.")
