"""Nsight Compute (ncu) as a child process: find it, ask what it can count, run it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from wavealign.errors import InputError, MissingCapabilityError, WaveAlignError
from wavealign.gpu.counters import (
    METRICS,
    QUANTITIES,
    REQUIRED,
    Counters,
    derive,
    gist,
    last_lines,
    parse_csv,
)

NCU_REMEDY = (
    "install Nsight Compute (apt install cuda-nsight-compute-13-0 from NVIDIA's repository, or "
    "conda install -c nvidia nsight-compute), or set WAVEALIGN_NCU to the path of ncu"
)

# What ncu or the program says (a pattern) -> what it means and what to do.
_CAUSES = {
    "ERR_NVGPUCTRPERM": (
        "this user may not read the GPU's performance counters: run as root or with CAP_SYS_ADMIN "
        "or CAP_PERFMON (docker run --cap-add SYS_ADMIN), or have the driver loaded with "
        "NVreg_RestrictProfilingToAdminUsers=0"
    ),
    "LibraryNotLoaded": (
        "ncu can't load the driver's counter library: ncu and driver don't fit (set WAVEALIGN_NCU "
        "to another ncu), or a sandbox such as gVisor hides it (run outside of it)"
    ),
    "driver resource was unavailable": (
        "another tool holds the counters: stop it (DCGM: dcgmi profile --pause)"
    ),
    "Profiling is not supported on device": (
        "this ncu doesn't know this GPU: set WAVEALIGN_NCU to a newer one"
    ),
    "connect to the CUDA driver|no CUDA-capable device|No CUDA GPUs|Found no NVIDIA driver": (
        "no usable NVIDIA GPU or driver: see nvidia-smi; a container needs --gpus all"
    ),
}

_TERMINATE_S = 5.0
_QUERY_S = 120.0


def find_ncu() -> str | None:
    """Path of ncu: ``$WAVEALIGN_NCU``, then PATH, then where its packages install it.

    Raises:
        InputError: ``$WAVEALIGN_NCU`` is set to something that can't be run.
    """
    if wanted := os.environ.get("WAVEALIGN_NCU"):
        if found := shutil.which(wanted):
            return found
        raise InputError(f"WAVEALIGN_NCU is '{wanted}'; expected the path of an executable ncu.")
    newest_first = sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*/ncu")), reverse=True)
    places = ("ncu", *newest_first, "/usr/local/cuda/bin/ncu")
    return next(filter(None, map(shutil.which, places)), None)


def available_metrics(ncu: str, names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that ncu lists for this machine's GPUs; all, where it can't list."""
    listed = _listed_metrics(ncu)
    if not listed:
        return tuple(names)
    return tuple(n for n in names if n.partition(".")[0] in listed)


@functools.lru_cache(maxsize=8)
def _listed_metrics(ncu: str) -> frozenset[str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [ncu, "--query-metrics"],
            capture_output=True, text=True, errors="replace", timeout=_QUERY_S, check=True,
        )  # fmt: skip
        return frozenset(re.findall(r"^([a-z]\w*__\w+)", done.stdout, re.MULTILINE))
    return frozenset()


def _chosen_metrics(ncu: str) -> list[str]:
    """One metric a quantity: every metric may cost another replay of the kernel."""
    available = set(available_metrics(ncu, METRICS))
    found = {q: [n for n in names if n in available] for q, names in QUANTITIES.items()}
    if lost := [" or ".join(QUANTITIES[q]) for q in REQUIRED if not found[q]]:
        raise MissingCapabilityError(
            f"{ncu} can't collect {', '.join(lost)} on this GPU; a newer ncu may (set "
            "WAVEALIGN_NCU), see `ncu --query-metrics`."
        )
    return [names[0] for names in found.values() if names]


def collect(
    command: Sequence[str], expected: int, *, cache_control: str = "all", timeout_s: float,
) -> list[Counters]:  # fmt: skip
    """Run `command` under ncu and return the counters of the kernels that it marks.

    The command marks them with ``cudaProfilerStart`` and ``cudaProfilerStop``. Its output is
    discarded. Leaving by an exception (Ctrl-C too) ends it and all that it started.

    Args:
        command: program and arguments.
        expected: how many kernels it marks.
        cache_control: ``"all"`` (caches flushed before every replay: cold) or ``"none"``.
        timeout_s: for the whole run.

    Raises:
        MissingCapabilityError: no ncu, no driver, no permission, no such counter.
        WaveAlignError: the command failed, took too long, or marked other than `expected`
            kernels.
    """
    ncu = find_ncu()
    if ncu is None:
        raise MissingCapabilityError(f"hardware counters need ncu, which isn't here: {NCU_REMEDY}.")
    metrics = ",".join(_chosen_metrics(ncu))
    with tempfile.TemporaryDirectory(prefix="wavealign-ncu-") as folder:
        log, out, err = (Path(folder) / name for name in ("log.csv", "out", "err"))
        log.touch()  # ncu may fail before it writes one
        arguments = [
            ncu, "--target-processes", "all", "--profile-from-start", "off",
            "--replay-mode", "kernel", "--cache-control", cache_control,
            "--clock-control", "none", "--metrics", metrics, "--csv", "--page", "raw",
            "--print-units", "base", "--log-file", str(log), "--", *command,
        ]  # fmt: skip
        returncode = _run(arguments, out, err, timeout_s)
        table, output, errors = (
            path.read_text("utf-8", errors="replace") for path in (log, out, err)
        )
    try:
        if returncode != 0:
            raise WaveAlignError(
                f"{command[0]} failed under ncu (exit code {returncode}): "
                f"{last_lines(errors) or 'nothing on stderr'}; ncu said: {gist(table + output)}"
            )
        launches = [derive(row) for row in parse_csv(table)]
    except WaveAlignError as problem:
        said = "\n".join((table, output, errors))
        for sign, meaning in _CAUSES.items():
            if re.search(sign, said):
                raise MissingCapabilityError(f"hardware counters: {meaning}.") from problem
        raise
    if len(launches) != expected:
        raise WaveAlignError(
            f"ncu profiled {len(launches)} kernels where {expected} were expected: "
            f"{', '.join(launch.kernel for launch in launches)}."
        )
    return launches


def _run(arguments: Sequence[str], out: Path, err: Path, timeout_s: float) -> int:
    # Files rather than pipes: a grandchild that outlives a kill can't keep us reading.
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout_s)
        except BaseException as problem:
            _end(process)
            if not isinstance(problem, subprocess.TimeoutExpired):
                raise
            raise WaveAlignError(
                f"the run under ncu didn't end within {timeout_s:g} s and was stopped."
            ) from problem


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group, gently first: ncu gives clocks and counters back."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
