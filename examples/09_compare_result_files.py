"""Compare two files of results: did a change help, and by more than noise?

You will learn how results become JSON lines, how to read them back, and how `wavealign compare`
pairs the rows of two files. Rows pair where everything else agrees, so here each mask under one
policy stands beside the same mask under another. Measured files are compared in the same way
(`docs/report.md`).

    python examples/09_compare_result_files.py

It prints the time of each row that was written, and what `wavealign compare` says of both files.
"""

import subprocess
import tempfile
from pathlib import Path

import wavealign as wa

whole = wa.load_mask("data/xattention_75600.npz").mask
with tempfile.TemporaryDirectory() as name:
    files = []
    for policy in ("original", "resync"):
        path = Path(name) / f"{policy}.jsonl"
        rows = [
            wa.simulate(whole.select_heads([h]), policy, "h100", model="fast", name=f"head{h}")
            for h in range(5)
        ]
        path.write_text("".join(row.to_json() + "\n" for row in rows))
        files.append(str(path))
        for row in map(wa.RunResult.from_json, path.read_text().splitlines()):
            print(f"{path.name}: {row.mask}, {row.time_ms:.3f} ms")
    command = ["wavealign", "compare", *files, "--a-policy", "original", "--b-policy", "resync"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
print(done.stdout.replace(name, "."))
