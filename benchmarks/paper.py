"""The WaveAlign paper's experiments on this machine's GPU, as Markdown tables.

    python benchmarks/paper.py run MASK.npz ... --out runs.jsonl     # needs a GPU, ncu, fa4
    python benchmarks/paper.py tables runs.jsonl ...                 # anywhere

`run` is `wavealign validate` with the paper's settings: FlashAttention-4, waves of 132 rows, the
ablation original / stage 1 / stage 2 / both, and beside it `lockstep` and `resync`. `tables`
prints the gap (the paper's figure 2), hit ratio and HBM reads (table I, figure 11), and the
ablation (figure 12) with each speedup split into balance (cycles) and clock (power). Paper figures
are of an H100 and of masks from Wan2.1 and LTX2.3; docs/results/h200.md names the differences.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from common import PROGRAM, markdown, parser

from wavealign.runs.result import Result

POLICIES = ("original", "svd", "nnz-wave", "svd+nnz", "lockstep", "resync")
HBM_BYTES_PER_S = 4.8e12  # NVIDIA H200 datasheet

# H100, 364K tokens, from the paper's sections III and VI: (lowest, highest) over four methods.
PAPER = {
    "gap, original": (1.09, 1.26),
    "hit ratio, original": (0.2848, 0.3635),
    "hit ratio, svd": (0.3488, 0.4447),
    "hit ratio, nnz-wave": (0.6835, 0.7871),
    "hit ratio, svd+nnz": (0.7938, 0.8906),
    "speedup, svd": (1.0, 1.0319),
    "speedup, nnz-wave": (1.091, 1.147),
    "speedup, svd+nnz": (None, 1.17),
    "HBM reads saved, svd": (0.0871, 0.1861),
    "HBM reads saved, nnz-wave": (0.6889, 0.8367),
    "HBM reads saved, svd+nnz": (0.8071, 0.9211),
}

Rows = dict[str, Result]


def main() -> None:
    whole = parser(__doc__)
    commands = whole.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("masks", nargs="+")
    run.add_argument("--out", required=True)
    run.add_argument("--repeats", default="7")
    tables = commands.add_parser("tables")
    tables.add_argument("runs", nargs="+", type=Path)
    arguments = whole.parse_args()
    if arguments.command == "run":
        sys.exit(_run(arguments.masks, arguments.out, arguments.repeats))
    rows = [
        Result.from_json(line)
        for path in arguments.runs
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    _tables([row for row in rows if row.regime == "single"])


def _run(masks: Iterable[str], out: str, repeats: str) -> int:
    command = [*PROGRAM, "validate", "--gpu", "--counters"]
    command += ["--wave", "132", "--no-predict", "--no-limit", "--repeats", repeats, "--out", out]
    for policy in POLICIES:
        command += ["--policy", policy]
    for mask in masks:
        command += ["--mask", mask]
    return subprocess.run(command, check=False).returncode


def _tables(rows: list[Result]) -> None:
    launches: dict[str, Rows] = {}
    for row in rows:
        head = "" if row.head is None else f"[{row.head}]"
        launches.setdefault(f"{row.mask}{head}", {})[row.policy] = row
    launches = {name: found for name, found in launches.items() if "original" in found}
    first = rows[0]
    print(f"{first.gpu}, driver {first.driver}, {first.backend_version}; wave {first.wave}.\n")
    _print("Gap: (1/density) / (dense time / sparse time)", launches, _gap)
    _print("L2 hit ratio", launches, lambda r, _: _percent(r.l2_hit_frac))
    _print("HBM reads: share of 4.8 TB/s over the launch", launches, _share)
    _print("HBM reads against original", launches, _saved)
    _print("Speedup over original", launches, _speedup)
    _print("Speedup = balance (cycles) x clock (GHz) of the counted launch", launches, _split)
    figures = [[name, "-" if low is None else str(low), str(high)]
               for name, (low, high) in PAPER.items()]  # fmt: skip
    table = markdown(["figure", "lowest", "highest"], figures)
    print(f"The paper, H100, 364K tokens:\n\n{table}")


def _print(title: str, launches: dict[str, Rows], cell: Callable[[Result, Result], str]) -> None:
    policies = [p for p in POLICIES if any(p in found for found in launches.values())]
    lines = []
    for name, found in launches.items():
        base = found["original"]
        tokens = "-" if base.tokens_kv is None else f"{base.tokens_kv:,}"
        density = "-" if base.density is None else f"{base.density:.3f}"
        cells = [cell(found[p], base) if p in found else "-" for p in policies]
        lines.append([name, tokens, density, *cells])
    print(f"{title}\n\n{markdown(['mask', 'tokens', 'density', *policies], lines)}\n")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _gap(row: Result, _: Result) -> str:
    return "-" if row.gap is None else f"{row.gap:.2f}"


def _share(row: Result, _: Result) -> str:
    if row.hbm_read_bytes is None or not row.counters_ms:
        return "-"
    return _percent(row.hbm_read_bytes / (row.counters_ms * 1e-3) / HBM_BYTES_PER_S)


def _saved(row: Result, base: Result) -> str:
    if row.hbm_read_bytes is None or not base.hbm_read_bytes:
        return "-"
    return f"{100 * (row.hbm_read_bytes / base.hbm_read_bytes - 1):+.1f} %"


def _speedup(row: Result, base: Result) -> str:
    return f"{base.time_ms / row.time_ms:.3f}" if row.time_ms and base.time_ms else "-"


def _split(row: Result, base: Result) -> str:
    if not (row.counters_ms and base.counters_ms and row.clock_ghz and base.clock_ghz):
        return "-"
    clock = row.clock_ghz / base.clock_ghz
    balance = base.counters_ms * base.clock_ghz / (row.counters_ms * row.clock_ghz)
    return f"{balance:.3f} x {clock:.3f}"


if __name__ == "__main__":
    main()
