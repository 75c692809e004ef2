"""A stand-in for the module `pynvml`: two cards whose readings a test decides."""

from __future__ import annotations

import types

UUIDS = ["GPU-aaaa-1", "GPU-bbbb-2"]


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml(types.ModuleType):
    """Two cards; calls listed in `failing` raise the error of that number."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self):
        super().__init__("pynvml")
        self.failing = {}
        self.sessions = 0
        self.reads = 0
        self.bits = 0
        self.sm_mhz = lambda read: 1980  # by number of reads so far

    def _fail(self, call):
        if call in self.failing:
            raise NVMLError(self.failing[call])

    def nvmlInit(self):  # noqa: N802
        self._fail("nvmlInit")
        self.sessions += 1

    def nvmlShutdown(self):  # noqa: N802
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.159.04"

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index >= len(UUIDS):
            raise NVMLError(2)
        return index

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return UUIDS[handle]

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return f"Card {handle}"

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        self._fail("nvmlDeviceGetClockInfo")
        assert kind == self.NVML_CLOCK_SM
        self.reads += 1
        return self.sm_mhz(self.reads)

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        self._fail("nvmlDeviceGetPowerUsage")
        return 698_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):  # noqa: N802
        self._fail("nvmlDeviceGetEnforcedPowerLimit")
        return 700_000

    def nvmlDeviceGetTemperature(self, handle, sensor):  # noqa: N802
        self._fail("nvmlDeviceGetTemperature")
        return 40 + self.reads

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
        self._fail("nvmlDeviceGetCurrentClocksEventReasons")
        return self.bits

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        self._fail("nvmlDeviceGetCurrentClocksThrottleReasons")
        return self.bits

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        self._fail("nvmlDeviceGetTotalEnergyConsumption")
        return 5_000_000 + 1500 * self.reads
