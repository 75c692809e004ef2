"""`wavealign validate`: run schedules on a real kernel and hold the prediction against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wavealign.cli.failure import Command, Failure
from wavealign.cli.options import cores, fitting_schedule, json_option, load_heads, seed_option
from wavealign.errors import InputError, MissingCapabilityError, unknown_name

if TYPE_CHECKING:
    from wavealign.gpu.backend import Backend
    from wavealign.gpu.counters import Counters
    from wavealign.gpu.measure import Case
    from wavealign.gpu.telemetry import Telemetry
    from wavealign.masks import LoadedMask
    from wavealign.order import Schedule
    from wavealign.report.validation import Pair
    from wavealign.runs.result import Result
    from wavealign.sim.devices import DeviceProfile

DEFAULT_POLICIES = ("original", "svd", "nnz-wave", "svd+nnz", "lockstep", "resync")


@click.command(cls=Command)
@click.option("--gpu", is_flag=True, help="Run on this machine's GPU; nothing else can measure.")
@click.option(
    "--mask", "mask_paths", multiple=True, metavar="FILE", required=True,
    help="Mask file (npz, npy), repeatable.",
)  # fmt: skip
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
@click.option(
    "--schedule", "schedule_paths", multiple=True, metavar="S.npz",
    help="Also run this schedule file, repeatable.",
)  # fmt: skip
@click.option(
    "--regime", "regimes", multiple=True, type=click.Choice(["single", "steady"]),
    default=("single",), show_default=True,
    help="Launches apart, or back to back until clock and power have settled; repeatable.",
)  # fmt: skip
@click.option("--counters", is_flag=True, help="Read hardware counters with Nsight Compute.")
@click.option(
    "--cache-control", type=click.Choice(["all", "none"]), default="all", show_default=True,
    help="L2 before a counted launch: flushed (as simulated), or as it is.",
)  # fmt: skip
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
    "--device", "device_name",
    help="Profile to predict with; default: the one of this GPU, if there is one.",
)  # fmt: skip
@click.option("--wave", type=click.IntRange(1), metavar="W",
              help="Rows in flight that policies assume; default: SMs x CTAs per SM.")  # fmt: skip
@click.option("--trace", metavar="FOLDER",
              help="Also record when and where each CTA ran (backend triton).")  # fmt: skip
@seed_option
@json_option
@click.option("--out", metavar="FILE", help="Write the measured rows as JSON lines.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def validate(
    gpu: bool,
    mask_paths: tuple[str, ...],
    backend_names: tuple[str, ...],
    as_json: bool,
    out: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Run schedules on a real kernel: predicted beside measured time, hit ratio, HBM reads.

    Every output is checked against float32 attention first. Q, K and V are random normal.
    """
    from wavealign.gpu.registry import BACKEND_NAMES, find_backend
    from wavealign.order import parse_policy
    from wavealign.runs.lines import ResultWriter

    for policy in options["policies"] or DEFAULT_POLICIES:
        parse_policy(policy)
    for name in backend_names:
        if name not in BACKEND_NAMES:
            raise unknown_name("backend", name, BACKEND_NAMES)
    if options["trace"] and set(backend_names) != {"triton"}:
        raise InputError("--trace needs --backend triton: no other kernel says where its rows ran.")
    _require_gpu(gpu)
    from wavealign.gpu.telemetry import Telemetry

    backends = [find_backend(name) for name in backend_names]
    masks = [load_heads(path, options) for path in mask_paths]
    rows: list[Result] = []
    with ExitStack() as stack:
        telemetry = stack.enter_context(Telemetry())
        writer = stack.enter_context(ResultWriter(out)) if out else None
        runs = _Runs(options, telemetry.read().name, quiet)
        # Everything is planned, and may be refused, before anything runs.
        plan = [(b, [c for loaded in masks for c in runs.cases(b, *loaded)]) for b in backends]
        try:
            for backend, case, counters in runs.counted(plan):
                pairs = []
                for measured, predicted in runs.run(backend, case, counters, telemetry):
                    rows.append(measured)
                    pairs.append((measured, predicted))
                    if writer is not None:
                        writer.write([measured])
                    if as_json:
                        click.echo(measured.to_json())
                if not as_json:
                    _print(backend, case, pairs)
        except KeyboardInterrupt:
            kept = f" {out} holds them." if out else ""
            raise Failure(f"interrupted after {len(rows)} rows.{kept}", 1) from None


