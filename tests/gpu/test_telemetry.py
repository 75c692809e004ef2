"""NVML readings, against a stand-in for the module `pynvml`."""

from __future__ import annotations

import sys
import time
import types

import pytest
from fake_nvml import FakeNvml

from wavealign.errors import InputError, MissingCapabilityError, WaveAlignError
from wavealign.gpu.telemetry import DeviceState, Telemetry


@pytest.fixture
def bindings(monkeypatch):
    """The stand-in; nothing is hidden from CUDA."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.fixture
def nvml(bindings, monkeypatch):
    """The same where torch isn't installed."""
    monkeypatch.setitem(sys.modules, "torch", None)
    return bindings


def test_a_reading(nvml):
    nvml.bits = 0x4
    with Telemetry(0) as telemetry:
        assert nvml.sessions == 1
        assert telemetry.read() == DeviceState(
            name="Card 0",
            driver="580.159.04",
            sm_clock_ghz=pytest.approx(1.98),
            power_w=pytest.approx(698.5),
            power_cap_w=pytest.approx(700.0),
            temperature_c=41,
            throttle=("sw_power_cap",),
            energy_j=pytest.approx(5001.5),
        )
    assert nvml.sessions == 0


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0x0, ()),
        (0x1, ()),  # idle is no throttle
        (0x41, ("hw_thermal_slowdown",)),
        (0x2 | 0x20, ("applications_clocks_setting", "sw_thermal_slowdown")),
        (0x8 | 0x10 | 0x80 | 0x100,
         ("hw_slowdown", "sync_boost", "hw_power_brake_slowdown", "display_clock_setting")),
    ],
)  # fmt: skip
def test_throttle_reasons(nvml, bits, names):
    nvml.bits = bits
    with Telemetry() as telemetry:
        assert telemetry.read().throttle == names


@pytest.mark.parametrize("error", [3, 4, 13])
@pytest.mark.parametrize(
    ("call", "fields"),
    [
        ("nvmlDeviceGetClockInfo", {"sm_clock_ghz"}),
        ("nvmlDeviceGetPowerUsage", {"power_w"}),
        ("nvmlDeviceGetEnforcedPowerLimit", {"power_cap_w"}),
        ("nvmlDeviceGetTemperature", {"temperature_c"}),
        ("nvmlDeviceGetTotalEnergyConsumption", {"energy_j"}),
    ],
)
def test_what_the_card_does_not_support_is_none(nvml, call, fields, error):
    nvml.failing[call] = error
    with Telemetry() as telemetry:
        state = vars(telemetry.read())
    assert {name for name, value in state.items() if value is None} == fields


def test_throttle_reasons_by_their_older_name(nvml):
    nvml.bits = 0x4
    nvml.failing["nvmlDeviceGetCurrentClocksEventReasons"] = 13
    with Telemetry() as telemetry:
        assert telemetry.read().throttle == ("sw_power_cap",)
        nvml.failing["nvmlDeviceGetCurrentClocksThrottleReasons"] = 3
        assert telemetry.read().throttle is None


def test_bindings_that_lack_a_call(nvml, monkeypatch):
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetTotalEnergyConsumption")
    with Telemetry() as telemetry:
        assert telemetry.read().energy_j is None


def test_other_errors_are_errors(nvml):
    nvml.failing["nvmlDeviceGetPowerUsage"] = 15
    with (
        Telemetry() as telemetry,
        pytest.raises(WaveAlignError, match="PowerUsage failed on Card 0: NVML error 15"),
    ):
        telemetry.read()


def test_samples(nvml):
    clocks = [1.0, 2.0, 1.5]
    nvml.sm_mhz = lambda read: 1000 * clocks[min(read, len(clocks)) - 1]
    nvml.bits = 0x4
    with Telemetry() as telemetry, telemetry.sample(0.001) as sampler:
        while nvml.reads < 2:
            time.sleep(0.001)
        nvml.bits = 0x40
        seen = nvml.reads
        while nvml.reads < max(8, seen + 2):  # the one under way may have looked before
            time.sleep(0.001)
    found = sampler.summary()
    assert found.sm_clock_ghz == pytest.approx(1.5)
    assert found.power_w == pytest.approx(698.5)
    assert found.temperature_c == 40 + nvml.reads
    assert found.throttle == ("hw_thermal_slowdown", "sw_power_cap")
    assert 8 * 1.5 <= found.energy_j <= nvml.reads * 1.5


def test_samples_of_a_card_that_reports_nothing(nvml):
    for call in (
        "ClockInfo", "PowerUsage", "Temperature", "CurrentClocksEventReasons",
        "CurrentClocksThrottleReasons", "TotalEnergyConsumption",
    ):  # fmt: skip
        nvml.failing[f"nvmlDeviceGet{call}"] = 3
    with Telemetry() as telemetry, telemetry.sample() as sampler:
        pass
    assert set(vars(sampler.summary()).values()) == {None}


def test_an_error_while_sampling_is_raised_on_leaving(nvml):
    nvml.failing["nvmlDeviceGetPowerUsage"] = 15
    with (
        Telemetry() as telemetry,
        pytest.raises(WaveAlignError, match="NVML error 15"),
        telemetry.sample(),
    ):
        pass
    with (
        Telemetry() as telemetry,
        pytest.raises(ValueError, match="what was measured failed"),
        telemetry.sample(),
    ):
        raise ValueError("what was measured failed")


def test_no_pynvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingCapabilityError, match=r"pip install 'wavealign\[gpu\]'"):
        Telemetry().__enter__()


def test_no_driver(nvml):
    nvml.failing["nvmlInit"] = 12
    with pytest.raises(MissingCapabilityError, match="install the NVIDIA driver"):
        Telemetry().__enter__()


@pytest.mark.parametrize(
    ("visible", "device", "name"),
    [
        (None, 1, "Card 1"),
        ("1", 0, "Card 1"),
        ("1, 0", 1, "Card 0"),
        ("GPU-bbbb", 0, "Card 1"),
    ],
)
def test_which_card_without_torch(nvml, monkeypatch, visible, device, name):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Telemetry(device) as telemetry:
        assert telemetry.read().name == name


@pytest.mark.parametrize(
    ("visible", "device"), [(None, 2), (None, -1), ("0", 1), ("", 0), ("GPU-cccc", 0)]
)
def test_no_such_device(nvml, monkeypatch, visible, device):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(InputError, match=f"CUDA device {device}"):
        Telemetry(device).__enter__()
    assert nvml.sessions == 0


def test_torch_names_the_card(bindings, monkeypatch):
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(
        device_count=lambda: 2,
        # CUDA counts the faster card first, NVML counts along the bus.
        get_device_properties=lambda i: types.SimpleNamespace(uuid=["bbbb-2", "aaaa-1"][i]),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    with Telemetry(0) as first, Telemetry(1) as second:
        assert (first.read().name, second.read().name) == ("Card 1", "Card 0")


def test_the_real_torch_without_a_gpu(bindings):
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count():
        pytest.skip("there is a GPU")
    with Telemetry(1) as telemetry:
        assert telemetry.read().name == "Card 1"
