"""`wavealign calibrate --guard`: fit the guard's constants to runs and simulations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from wavealign.cli.output import remark, say, say_json
from wavealign.errors import InputError
from wavealign.foreign import shown


def calibrate_guard(
    runs: tuple[str, ...],
    masks: tuple[str, ...],
    simulate: tuple[str, ...],
    device: str,
    kernel: str | None,
    out: str | None,
    as_json: bool,
) -> None:
    """Fit, print the errors on what was fitted, write the profile.

    Args:
        runs, masks: JSON lines of measured runs, and the folder or file of masks of each.
        simulate: mask files to simulate.
        device, kernel: the profile's; None for the device's first kernel.
        out: the file of the profile; None to print the errors alone.
        as_json: errors as JSON lines.

    Raises:
        InputError: nothing to fit, or files that can't be read.
    """
    from wavealign._version import __version__
    from wavealign.guard.calibrate import fit_errors, fit_guard, measured_cases, simulated_cases
    from wavealign.guard.model import CostModel
    from wavealign.guard.profile import guard_profile_names, load_guard_profile
    from wavealign.masks import load_mask
    from wavealign.outputs import whole_file
    from wavealign.sim.devices import load_device
    from wavealign.sim.recordings import load_recordings

    profile = load_device(device)
    entry = profile.kernel(kernel)
    start = load_guard_profile(profile.name if profile.name in guard_profile_names() else "h200")
    if start.device != profile.name:  # planning times of another card are no measurement here
        start = dataclasses.replace(start, plan_source=f"as on {start.device}: an estimate")
    start = dataclasses.replace(start, device=profile.name, kernel=entry.name)
    model = CostModel.make(profile, entry.name, profile=start)
    found = []
    for path, where in zip(runs, masks or [None] * len(runs), strict=True):
        found += measured_cases(list(load_recordings(path, where, entry.name)))
    for path in simulate:
        remark(f"simulating {path}")
        found += simulated_cases(load_mask(path).mask, model)
    if not found:
        raise InputError("nothing to fit: give measured runs (--runs) or masks (--simulate).")
    names = ", ".join(shown(Path(path).name) for path in (*runs, *simulate))
    parts = {s: [case for case in found if case.source == s] for s in ("measured", "simulated")}
    counts = " and ".join(f"{len(part)} {source}" for source, part in parts.items())
    note = f"{counts} runs ({names}), wavealign {__version__}"
    fitted = fit_guard(found, model, note, remark)
    for source, part in parts.items():
        if not part:
            continue
        errors = fit_errors(part, fitted)
        if as_json:
            row = {"schema": "wavealign.guard.calibration/1", "source": source}
            say_json({**row, **dataclasses.asdict(errors)})
        else:
            say(
                f"{source}: {errors.cases} runs, hit ratio {errors.hit_points:.2f} points, speedup "
                f"{errors.speedup_percent:.2f} % (mean absolute errors)"
            )
    if out is not None:
        with whole_file(out) as stream:
            stream.write(fitted.profile.to_toml().encode())
        say(f"{out}: guard profile '{fitted.profile.device}'", err=as_json)
