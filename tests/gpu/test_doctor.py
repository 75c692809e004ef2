"""`wavealign doctor` on machines that lack this or that."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from dataclasses import dataclass

import pytest
from click.testing import CliRunner
from fake_nvml import FakeNvml

from wavealign.cli.doctor import doctor as command
from wavealign.errors import InputError, MissingCapabilityError, WaveAlignError
from wavealign.gpu import doctor
from wavealign.gpu.counters import Counters
from wavealign.gpu.doctor import Check, diagnose
from wavealign.report.gpu_tables import doctor_table
from wavealign.report.tables import print_table


@dataclass
class Stub:
    name: str
    reason: str | None = None
    title: str = "a kernel"

    def missing(self):
        if self.reason == "break":
            raise OSError("libcudart.so not found")
        return self.reason


@pytest.fixture
def bare(monkeypatch):
    """A machine without torch, NVML and ncu."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(doctor, "find_ncu", lambda: None)


@pytest.fixture
def equipped(monkeypatch, tmp_path):
    """A machine with a card, as far as Python can tell."""
    nvml = FakeNvml()
    nvml.nvmlSystemGetCudaDriverVersion_v2 = lambda: 13010
    card = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132,
        L2_cache_size=62_914_560, uuid="aaaa-1",
    )  # fmt: skip
    torch = types.ModuleType("torch")
    torch.__version__ = "2.11.0"
    torch.version = types.SimpleNamespace(cuda="13.0")
    torch.cuda = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda i: card,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    ncu = tmp_path / "ncu"
    ncu.write_text("#!/bin/sh\necho 'Version 2025.3.1.0 (build 3) (public-release)'\n")
    ncu.chmod(0o755)
    monkeypatch.setattr(doctor, "find_ncu", lambda: str(ncu))
    return types.SimpleNamespace(nvml=nvml, torch=torch, ncu=ncu)


def found(backends=(), probe=False):
    return {check.component: check for check in diagnose(backends, probe)}


def test_a_bare_machine(bare):
    checks = found()
    assert list(checks) == ["wavealign", "gpu", "driver", "torch", "triton", "nvml", "ncu"]
    assert checks.pop("wavealign").state == "ok"
    del checks["triton"]  # whether it is installed is none of this test's
    assert {check.state for check in checks.values()} == {"missing"}
    assert checks["torch"].remedy == checks["nvml"].remedy == "pip install 'wavealign[gpu]'"
    assert "cuda-nsight-compute" in checks["ncu"].remedy


def test_an_equipped_machine(equipped):
    checks = found([Stub("fa4")])
    del checks["triton"]
    assert {check.state for check in checks.values()} == {"ok"}
    assert checks["gpu 0"].detail == (
        "NVIDIA H200, compute capability 9.0, 132 SMs, L2 62,914,560 bytes"
    )
    assert checks["driver"].detail == "580.159.04, CUDA 13.1"
    assert checks["torch"].detail == "2.11.0, CUDA 13.0"
    assert checks["nvml"].detail == "SM clock 1.98 GHz, 698 W of 700 W, energy counter"
    assert checks["ncu"].detail == (
        f"{equipped.ncu} 2025.3.1.0; whether counters may be read: not probed"
    )


def test_triton(bare, monkeypatch):
    def absent(name):
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: f"3.6.0 of {name}")
    assert found()["triton"] == Check("triton", "ok", "3.6.0 of triton")
    monkeypatch.setattr(doctor.importlib.metadata, "version", absent)
    assert found()["triton"].state == "missing"


def test_a_torch_without_cuda(equipped):
    equipped.torch.version.cuda = None
    equipped.torch.cuda.device_count = lambda: 0
    checks = found()
    assert (checks["torch"].state, checks["gpu"].state) == ("warning", "warning")
    assert checks["gpu"].detail == "Card 0, Card 1; torch doesn't see it"


def test_a_card_that_reports_little(equipped):
    equipped.nvml.failing["nvmlDeviceGetTotalEnergyConsumption"] = 3
    check = found()["nvml"]
    assert (check.state, check.detail) == ("warning", "Card 0 doesn't report energy counter")


