"""Ask for every L2 size at once: how large must the cache be for an order?

You will learn how to run `wavealign curve` and how to read its JSON lines, one record for each
policy and L2 size. One pass over a launch gives the hits of an LRU of any size
(`docs/curve.md` explains it), so a whole curve costs little more than a point.

    python examples/05_miss_ratio_curve.py

It prints, for each policy, the smallest L2 at which nine of ten K/V reads hit.
"""

import json
import subprocess
from collections import defaultdict

POLICIES = ("original", "svd+nnz", "nnz", "lockstep", "resync")
ENOUGH = 0.9

command = ["wavealign", "curve", "--mask", "data/xattention_75600.npz", "--heads", "0,1"]
command += ["--device", "h200", "--json", "--quiet"]
for policy in POLICIES:
    command += ["--policy", policy]
done = subprocess.run(command, check=True, capture_output=True, text=True)

curves = defaultdict(list)  # policy -> (bytes, hit ratio), sizes ascending
for line in done.stdout.splitlines():
    point = json.loads(line)
    curves[point["policy"]].append((point["l2_bytes"], point["l2_hit_frac"]))
for policy, points in curves.items():
    size = next((size for size, hit in points if hit >= ENOUGH), None)
    needs = "no size of the curve" if size is None else f"{size / 1e6:.1f} MB of L2"
    print(f"{policy:9} needs {needs} for {ENOUGH:.0%} hits ({len(points)} sizes).")
