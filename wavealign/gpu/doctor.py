"""What this machine has of what measuring on a GPU needs, a line each."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from wavealign._extras import require
from wavealign._version import __version__
from wavealign.errors import MissingCapabilityError, WaveAlignError
from wavealign.gpu.ncu import NCU_REMEDY, collect, find_ncu
from wavealign.gpu.telemetry import Telemetry, nvml_session

if TYPE_CHECKING:
    from wavealign.gpu.backend import Backend
    from wavealign.gpu.registry import Refused

State = Literal["ok", "missing", "warning"]

_INSTALL = "pip install 'wavealign[gpu]'"

# One kernel that reads 16 MiB which the cache control of ncu has evicted.
_PROBE = """
import torch
x = torch.ones(1 << 22, device="cuda")
torch.cuda.synchronize()
torch.cuda.profiler.start()
x.add_(1)
torch.cuda.synchronize()
torch.cuda.profiler.stop()
"""
_PROBE_S = 300.0


@dataclass(frozen=True)
class Check:
    """One component.

    Attributes:
        component: e.g. ``"torch"``.
        state: ``"ok"``, ``"missing"``, or ``"warning"`` (there, but not as it should be).
        detail: what was found.
        remedy: what to do, or None.
    """

    component: str
    state: State
    detail: str
    remedy: str | None = None


def diagnose(backends: Iterable[Backend | Refused], probe: bool = False) -> list[Check]:
    """Look at every component; one that breaks is reported like the others.

    Args:
        backends: attention backends; what iterating raises is reported too.
        probe: profile a small kernel to see whether its counters can be read.
    """
    own = Check("wavealign", "ok", f"{__version__}, Python {platform.python_version()}")
    parts: list[tuple[str, Callable[[], list[Check]]]] = [
        ("gpu", _gpus), ("driver", _driver), ("torch", _torch), ("triton", _triton),
        ("nvml", _nvml), ("ncu", lambda: _ncu(probe)),
        ("backends", lambda: [check for b in backends for check in _backend(b)]),
    ]  # fmt: skip
    return [own, *(check for component, part in parts for check in _guarded(component, part))]


def _guarded(component: str, part: Callable[[], list[Check]]) -> list[Check]:
    try:
        return part()
    except MissingCapabilityError as problem:
        lack, _, remedy = str(problem).partition(": ")
        return [Check(component, "missing", lack, remedy or None)]
    except Exception as problem:  # a broken installation can raise anything, and is the finding
        return [Check(component, "warning", f"{type(problem).__name__}: {problem}")]


def _gpus() -> list[Check]:
    with contextlib.suppress(MissingCapabilityError):
        cuda = _imported_torch().cuda
        cards = [cuda.get_device_properties(i) for i in range(cuda.device_count())]
        if cards:
            return [Check(f"gpu {i}", "ok", _described(card)) for i, card in enumerate(cards)]
    names: list[str] = []
    with contextlib.suppress(MissingCapabilityError), nvml_session() as nvml:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
    if not names:
        return [Check("gpu", "missing", "no NVIDIA GPU found", "simulation works without")]
    detail = f"{', '.join(names)}; torch doesn't see it"
    return [Check("gpu", "warning", detail, f"{_INSTALL}; see CUDA_VISIBLE_DEVICES")]


def _described(card: Any) -> str:
    return (
        f"{card.name}, compute capability {card.major}.{card.minor}, "
        f"{card.multi_processor_count} SMs, L2 {card.L2_cache_size:,} bytes"
    )


def _driver() -> list[Check]:
    with nvml_session() as nvml:
        version = nvml.nvmlSystemGetDriverVersion()
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return [Check("driver", "ok", f"{version}, CUDA {cuda // 1000}.{cuda % 1000 // 10}")]


def _torch() -> list[Check]:
    torch = _imported_torch()
    if torch.version.cuda is None:
        detail = f"{torch.__version__}, a build without CUDA"
        remedy = "install the CUDA build: pip install torch, without a CPU index"
        return [Check("torch", "warning", detail, remedy)]
    return [Check("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda}")]


def _imported_torch() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong is said in a check
        torch = require("torch", "gpu", "measuring on a GPU")
        torch.cuda.is_available()
    return torch


def _triton() -> list[Check]:
    try:
        return [Check("triton", "ok", importlib.metadata.version("triton"))]
    except importlib.metadata.PackageNotFoundError:
        return [Check("triton", "missing", "not installed", _INSTALL)]


def _nvml() -> list[Check]:
    with Telemetry() as telemetry:
        state = telemetry.read()
    readings = {
        "SM clock": state.sm_clock_ghz, "power": state.power_w,
        "throttle reasons": state.throttle, "energy counter": state.energy_j,
    }  # fmt: skip
    if unread := [name for name, value in readings.items() if value is None]:
        return [Check("nvml", "warning", f"{state.name} doesn't report {', '.join(unread)}")]
    detail = f"SM clock {state.sm_clock_ghz:.2f} GHz, {state.power_w:.0f} W"
    if state.power_cap_w is not None:
        detail += f" of {state.power_cap_w:.0f} W"
    return [Check("nvml", "ok", f"{detail}, energy counter")]


def _ncu(probe: bool) -> list[Check]:
    ncu = find_ncu()
    if ncu is None:
        return [Check("ncu", "missing", "Nsight Compute not found", NCU_REMEDY)]
    done = subprocess.run(
        [ncu, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    version = re.search(r"Version (\S+)", done.stdout)
    detail = f"{ncu} {version[1] if version else 'of unknown version'}"
    if not probe:
        detail += "; whether counters may be read: not probed"
        return [Check("ncu", "ok", detail, "wavealign doctor --probe")]
    try:
        (counters,) = collect([sys.executable, "-c", _PROBE], 1, timeout_s=_PROBE_S)
    except MissingCapabilityError as problem:
        return [Check("ncu", "missing", detail, str(problem))]
    except WaveAlignError as problem:
        return [Check("ncu", "warning", f"{detail}; {problem}")]
    if not counters.hbm_read_bytes:
        remedy = "try another ncu (WAVEALIGN_NCU), or run outside of a sandbox"
        return [Check("ncu", "warning", f"{detail}; it counts no HBM reads", remedy)]
    return [Check("ncu", "ok", f"{detail}; counters can be read")]


def _backend(backend: Backend | Refused) -> list[Check]:
    component = f"backend {backend.name}"

    def check() -> list[Check]:
        reason = backend.missing()
        return [Check(component, "missing" if reason else "ok", backend.title, reason)]

    return _guarded(component, check)
