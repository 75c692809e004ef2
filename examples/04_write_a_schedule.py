"""Write a schedule to a file, read it back, and simulate exactly that.

You will learn what a schedule is: for each head the order in which its rows are launched, and for
each row the order in which it visits its K/V blocks. A schedule is complete, so a kernel or the
simulator needs nothing else. It fits one mask, and `check` says so.

    python examples/04_write_a_schedule.py

It prints the first rows in launch order, the result of the schedule that was read back, and what
`check` says of another mask. `wavealign order` writes the same file.
"""

import tempfile
from pathlib import Path

import wavealign as wa

mask = wa.load_mask("data/xattention_75600.npz").mask.select_heads([3])
device = wa.load_device("h200")
wave = device.sms * device.kernel("fa4").ctas_per_sm  # rows in flight at once
schedule = wa.build_schedule(mask, "lockstep", wave)
lists = schedule.head_lists(0)
for slot in range(3):
    row = schedule.row_order[0, slot]
    visits = lists.indices[lists.indptr[row] : lists.indptr[row + 1]]
    first = ", ".join(map(str, visits[:6]))
    print(f"slot {slot} runs query block {row}: {len(visits)} K/V blocks, {first}, ...")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "schedule.npz"
    schedule.save(path)
    found = wa.Schedule.load(path)

found.check(mask)
result = wa.simulate(mask, found, device)
print(f"{result.policy} from the file: {result.time_ms:.3f} ms, {result.l2_hit_frac:.1%} hits")
try:
    found.check(wa.load_mask("data/xattention_75600.npz").mask.select_heads([4]))
except wa.InputError as problem:
    print(f"Another head is refused: {problem}")
