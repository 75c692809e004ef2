"""Search for the best order of your masks, and read the trials back in Python.

You will learn how to write a small space of policies, how to run `wavealign sweep` over it, and
how to read what it kept. A sweep can be interrupted: the same command goes on where it stopped.
`docs/best-order.md` is the whole walk, `docs/sweep.md` the reference.

    python examples/08_sweep_and_read_back.py

It prints the sweep's own table and, read back from the folder, how each choice of rows did.
"""

import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from wavealign.sweep import read_trials

SPACE = """
policy = ["{rows}/{visits}"]
rows = ["nnz", "nnz-dealt", "svd+nnz"]
visits = ["ascending", "shuffled+sawtooth", "shuffled+phased"]
device = ["h100"]
l2 = ["10MB"]
heads = ["0"]
"""

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "space.toml").write_text(SPACE)
    command = ["wavealign", "sweep", "--mask", "data/xattention_75600.npz", "--quiet"]
    command += ["--space", str(folder / "space.toml"), "--out", str(folder / "found")]
    subprocess.run([*command, "--jobs", "1"], check=True)
    trials = list(read_trials(folder / "found"))

original = next(trial for trial in trials if trial.spec.policy == "original")
speedups = defaultdict(list)
for trial in trials:
    rows = trial.spec.policy.partition("/")[0]
    speedups[rows].append(original.result.time_ms / trial.result.time_ms)
print(f"\n{len(trials)} trials. Speedup over `original`, mean over visit orders, and the best:")
for rows, found in sorted(speedups.items(), key=lambda item: -max(item[1])):
    print(f"  {rows:10} {fmean(found):.3f}x  {max(found):.3f}x")
