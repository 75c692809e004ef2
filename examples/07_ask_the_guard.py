"""Ask the guard: is another order worth it for these heads?

You will learn how the guard decides head by head, what it knows (cheap statistics and a cost model
that was calibrated on a GPU), and why the answer depends on how often a plan is used: planning
takes time too, and has to be earned back.

    python examples/07_ask_the_guard.py

It prints the guard's choice and its reason for three heads of natural video, each launched alone,
with a plan that serves one call and one that serves fifty.
"""

import wavealign as wa
from wavealign.guard import CostModel

whole = wa.load_mask("data/clip/xattention_75600.npz").mask
model = CostModel.make("h200")
for head in (1, 2, 5):
    mask = whole.select_heads([head])
    print(f"head {head} of the file, density {mask.density:.2f}")
    for uses in (1, 50):
        decision = wa.Guard(model).decide_mask(mask, uses=uses)  # a guard without a past
        print(f"  used {uses:2} times: {decision.win_frac:.1%} less time, planning included")
        print(f"  {decision.explain()}")