def _require_gpu(asked: bool) -> None:
    if not asked:
        raise MissingCapabilityError(
            "validate measures on a GPU: say --gpu, on a machine that has one. `wavealign sim` "
            "predicts without."
        )
    from wavealign._extras import require

    torch = require("torch", "gpu", "validate --gpu")
    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no CUDA device (driver missing, or none visible)"
        )
        raise MissingCapabilityError(
            f"validate --gpu needs an NVIDIA GPU: {why}. `wavealign doctor` says more."
        )


class _Runs:
    """What the options mean: cases to measure, and the prediction for each row."""

    def __init__(self, options: dict[str, Any], gpu_name: str, quiet: bool) -> None:
        from wavealign.gpu.measure import Options
        from wavealign.sim.devices import device_of_gpu, load_device

        self._given = options
        self._quiet = quiet
        name = options["device_name"] or device_of_gpu(gpu_name)
        self._profile: DeviceProfile | None = None if name is None else load_device(name)
        self._device = gpu_name if self._profile is None else self._profile.name
        self._options = Options(
            regimes=tuple(dict.fromkeys(options["regimes"])),
            repeats=options["repeats"],
            settle_s=options["seconds"] / 2,
            measure_s=options["seconds"],
            check=options["check"],
            limit=options["limit"],
            dense=options["dense"],
            cache_control=options["cache_control"],
            seed=options["seed"],
        )

    def cases(self, backend: Backend, loaded: LoadedMask, head_ids: list[int]) -> Iterator[Case]:
        """One launch of all heads, or one a head; refused ones raise before anything ran."""
        import torch

        from wavealign.gpu.measure import Case
        from wavealign.gpu.sizes import Sizes
        from wavealign.units import format_heads

        given = self._given
        properties = torch.cuda.get_device_properties(0)
        scopes = [[i] for i in range(loaded.mask.H)] if given["per_head"] else [None]
        for scope in scopes:
            mask = loaded.mask if scope is None else loaded.mask.select_heads(scope)
            kv_heads = given["kv_heads"]
            sizes = Sizes.of(mask, given["batch"], kv_heads, given["head_dim"], given["dtype"])
            backend.check(sizes, torch.cuda.get_device_capability(0))
            wave = given["wave"] or properties.multi_processor_count * backend.rows_per_sm(sizes)
            ids = head_ids if scope is None else [head_ids[scope[0]]]
            schedules, files = self._schedules(
                mask, wave, None if given["heads"] is None and scope is None else ids
            )
            yield Case(
                mask,
                sizes,
                schedules,
                loaded.name,
                format_heads(ids),
                ids[0] if scope is not None else None,
                self._device,
                wave,
                files,
            )

    def _schedules(
        self, mask: Any, wave: int, heads: list[int] | None
    ) -> tuple[list[Schedule], dict[str, str]]:
        from wavealign.order import build_schedule

        schedules = [
            build_schedule(mask, policy, wave, self._given["seed"], cores())
            for policy in self._given["policies"] or DEFAULT_POLICIES
        ]
        files = {}
        for path in self._given["schedule_paths"]:
            schedule = fitting_schedule(path, mask, heads)
            schedules.append(schedule)
            files[schedule.policy] = path
        names = [schedule.policy for schedule in schedules]
        if len(set(names)) < len(names):
            raise InputError("a policy or schedule is named twice.")
        return schedules, files

    def counted(
        self, plan: Sequence[tuple[Backend, list[Case]]]
    ) -> Iterator[tuple[Backend, Case, dict[str, Counters] | None]]:
        """The cases in turn, with their counters if they are wanted: a child process a backend."""
        from wavealign.gpu.measure import count_cases

        for backend, cases in plan:
            if not self._given["counters"]:
                yield from ((backend, case, None) for case in cases)
                continue
            if not self._quiet:
                click.echo(f"{backend.name}: reading counters, {len(cases)} launches", err=True)
            counters = count_cases(backend, cases, self._options)
            yield from zip([backend] * len(cases), cases, counters, strict=True)

    def run(
        self,
        backend: Backend,
        case: Case,
        counters: dict[str, Counters] | None,
        telemetry: Telemetry,
    ) -> Iterator[Pair]:
        """Measured rows, each with its prediction."""
        from wavealign.gpu.measure import measure
        from wavealign.report.progress import Progress

        schedules = {schedule.policy: schedule for schedule in case.schedules}
        steps = len(case.schedules) * (len(self._options.regimes) + self._options.check)
        steps += self._options.check + self._options.dense
        with Progress(steps, f"{backend.name}, {case.mask_name}", self._quiet) as progress:
            rows = measure(backend, case, self._options, telemetry, counters, progress.advance)
            for row in rows:
                yield row, self._predict(backend, case, schedules[row.policy], row)
        if self._given["trace"]:
            self._trace(backend, case)

    def _predict(
        self, backend: Backend, case: Case, schedule: Schedule, row: Result
    ) -> Result | None:
        from wavealign.sim.setup import Setup
        from wavealign.sim.simulate import run_schedule

        profile, sizes = self._profile, case.sizes
        unmodelled = sizes.batch > 1 or sizes.heads_per_kv_head > 1
        if not self._given["predict"] or unmodelled:
            return None
        if profile is None or backend.name not in profile.kernels:
            return None
        setup = Setup.make(
            profile,
            backend.name,
            wave=case.wave,
            head_dim=sizes.head_dim,
            dtype=sizes.dtype,
            regime=row.regime or "single",
        )
        executed = backend.capabilities.layout_for(sizes).executed(schedule)
        return run_schedule(case.mask, executed, setup, seed=row.seed, name=case.mask_name)

    def _trace(self, backend: Backend, case: Case) -> None:
        from wavealign.gpu.row_table import TritonRows
        from wavealign.gpu.trace import write_traces

        assert isinstance(backend, TritonRows)
        stem = Path(case.mask_name).name + ("" if case.head is None else f"_head{case.head}")
        path = Path(self._given["trace"]) / f"{stem}.npz"
        write_traces(path, backend, case.sizes, case.schedules, self._options.seed)
        click.echo(f"{path}: traces of {len(case.schedules)} launches", err=True)


def _print(backend: Backend, case: Case, pairs: list[Pair]) -> None:
    from wavealign.report.tables import print_table
    from wavealign.report.validation import costs_line, validation_table, verdict_line

    mask = case.mask
    first = pairs[0][0]
    click.echo(
        f"{case.mask_name}, heads {case.heads}: {mask.M} x {mask.N} blocks of {mask.block_q} x "
        f"{mask.block_kv} tokens, density {mask.density:.3f}; {first.backend_version} on "
        f"{first.gpu}, driver {first.driver}, {case.wave} rows in flight"
    )
    for regime in dict.fromkeys(measured.regime for measured, _ in pairs):
        part = [pair for pair in pairs if pair[0].regime == regime]
        click.echo(f"\n{regime}:")
        print_table(validation_table(part))
        click.echo(verdict_line(part))
    dense = first.dense_ms
    if dense is not None:
        gaps = ", ".join(f"{m.policy} {m.gap:.2f}" for m, _ in pairs if m.gap is not None)
        click.echo(f"dense attention takes {dense:.2f} ms; gap (1/density) / speedup: {gaps}.")
    click.echo(costs_line([measured for measured, _ in pairs]) + "\n")
