"""`wavealign calibrate`: fit a device profile to measured runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wavealign.cli.failure import Command
from wavealign.cli.options import json_option
from wavealign.cli.output import remark, say, say_json
from wavealign.cli.paths import Input, Output
from wavealign.errors import InputError
from wavealign.foreign import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wavealign.runs.result import Result
    from wavealign.sim.devices import DeviceProfile
    from wavealign.sim.recordings import Recording


@click.command(cls=Command)
@click.option(
    "--runs", multiple=True, type=Input(),
    help="Measured runs (JSON lines, or a folder with runs.jsonl), repeatable.",
)  # fmt: skip
@click.option(
    "--masks", multiple=True, type=Input(),
    help="Their masks: a file or folder for each --runs; default: beside the runs.",
)  # fmt: skip
@click.option("--device", required=True, type=Input(), metavar="TEXT",
              help="Profile to start from, by name or path.")  # fmt: skip
@click.option("--kernel", help="Kernel that ran; default: the device's first.")
@click.option("--all", "use_all", is_flag=True, help="Fit on all masks, not on every other one.")
@click.option("--guard", "for_guard", is_flag=True,
              help="Fit the guard's constants instead; --simulate adds masks.")  # fmt: skip
@click.option("--simulate", multiple=True, type=Input(),
              help="With --guard: simulate the candidates on this mask, repeatable.")  # fmt: skip
@click.option("--out", type=Output(".toml"), help="The profile to write (.toml).")
@json_option
def calibrate(
    runs: tuple[str, ...],
    masks: tuple[str, ...],
    device: str,
    kernel: str | None,
    use_all: bool,
    for_guard: bool,
    simulate: tuple[str, ...],
    out: str | None,
    as_json: bool,
) -> None:
    """Fit a profile's free figures on half of the masks and print the error on the rest.

    Fitted: usable share of L2, spread of the SMs' speeds, exposed misses; cycles per block of
    each tile, and the power budget. With --guard: the constants of the guard's cost model, on
    the runs and on simulations.
    """
    from wavealign._version import __version__
    from wavealign.outputs import whole_file
    from wavealign.sim.calibrate import calibrate as fit
    from wavealign.sim.calibrate import replay
    from wavealign.sim.devices import load_device, profile_toml
    from wavealign.sim.recordings import load_recordings
    from wavealign.sim.setup import Setup

    profile = load_device(device)
    entry = profile.kernel(kernel)
    if masks and len(masks) != len(runs):
        raise InputError(f"{len(runs)} --runs and {len(masks)} --masks; expected one for each.")
    if for_guard:
        from wavealign.cli.calibrate_guard import calibrate_guard

        calibrate_guard(runs, masks, simulate, device, kernel, out, as_json)
        return
    if simulate:
        raise InputError("--simulate goes with --guard.")
    if not runs:
        raise InputError("--runs is missing: measured runs to fit (JSON lines).")
    places = zip(runs, masks or [None] * len(runs), strict=True)
    found = [r for path, where in places for r in load_recordings(path, where, entry.name)]
    cards = sorted({recording.launch.device for recording in found})
    if len(cards) > 1:
        raise InputError(f"runs of {' and '.join(cards)}; expected those of one card.")
    if cards and cards != [profile.name]:
        remark(f"runs of {cards[0]} change the profile of {profile.name}.")
    names = sorted({recording.mask_name for recording in found})
    fitted_names = names if use_all else names[::2]
    train = [r for r in found if r.mask_name in fitted_names]
    rest = [r for r in found if r.mask_name not in fitted_names]
    fitted = fit(train, profile, entry.name, remark)
    files = ", ".join(shown(Path(path).name) for path in runs)
    note = f"{len(train)} runs of {len(fitted_names)} masks ({files}), wavealign {__version__}"
    fitted = _with_provenance(fitted, entry.name, note)
    setup = Setup.make(fitted, entry.name)
    pairs = [(part, replay(part, setup)) for part in (train, rest)]
    both = ([*train, *rest], [*pairs[0][1], *pairs[1][1]])
    for label, (part, results) in zip(("fitted", "held out", "all"), (*pairs, both), strict=True):
        if part:
            _print_errors(label, part, results, as_json)
    if out is not None:
        with whole_file(out) as stream:
            stream.write(profile_toml(fitted).encode())
        say(f"{out}: profile '{fitted.name}', calibrated on {note}", err=as_json)


def _with_provenance(profile: DeviceProfile, kernel: str, note: str) -> DeviceProfile:
    from wavealign.sim.calibrate import fitted_fields

    fields = fitted_fields(profile, kernel)
    entry = dataclasses.replace(profile.kernels[kernel], calibrated_on=note)
    return dataclasses.replace(
        profile,
        kernels={**profile.kernels, kernel: entry},
        sources={**profile.sources, **dict.fromkeys(fields, f"calibrated on {note}")},
    )


def _print_errors(
    label: str, part: Sequence[Recording], results: Sequence[Result], as_json: bool
) -> None:
    import numpy as np

    from wavealign.sim.calibrate import replay_errors

    errors = replay_errors(part, results)
    row: dict[str, object] = {"set": label, "runs": len(part)}
    for name in ("hit_points", "sector_points", "read_percent", "time_percent"):
        values = np.abs(getattr(errors, name))
        row[f"{name}_mean"] = float(values.mean()) if values.size else None
        row[f"{name}_worst"] = float(values.max()) if values.size else None
    if as_json:
        say_json({"schema": "wavealign.calibration/1", **row})
        return

    def pair(name: str) -> str:
        mean, worst = row[f"{name}_mean"], row[f"{name}_worst"]
        return "-" if mean is None else f"{mean:.2f} (worst {worst:.1f})"

    say(
        f"{label:9} {len(part):4} runs: hit ratio {pair('hit_points')} points, profiler's "
        f"{pair('sector_points')}, HBM reads {pair('read_percent')} % of requested, time "
        f"{pair('time_percent')} %"
    )