def test_what_breaks_is_reported(equipped, monkeypatch):
    def no_ncu():
        raise InputError("WAVEALIGN_NCU is 'x'")

    def no_driver():
        raise RuntimeError("driver too old")

    monkeypatch.setattr(doctor, "find_ncu", no_ncu)
    equipped.torch.cuda.device_count = no_driver
    checks = found()
    assert checks["ncu"] == Check("ncu", "warning", "InputError: WAVEALIGN_NCU is 'x'")
    assert checks["gpu"] == Check("gpu", "warning", "RuntimeError: driver too old")
    assert checks["torch"].state == "ok"


def test_backends(bare):
    checks = found([Stub("a"), Stub("b", "needs x: pip install x"), Stub("c", "break"), Stub("d")])
    assert checks["backend a"] == Check("backend a", "ok", "a kernel")
    assert checks["backend b"] == Check(
        "backend b", "missing", "a kernel", "needs x: pip install x"
    )
    assert checks["backend c"].detail == "OSError: libcudart.so not found"
    assert checks["backend d"].state == "ok"


def counters(hbm_read_bytes):
    values = dict.fromkeys(field.name for field in dataclasses.fields(Counters))
    return Counters(**values | {"kernel": "add", "hbm_read_bytes": hbm_read_bytes})


@pytest.mark.parametrize(
    ("answer", "state", "text"),
    [
        ([counters(16_777_216)], "ok", "counters can be read"),
        ([counters(None)], "warning", "counts no HBM reads"),
        ([counters(0)], "warning", "counts no HBM reads"),
        (MissingCapabilityError("hardware counters: run as root"), "missing", "run as root"),
        (WaveAlignError("python failed under ncu"), "warning", "python failed under ncu"),
    ],
)
def test_the_probe(equipped, monkeypatch, answer, state, text):
    def collect(arguments, expected, *, timeout_s):
        assert (arguments[0], expected) == (sys.executable, 1)
        compile(arguments[-1], "probe", "exec")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(doctor, "collect", collect)
    check = found(probe=True)["ncu"]
    assert check.state == state
    assert text in f"{check.detail} {check.remedy}"


def registry(monkeypatch, backends):
    module = types.ModuleType("wavealign.gpu.registry")
    module.backends = backends
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_the_command(bare, monkeypatch):
    registry(monkeypatch, lambda: [Stub("fa4", "needs it: pip install 'wavealign[fa4]'")])
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["component", "state", "found", "what", "to", "do"]
    (line,) = (line for line in lines if line.startswith("backend fa4"))
    assert "missing" in line
    assert line.rstrip().endswith("pip install 'wavealign[fa4]'")


def test_the_command_as_json(bare, monkeypatch):
    registry(monkeypatch, lambda: [Stub("fa4")])
    result = CliRunner().invoke(command, ["--json"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert report["schema"] == "wavealign.doctor/1"
    assert report["checks"][-1] == {
        "component": "backend fa4", "state": "ok", "detail": "a kernel", "remedy": None,
    }  # fmt: skip


def test_backends_that_need_torch(bare, monkeypatch):
    def backends():
        raise MissingCapabilityError("a backend needs torch: pip install 'wavealign[gpu]'")

    registry(monkeypatch, backends)
    result = CliRunner().invoke(command, ["--json"])
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout)["checks"][-1]
    assert (last["component"], last["state"]) == ("backends", "missing")
    assert last["remedy"] == "pip install 'wavealign[gpu]'"


def test_probe_is_passed_on(bare, monkeypatch):
    registry(monkeypatch, list)
    seen = []
    monkeypatch.setattr(doctor, "diagnose", lambda b, probe: seen.append(probe) or [])
    for arguments in ([], ["--probe"]):
        assert CliRunner().invoke(command, arguments).exit_code == 0
    assert seen == [False, True]


def test_the_table_shows_brackets(capsys):
    print_table(doctor_table([Check("a", "warning", "[bold]", "pip install 'x[gpu]'")]))
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "a", "warning", "[bold]", "pip", "install", "'x[gpu]'",
    ]  # fmt: skip
