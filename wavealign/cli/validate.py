"""`wavealign validate`: run schedules on a real kernel and hold the prediction against it."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wavealign.cli.failure import Command, Failure
from wavealign.cli.options import cores, json_option, load_heads, seed_option
from wavealign.cli.output import remark, say, say_json
from wavealign.cli.paths import Input, Output
from wavealign.errors import InputError, MissingCapabilityError, unknown_name

if TYPE_CHECKING:
    from wavealign.report.validation import Pair
    from wavealign.runs.result import CacheControl
    from wavealign.validation import Case

DEFAULT_POLICIES = ("original", "svd", "nnz-wave", "svd+nnz", "lockstep", "resync")


@click.command(cls=Command)
@click.option("--gpu", is_flag=True, help="Run on this machine's GPU; nothing else can measure.")
@click.option("--mask", "mask_paths", multiple=True, type=Input(), required=True,
              help="Mask file (npz, npy), repeatable.")  # fmt: skip
@click.option("--key", help="The mask inside a file that holds several: KEY/mask, ...")
@click.option("--block", metavar="QxKV", help="Tokens per query and K/V block, e.g. 128x64.")
@click.option("--heads", metavar="LIST", help="Only these heads, e.g. 0,3-7.")
@click.option("--per-head", is_flag=True, help="Launch every head on its own.")
@click.option(
    "--backend", "backend_names", multiple=True, default=("fa4",), show_default=True,
    help="fa4, triton, flex, cudnn, cudnn64; repeatable. Never replaced by another one.",
)  # fmt: skip
@click.option(
    "--policy", "policies", multiple=True, metavar="P",
    help=f"ROWS[/VISITS], repeatable; default: {', '.join(DEFAULT_POLICIES)}.",
)  # fmt: skip
@click.option("--schedule", "schedule_paths", multiple=True, type=Input(), metavar="S.npz",
              help="Also run this schedule file, repeatable.")  # fmt: skip
@click.option(
    "--regime", "regimes", multiple=True, type=click.Choice(["single", "steady"]),
    default=("single",), show_default=True,
    help="Launches apart, or back to back until clock and power have settled; repeatable.",
)  # fmt: skip
@click.option("--counters", is_flag=True, help="Read hardware counters with Nsight Compute.")
@click.option("--cache-control", type=click.Choice(["all", "none"]), default="all",
              show_default=True,
              help="L2 before a counted launch: flushed (as simulated), or as it is.")  # fmt: skip
@click.option("--predict/--no-predict", default=True, show_default=True,
              help="Simulate each schedule beside its measurement.")  # fmt: skip
@click.option("--limit/--no-limit", default=True, show_default=True,
              help="Measure the compute limit too.")  # fmt: skip
@click.option("--dense/--no-dense", default=True, show_default=True,
              help="Measure dense attention too, for the gap.")  # fmt: skip
@click.option("--check/--no-check", default=True, show_default=True,
              help="Compare each output with float32 attention.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True,
              help="Launches per policy in the single regime.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0.1), default=2.0, show_default=True,
              help="Of steady state per policy, after half as long to settle.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences.")
@click.option("--kv-heads", type=click.IntRange(1), help="K/V heads; default: the mask's heads.")
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True,
              help="Elements per head.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True)
@click.option(
    "--device", "device_name", type=Input(), metavar="TEXT",
    help="Profile to predict with; default: the one of this GPU, if there is one.",
)  # fmt: skip
@click.option("--wave", type=click.IntRange(1), metavar="W",
              help="Rows in flight that policies assume; default: SMs x CTAs per SM.")  # fmt: skip
@click.option("--trace", type=Output(folder=True), metavar="FOLDER",
              help="Also record when and where each CTA ran (backend triton).")  # fmt: skip
@seed_option
@json_option
@click.option("--out", type=Output(), help="Write the measured rows as JSON lines.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def validate(
    gpu: bool,
    mask_paths: tuple[str, ...],
    key: str | None,
    block: str | None,
    heads: str | None,
    backend_names: tuple[str, ...],
    policies: tuple[str, ...],
    cache_control: CacheControl,
    limit: bool,
    dense: bool,
    check: bool,
    repeats: int,
    seconds: float,
    trace: str | None,
    as_json: bool,
    out: str | None,
    quiet: bool,
    **launched: Any,
) -> None:
    """Run schedules on a real kernel: predicted beside measured time, hit ratio, HBM reads.

    Every output is checked against float32 attention first. Q, K and V are random normal.
    """
    from wavealign.gpu.registry import BACKEND_NAMES, find_backend
    from wavealign.gpu.rig import find_gpu
    from wavealign.gpu.telemetry import Telemetry
    from wavealign.order import parse_policy
    from wavealign.outputs import check_writable
    from wavealign.report.progress import Progress
    from wavealign.runs.lines import ResultWriter

    policies = policies or DEFAULT_POLICIES
    for policy in policies:
        parse_policy(policy)
    for name in backend_names:
        if name not in BACKEND_NAMES:
            raise unknown_name("backend", name, BACKEND_NAMES)
    if trace is not None and set(backend_names) != {"triton"}:
        raise InputError("--trace needs --backend triton: no other kernel says where its rows ran.")
    if not gpu:
        raise MissingCapabilityError(
            "validate measures on a GPU: say --gpu, on a machine that has one. `wavealign sim` "
            "predicts without."
        )
    rig = find_gpu("validate --gpu")
    backends = [find_backend(name) for name in backend_names]
    named = {"heads": heads, "block": block, "key": key}
    masks = [load_heads(path, named) for path in mask_paths]
    from wavealign import validation
    from wavealign.gpu.measure import Options

    for loaded, ids in masks if trace is not None else ():
        for head in ids if launched["per_head"] else (None,):
            path = validation.trace_path(Path(trace or ""), loaded.name, head)
            if path.exists():
                check_writable(path)
    terms = validation.Terms(policies, whole_file=heads is None, jobs=cores(), **launched)
    options = Options(repeats, seconds / 2, seconds, check, limit, dense, cache_control)
    rows = 0
    with ExitStack() as stack:
        telemetry = stack.enter_context(Telemetry())
        writer = stack.enter_context(ResultWriter(out)) if out is not None else None
        runs = validation.validate(
            masks, backends, terms, rig, telemetry, options,
            stages=lambda steps, what: Progress(steps, what, quiet),
            note=(lambda _: None) if quiet else remark,
        )  # fmt: skip
        try:
            for case, ran in itertools.groupby(runs, lambda run: run[0]):
                pairs = []
                for _, measured, predicted in ran:
                    rows += 1
                    pairs.append((measured, predicted))
                    if writer is not None:
                        writer.write([measured])
                    if as_json:
                        say_json(measured.to_json())
                if trace is not None:
                    path = validation.trace_case(case, Path(trace))
                    remark(f"{path}: traces of {len(case.schedules)} launches")
                if not as_json:
                    _print(case, pairs)
        except KeyboardInterrupt:
            kept = f" {out} holds them." if out else ""
            raise Failure(f"interrupted after {rows} rows.{kept}", 1) from None


def _print(case: Case, pairs: list[Pair]) -> None:
    from wavealign.report.tables import print_table
    from wavealign.report.validation import costs_line, validation_table, verdict_line

    mask, first = case.mask, pairs[0][0]
    say(
        f"{first.mask}, heads {first.heads}: {mask.M} x {mask.N} blocks of {mask.block_q} x "
        f"{mask.block_kv} tokens, density {mask.density:.3f}; {first.backend_version} on "
        f"{first.gpu}, driver {first.driver}, {first.wave} rows in flight"
    )
    for regime in dict.fromkeys(measured.regime for measured, _ in pairs):
        part = [pair for pair in pairs if pair[0].regime == regime]
        say("", f"{regime}:")
        print_table(validation_table(part))
        say(verdict_line(part))
    if first.dense_ms is not None:
        gaps = ", ".join(f"{m.policy} {m.gap:.2f}" for m, _ in pairs if m.gap is not None)
        say(f"dense attention takes {first.dense_ms:.2f} ms; gap (1/density) / speedup: {gaps}.")
    say(costs_line([measured for measured, _ in pairs]), "")
