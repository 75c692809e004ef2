"""Clocks, power, temperature and energy of a GPU, from NVML (package nvidia-ml-py)."""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from wavealign._extras import require
from wavealign.errors import InputError, MissingCapabilityError, WaveAlignError

# Bits of nvmlDeviceGetCurrentClocksEventReasons. Bit 0 is gpu_idle, which slows nothing down.
_THROTTLE_BITS = {
    0x002: "applications_clocks_setting", 0x004: "sw_power_cap", 0x008: "hw_slowdown",
    0x010: "sync_boost", 0x020: "sw_thermal_slowdown", 0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown", 0x100: "display_clock_setting",
}  # fmt: skip


@dataclass(frozen=True)
class DeviceState:
    """A GPU at one moment. What the card doesn't report is None.

    Attributes:
        name: product name.
        driver: driver version.
        sm_clock_ghz: current clock.
        power_w: board power; newer cards average it over a second.
        power_cap_w: the limit that is enforced.
        temperature_c: of the GPU.
        throttle: what holds the clock down, e.g. ``"sw_power_cap"``.
        energy_j: counter since the driver was loaded; it advances every few tens of ms.
    """

    name: str
    driver: str
    sm_clock_ghz: float | None
    power_w: float | None
    power_cap_w: float | None
    temperature_c: float | None
    throttle: tuple[str, ...] | None
    energy_j: float | None


@dataclass(frozen=True)
class Summary:
    """An interval: median clock and power, highest temperature, every throttle that was seen.

    Energy is the difference of the energy counter, not a sum over samples of power.
    """

    sm_clock_ghz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle: tuple[str, ...] | None
    energy_j: float | None


@contextlib.contextmanager
def nvml_session() -> Iterator[ModuleType]:
    """The `pynvml` module between nvmlInit and nvmlShutdown.

    Raises:
        MissingCapabilityError: no nvidia-ml-py, or no driver.
    """
    nvml = require("pynvml", "gpu", "reading clocks and power")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        raise MissingCapabilityError(
            f"NVML can't be started ({problem}): install the NVIDIA driver; a container needs "
            "--gpus all."
        ) from problem
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


class Telemetry:
    """Reads one GPU; a context manager.

    Args:
        device: CUDA index, as torch counts.
    """

    def __init__(self, device: int = 0) -> None:
        self._device = device
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Telemetry:
        """Start NVML and find the device.

        Raises:
            MissingCapabilityError: no nvidia-ml-py, or no driver.
            InputError: there is no such device.
        """
        with contextlib.ExitStack() as stack:
            self._nvml = stack.enter_context(nvml_session())
            self._handle = _find(self._nvml, self._device)
            self._driver = self._nvml.nvmlSystemGetDriverVersion()
            self._name = self._nvml.nvmlDeviceGetName(self._handle)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self) -> DeviceState:
        """The state now."""
        nvml = self._nvml
        return DeviceState(
            name=self._name, driver=self._driver,
            sm_clock_ghz=self._ask(1e-3, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            power_w=self._ask(1e-3, "nvmlDeviceGetPowerUsage"),
            power_cap_w=self._ask(1e-3, "nvmlDeviceGetEnforcedPowerLimit"),
            temperature_c=self._ask(1, "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            throttle=self._throttle(), energy_j=self.energy_j(),
        )  # fmt: skip

    def energy_j(self) -> float | None:
        """The energy counter alone."""
        return self._ask(1e-3, "nvmlDeviceGetTotalEnergyConsumption")

    def sample(self, period_s: float = 0.02) -> Sampler:
        """A context manager that reads the state every `period_s` while it is entered."""
        return Sampler(self, period_s)

    def _throttle(self) -> tuple[str, ...] | None:
        for call in ("EventReasons", "ThrottleReasons"):  # the name before driver 535
            bits = self._ask(1, f"nvmlDeviceGetCurrentClocks{call}")
            if bits is not None:
                return tuple(name for bit, name in _THROTTLE_BITS.items() if int(bits) & bit)
        return None

    def _ask(self, unit: float, call: str, *arguments: Any) -> float | None:
        """What an NVML call answers, or None where card, driver or bindings don't know it."""
        nvml = self._nvml
        function = getattr(nvml, call, None)
        if function is None:
            return None
        try:
            return float(function(self._handle, *arguments) * unit)
        except nvml.NVMLError as problem:
            if problem.value in (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NO_PERMISSION,
            ):
                return None
            raise WaveAlignError(f"{call} failed on {self._name}: {problem}.") from problem


class Sampler:
    """Samples of a device from a background thread, between entering and leaving."""

    def __init__(self, telemetry: Telemetry, period_s: float) -> None:
        self._telemetry, self._period_s = telemetry, period_s
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, "wavealign-nvml")

    def __enter__(self) -> Sampler:
        self._start_j = self._telemetry.energy_j()
        self._samples = self._thread.submit(self._work)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._end_j = self._telemetry.energy_j()
        finally:
            self._stop.set()
            self._thread.shutdown()
        if kind is None:
            self._samples.result()  # raises what went wrong there

    def _work(self) -> list[DeviceState]:
        states = [self._telemetry.read()]
        while not self._stop.wait(self._period_s):
            states.append(self._telemetry.read())
        return states

    def summary(self) -> Summary:
        """The interval, once it was left."""
        states, start_j, end_j = self._samples.result(), self._start_j, self._end_j
        throttles = [state.throttle for state in states if state.throttle is not None]
        return Summary(
            sm_clock_ghz=_over(statistics.median, (state.sm_clock_ghz for state in states)),
            power_w=_over(statistics.median, (state.power_w for state in states)),
            temperature_c=_over(max, (state.temperature_c for state in states)),
            throttle=tuple(sorted(set().union(*throttles))) if throttles else None,
            energy_j=None if start_j is None or end_j is None else end_j - start_j,
        )


def _find(nvml: ModuleType, index: int) -> Any:
    """NVML's handle of a CUDA device: the two may count the same cards in different orders."""
    wanted = _torch_uuid(index) or _visible_device(index)
    try:
        if wanted.isdecimal():
            return nvml.nvmlDeviceGetHandleByIndex(int(wanted))
        for i in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(i)
            if nvml.nvmlDeviceGetUUID(handle).startswith(wanted):
                return handle
    except nvml.NVMLError as problem:
        raise InputError(f"NVML can't open CUDA device {index} ({wanted}): {problem}.") from problem
    raise InputError(f"NVML has no GPU '{wanted}', which is CUDA device {index}.")


def _torch_uuid(index: int) -> str | None:
    """The device's UUID, or None where torch doesn't see a GPU."""
    try:
        cuda = importlib.import_module("torch").cuda
    except (ImportError, OSError):  # OSError: CUDA libraries that can't be loaded
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build without a driver warns
        if not 0 <= index < cuda.device_count():
            return None
        uuid = getattr(cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _visible_device(index: int) -> str:
    """An NVML index or the start of a UUID. Indices assume ``CUDA_DEVICE_ORDER=PCI_BUS_ID``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    names = [name.strip() for name in visible.split(",")]
    if not 0 <= index < len(names) or not names[index]:
        raise InputError(f"no CUDA device {index}: CUDA_VISIBLE_DEVICES is '{visible}'.")
    return names[index]


def _over(reduce: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return reduce(known) if known else None
