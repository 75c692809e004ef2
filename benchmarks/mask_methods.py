"""What making masks from Q and K costs on a GPU, method by method; XAttention both ways.

    python benchmarks/mask_methods.py OUT [--tiles] [--small]

Random bf16 Q and K, ``[1, L, 40, 128]`` as a diffusers model hands them over. XAttention: float32
products in torch, head by head, beside the kernels, at 75,600 and 363,600 tokens, with the share of
blocks on which the two agree. Torch's time is that of a few heads, scaled to 40. The rest through
`head_masks`. Prints a Markdown table and writes ``mask_methods.json`` into the folder OUT.

--tiles also times the kernels with other tiles. --small runs tiny shapes anywhere, without meaning:
on a CPU there are no kernels to compare with.
"""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import Row, gpu_name, markdown, parser

import wavealign
from wavealign.methods import head_masks, params, select, xattention
from wavealign.methods.context import HeadContext
from wavealign.structures import json_text

HEADS, HEAD_DIM = 40, 128
REST = {
    "spargeattn": {"top-k": params.SpargeAttn(), "cdf": params.SpargeAttn(select="cdf")},
    "flexprefill": {"default": params.FlexPrefill()},
    "minference": {
        "vertical-slash": params.MInference(block=128),
        "block-sparse": params.MInference("block-sparse", block=128),
    },
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--tiles", action="store_true")
    options.add_argument("--small", action="store_true")
    arguments = options.parse_args()
    gpu = torch.cuda.is_available()
    if not (gpu or arguments.small):
        sys.exit("no GPU: the times would mean nothing; --small runs the code without one.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if gpu else "cpu"
    heads, lengths = (2, [1500, 3000]) if arguments.small else (HEADS, [75_600, 363_600])
    rows: list[Row] = []
    for tokens in lengths:
        q, k = _qk(tokens, heads, device)
        first = tokens == lengths[0]
        rows += _caught("xattention, torch", tokens, _torch_path, q, k)
        rows += _caught("xattention", tokens, _kernels, q, k)
        if first and arguments.tiles and gpu:
            rows += _tile_rows(q, k)
        for method, cases in REST.items() if first else ():
            for name, p in cases.items():
                rows += _caught(f"{method} {name}", tokens, _head_masks, q, k, method, p)
        del q, k
    about = {
        "version": wavealign.__version__,
        "torch": torch.__version__,
        "device": gpu_name() or "cpu",
        "small": arguments.small,
    }
    path = arguments.out / "mask_methods.json"
    path.write_text(json_text({"about": about, "rows": rows}, indent=1) + "\n")
    _table(rows)


def _qk(tokens: int, heads: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a walk beneath, so that rows prefer some blocks to others."""
    generator = torch.Generator(device).manual_seed(0)
    pair = []
    walk = torch.randn(1, tokens, 1, HEAD_DIM, generator=generator, device=device)
    walk = walk.cumsum(1) / tokens**0.5
    for _ in range(2):
        x = torch.empty(1, tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
        for h in range(heads):
            noise = torch.randn(1, tokens, HEAD_DIM, generator=generator, device=device)
            x[:, :, h] = noise + walk[:, :, 0] * 2
        pair.append(x)
    return pair[0], pair[1]


def _caught(name: str, tokens: int, function: Callable[..., Row], *given: Any) -> list[Row]:
    try:
        row = function(*given)
    except Exception as problem:
        traceback.print_exc()
        row = {"error": f"{type(problem).__name__}: {problem}"[:500]}
    row = {"what": name, "tokens": tokens, **row}
    print(json_text(row), file=sys.stderr, flush=True)
    return [row]


def _time_ms(function: Callable[[], Any], turns: int) -> tuple[float, float]:
    """Median time in ms, and the host's part of it: until the call returns."""
    gpu = torch.cuda.is_available()
    times, host = [], []
    for turn in range(turns + 1):
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        returned = time.perf_counter()
        if gpu:
            torch.cuda.synchronize()
        if turn:  # the first compiles
            times.append(1e3 * (time.perf_counter() - start))
            host.append(1e3 * (returned - start))
    return statistics.median(times), statistics.median(host)


def _tflop(tokens: int, heads: int) -> float:
    p = params.XAttention()
    return 2 * tokens**2 * HEAD_DIM / p.stride * heads / 1e12


def _torch_path(q: torch.Tensor, k: torch.Tensor) -> Row:
    """The torch path on a few heads, as if there were no kernels."""
    tokens, heads = q.shape[1:3]
    some = min(heads, 4 if tokens < 100_000 else 2)

    def run() -> None:
        for h in range(some):
            _torch_mask(q[0, :, h], k[0, :, h])

    ms, _ = _time_ms(run, 1)
    ms *= heads / some
    return {
        "heads": heads,
        "timed_heads": some,
        "ms": ms,
        "tflops": _tflop(tokens, heads) / ms * 1e3,
    }


def _torch_mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`xattention` as it was without kernels: its scores in float32, then a sort."""
    real = xattention.fused, select._fused
    xattention.fused = select._fused = lambda *_: False
    try:
        return xattention.xattention(q, k, params.XAttention(), HeadContext(0, len(q)))
    finally:
        xattention.fused, select._fused = real


def _kernels(q: torch.Tensor, k: torch.Tensor) -> Row:
    tokens, heads = q.shape[1:3]
    made: list[torch.Tensor] = []

    def run() -> None:
        made[:] = [head_masks("xattention", q, k)]

    before = torch.cuda.memory_allocated() if q.is_cuda else 0
    if q.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    ms, host_ms = _time_ms(run, 3)
    peak = torch.cuda.max_memory_allocated() - before if q.is_cuda else 0
    head = heads - 1
    differ = (made[0][0, head] != _torch_mask(q[0, :, head], k[0, :, head])).float().mean()
    return {
        "heads": heads, "ms": ms, "host_ms": host_ms, "tflops": _tflop(tokens, heads) / ms * 1e3,
        "density": float(made[0].float().mean(dtype=torch.float64)), "differ_frac": float(differ),
        "peak_bytes": peak, **_parts(q, k),
    }  # fmt: skip


def _parts(q: torch.Tensor, k: torch.Tensor) -> Row:
    """Device time of each kernel, by the profiler, where there are kernels."""
    if not q.is_cuda:
        return {}
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            head_masks("xattention", q, k)
            torch.cuda.synchronize()
    except RuntimeError as problem:
        return {"kernels_ms": f"the profiler failed: {problem}"[:200]}
    return {
        "kernels_ms": {
            event.key[:40]: event.self_device_time_total / 1e3
            for event in found.key_averages()
            if event.self_device_time_total > 100
        }
    }


def _tile_rows(q: torch.Tensor, k: torch.Tensor) -> list[Row]:
    from wavealign.methods import _xattention_kernels as kernels

    rows = []
    for tile in _tiles(kernels.Tile):
        real = kernels.default_tile
        kernels.default_tile = lambda _, tile=tile: tile
        try:
            rows += _caught(f"xattention {_name(tile)}", q.shape[1], _timed, q, k)
        finally:
            kernels.default_tile = real
    return rows


def _tiles(make: Callable[..., Any]) -> Iterator[Any]:
    for rows, cells, warps, stages, ctas, tma in (
        (128, 256, 8, 3, 1, True), (128, 256, 8, 4, 1, True), (256, 128, 8, 3, 1, True),
        (256, 128, 8, 4, 1, True), (128, 128, 4, 3, 2, True), (128, 128, 8, 3, 2, True),
        (128, 256, 8, 3, 1, False), (128, 128, 4, 3, 2, False),
    ):  # fmt: skip
        yield make(rows, cells, 64, warps, stages, ctas, tma)
    yield make(128, 128, 128, 8, 3, 1, True)


def _name(tile: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(tile).items())


def _timed(q: torch.Tensor, k: torch.Tensor) -> Row:
    ms, _ = _time_ms(lambda: head_masks("xattention", q, k), 3)
    tokens, heads = q.shape[1:3]
    return {"heads": heads, "ms": ms, "tflops": _tflop(tokens, heads) / ms * 1e3}


def _head_masks(q: torch.Tensor, k: torch.Tensor, method: str, p: Any) -> Row:
    ms, host_ms = _time_ms(lambda: head_masks(method, q, k, p), 2)
    return {"heads": q.shape[2], "ms": ms, "host_ms": host_ms}


def _table(rows: list[Row]) -> None:
    lines = []
    for row in rows:
        head = [row["what"], f"{row['tokens']:,}"]
        if "error" in row:
            lines.append([*head, row["error"], "", "", ""])
            continue
        rate = f"{row['tflops']:.1f}" if "tflops" in row else ""
        differ = f"{row['differ_frac']:.1e}" if "differ_frac" in row else ""
        ms = row["ms"]
        lines.append([*head, f"{ms:.1f}", f"{ms / row['heads']:.2f}", rate, differ])
    header = ["what", "tokens", "ms, all heads", "ms a head", "TFLOP/s", "blocks that differ"]
    print(markdown(header, lines))


if __name__ == "__main__":
    main()
