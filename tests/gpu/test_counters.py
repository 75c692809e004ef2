"""Nsight Compute's output and its child process.

The samples were written from the documented format, not recorded; the figures are made up so
that results can be worked out by hand.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time

import pytest
from helpers import ROOT

from wavealign.errors import InputError, MissingCapabilityError, WaveAlignError
from wavealign.gpu import ncu
from wavealign.gpu.counters import METRICS, check_control, derive, parse_csv
from wavealign.gpu.ncu import available_metrics, collect, find_ncu

TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"

# name -> unit, value. Of 1,000,000 sectors 600,000 hit at once and 300,000 in the other
# partition; 2 ms at 1.65 GHz.
VALUES = {
    "lts__t_sectors_srcunit_tex.sum": ("sector", "1,000,000"),
    "lts__t_sectors_srcunit_tex_lookup_hit.sum": ("sector", "600,000"),
    "lts__t_sectors_srcunit_ltcfabric.sum": ("sector", "400,000"),
    "lts__t_sectors_srcunit_ltcfabric_lookup_hit.sum": ("sector", "300,000"),
    "lts__t_sector_hit_rate.pct": ("%", "64.3"),
    "lts__d_sectors_fill_device.sum": ("sector", "100,000"),
    "dram__bytes_read.sum": ("byte", "3,200,000"),
    "dram__bytes_write.sum": ("byte", "1024"),
    "gpu__time_duration.sum": ("ns", "2,000,000"),
    "sm__cycles_elapsed.max": ("cycle", "3,300,000"),
    TENSOR: ("%", "85.1"),
}
KERNEL = 'void k<(int)128, "x">(float *, int)'
FIXED = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Grid Size", "CC"]


def line(cells):
    return ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)


def launch(number, kernel=KERNEL):
    return [str(number), "77", "python3", "127.0.0.1", kernel, "(132, 1, 1)", "9.0"]


def wide(*kernels, values=VALUES):
    return "\n".join(
        [
            "==PROF== Connected to process 77 (/usr/bin/python3.11)",
            '==PROF== Profiling "k": 0%....50%....100% - 9 passes',
            "what the program prints, even 1,2,3",
            "==WARNING== something harmless",
            line([*FIXED, *values]),
            line([*[""] * len(FIXED), *(unit for unit, _ in values.values())]),
            *(
                line([*launch(i, kernel), *(value for _, value in values.values())])
                for i, kernel in enumerate(kernels)
            ),
            "==PROF== Disconnected from process 77",
        ]
    )


def long(*kernels, values=VALUES):
    header = [*FIXED, "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
    rows = [
        line([*launch(i, kernel), "Command line profiler metrics", name, unit, value])
        for i, kernel in enumerate(kernels)
        for name, (unit, value) in values.items()
    ]
    rows.insert(len(rows) // 2, "program output between the rows")
    return "\r\n".join(["==PROF== Connected to process 77", line(header), *rows])


def changed(**values):
    """VALUES with n/a or another value for a metric named by its start."""
    starts = {start: next(n for n in VALUES if n.startswith(start)) for start in values}
    return VALUES | {starts[start]: ("", value) for start, value in values.items()}


@pytest.mark.parametrize("layout", [wide, long])
def test_both_layouts_give_the_same_launches(layout):
    rows = parse_csv(layout(KERNEL, "second"))
    assert [row["Kernel Name"] for row in rows] == [KERNEL, "second"]
    for row in rows:
        assert {name: row[name] for name in VALUES} == {
            name: value.replace(",", "") for name, (_, value) in VALUES.items()
        }


@pytest.mark.parametrize("layout", [wide, long])
def test_what_is_derived(layout):
    (row,) = parse_csv(layout(KERNEL))
    found = derive(row)
    assert found.kernel == KERNEL
    assert found.time_ms == 2.0
    assert found.l2_hit_frac == pytest.approx((600_000 + 300_000) / 1_000_000)
    assert found.lts_sector_hit_frac == pytest.approx(0.643)
    assert found.l2_requested_bytes == 32_000_000
    assert found.fabric_bytes == 12_800_000
    assert found.l2_fill_bytes == found.hbm_read_bytes == 3_200_000
    assert found.hbm_write_bytes == 1024
    assert found.tensor_active_frac == pytest.approx(0.851)
    assert found.clock_ghz == pytest.approx(1.65)


@pytest.mark.parametrize("value", ["n/a", "", "nan", "(!) n/a"])
@pytest.mark.parametrize(
    ("metric", "field"),
    [
        ("lts__t_sectors_srcunit_tex.", "l2_hit_frac"),
        ("lts__t_sectors_srcunit_ltcfabric_lookup_hit", "l2_hit_frac"),
        ("lts__t_sector_hit_rate", "lts_sector_hit_frac"),
        ("dram__bytes_read", "hbm_read_bytes"),
        ("sm__cycles_elapsed", "clock_ghz"),
        ("sm__pipe_tensor", "tensor_active_frac"),
    ],
)
def test_what_is_not_counted_is_none(metric, field, value):
    whole = dataclasses.asdict(derive(parse_csv(wide(KERNEL))[0]))
    partial = dataclasses.asdict(
        derive(parse_csv(wide(KERNEL, values=changed(**{metric: value})))[0])
    )
    assert partial[field] is None
    assert whole[field] is not None
    others = whole.keys() - {field, "l2_requested_bytes"}
    assert {f: partial[f] for f in others} == {f: whole[f] for f in others}


def test_no_fabric_counter_is_no_hit_ratio():
    values = {name: v for name, v in VALUES.items() if "fabric" not in name}
    found = derive(parse_csv(wide(KERNEL, values=values))[0])
    assert (found.l2_hit_frac, found.fabric_bytes, found.time_ms) == (None, None, 2.0)


def test_newer_and_older_names_stand_in():
    values = dict(VALUES)
    values["dram__bytes_op_read.sum"] = values.pop("dram__bytes_read.sum")
    values[TENSOR.replace("tensor_", "tensor_op_hmma_")] = values.pop(TENSOR)
    found = derive(parse_csv(long(KERNEL, values=values))[0])
    assert (found.hbm_read_bytes, found.tensor_active_frac) == (3_200_000, pytest.approx(0.851))


@pytest.mark.parametrize(
    ("text", "gist"),
    [
        ("", "nothing"),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "No kernels were profiled"),
        ("==WARNING== a\n==ERROR== Failed to find metric x\n", "Failed to find metric x"),
        (line([*FIXED, *VALUES]), "sm__pipe_tensor_cycles_active"),
    ],
)
def test_output_without_a_kernel(text, gist):
    with pytest.raises(WaveAlignError, match=f"profiled no kernel; it said: .*{gist}"):
        parse_csv(text)


def control(read=1_000_000, requested=1_000_000, hit=0.01):
    sample = derive(parse_csv(wide(KERNEL))[0])
    return dataclasses.replace(
        sample, hbm_read_bytes=read, l2_requested_bytes=requested, l2_hit_frac=hit
    )


def test_a_control_that_is_as_expected():
    assert check_control(control(), 1_000_000) is None
    assert check_control(control(read=1_029_000, requested=971_000, hit=0.049), 1_000_000) is None


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (control(read=1_031_000), "1,031,000 HBM reads"),
        (control(read=969_000), "969,000 HBM reads"),
        (control(requested=1_500_000), "1,500,000 bytes requested from L2"),
        (control(hit=0.05), "L2 hit ratio of 0.050"),
        (control(read=None), "no count of HBM reads"),
        (control(requested=None), "no count of bytes requested"),
        (control(hit=None), "no L2 hit ratio"),
    ],
)
def test_a_control_that_is_not(found, reason):
    assert reason in check_control(found, 1_000_000)


LISTING = "\n".join(
    ["Device NVIDIA H200 (GH100)", "-" * 40, "Metric Name   Metric Type  Metric Unit"]
    + [f"{name.partition('.')[0]}   Counter   sector   # of them" for name in VALUES]
)

# Keeps its arguments, lists the metrics, and else does what the test says with $log.
FAKE = """#!/bin/sh
if [ "$1" = --query-metrics ]; then cat "{folder}/listing"; exit 0; fi
for a in "$@"; do echo "$a"; done > "{folder}/arguments"
while [ "$1" != -- ]; do
  if [ "$1" = --log-file ]; then log=$2; fi
  shift
done
shift
echo "on stdout"
{work}
"""


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """A function that puts an ncu on PATH which runs `work`."""

    def make(work, listing=LISTING, table=""):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "listing").write_text(listing)
        (folder / "table").write_text(table)
        script = folder / "ncu"
        script.write_text(FAKE.format(folder=folder, work=work.replace("TABLE", f"{folder}/table")))
        script.chmod(0o755)
        monkeypatch.delenv("WAVEALIGN_NCU", raising=False)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return folder

    return make


def test_collect(fake_ncu, capfd):
    folder = fake_ncu('"$@" && cat TABLE > "$log"', table=wide("first", "second"))
    found = collect([sys.executable, "-c", "print('hello')"], 2, timeout_s=60)
    assert [c.kernel for c in found] == ["first", "second"]
    assert found[0].hbm_read_bytes == 3_200_000
    assert capfd.readouterr() == ("", "")
    arguments = (folder / "arguments").read_text().splitlines()

    def after(option):
        return arguments[arguments.index(option) + 1]

    assert after("--profile-from-start") == "off"
    assert (after("--cache-control"), after("--clock-control")) == ("all", "none")
    assert after("--replay-mode") == "kernel"
    assert after("--metrics").split(",") == list(VALUES)
    assert arguments[-3:] == [sys.executable, "-c", "print('hello')"]


def test_the_cache_control_is_passed_on(fake_ncu):
    folder = fake_ncu('cat TABLE > "$log"', table=long("k"))
    collect(["x"], 1, cache_control="none", timeout_s=60)
    arguments = (folder / "arguments").read_text()
    assert "--cache-control\nnone\n" in arguments


def test_other_than_the_expected_number_of_kernels(fake_ncu):
    fake_ncu('cat TABLE > "$log"', table=wide("first", "second"))
    with pytest.raises(WaveAlignError, match=r"2 kernels where 1 were expected: first, second"):
        collect(["x"], 1, timeout_s=60)


def test_a_program_that_fails(fake_ncu):
    fake_ncu('"$@"; code=$?; echo "==ERROR== The application returned an error code" > "$log"\n'
             "exit $code")  # fmt: skip
    code = "import sys; sys.stderr.write('line 1\\nValueError: bad mask\\n'); sys.exit(7)"
    with pytest.raises(WaveAlignError, match=r"exit code 7\): line 1 \| ValueError: bad") as raised:
        collect([sys.executable, "-c", code], 1, timeout_s=60)
    assert not isinstance(raised.value, MissingCapabilityError)
    assert "The application returned" in str(raised.value)


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
            "Performance Counters on the target device 0.",
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded.", "gVisor"),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", "dcgmi"),
        ("==ERROR== Nsight Compute failed to connect to the CUDA driver", "nvidia-smi"),
    ],
)
def test_counters_that_are_not_to_be_had(fake_ncu, said, advice, code):
    fake_ncu(f'echo "{said}" > "$log"; echo "==WARNING== No kernels were profiled." >> "$log"\n'
             f"exit {code}")  # fmt: skip
    with pytest.raises(MissingCapabilityError, match=advice):
        collect(["x"], 1, timeout_s=60)


def test_a_program_without_a_gpu(fake_ncu):
    fake_ncu("echo 'RuntimeError: No CUDA GPUs are available' >&2; exit 1")
    with pytest.raises(MissingCapabilityError, match="no usable NVIDIA GPU"):
        collect(["x"], 1, timeout_s=60)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed grandchild may stay a zombie where nobody reaps it.
    with open(f"/proc/{pid}/stat") as stream:  # noqa: PTH123
        return stream.read().rpartition(")")[2].split()[0] != "Z"


def assert_ends(pid):
    for _ in range(100):
        try:
            if not is_alive(pid):
                return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still alive")


SLEEPER = 'sleep 60 & echo $! > "FOLDER/pid.new"; mv "FOLDER/pid.new" "FOLDER/pid"; wait'


def test_a_run_that_takes_too_long(fake_ncu, tmp_path):
    fake_ncu(SLEEPER.replace("FOLDER", str(tmp_path)))
    with pytest.raises(WaveAlignError, match=r"didn't end within 1 s"):
        collect(["x"], 1, timeout_s=1)
    assert_ends(int((tmp_path / "pid").read_text()))


def test_ctrl_c_ends_the_run(fake_ncu, tmp_path):
    fake_ncu(SLEEPER.replace("FOLDER", str(tmp_path)))
    pid = tmp_path / "pid"

    def interrupt():
        for _ in range(600):
            if pid.exists():
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        collect(["x"], 1, timeout_s=60)
    thread.join()
    assert_ends(int(pid.read_text()))


def test_no_ncu(monkeypatch):
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    with pytest.raises(MissingCapabilityError, match="cuda-nsight-compute"):
        collect(["x"], 1, timeout_s=60)


def test_where_ncu_is_looked_for(fake_ncu, monkeypatch, tmp_path):
    folder = fake_ncu("")
    assert find_ncu() == str(folder / "ncu")
    other = tmp_path / "my-ncu"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("WAVEALIGN_NCU", str(other))
    assert find_ncu() == str(other)
    monkeypatch.setenv("WAVEALIGN_NCU", str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"WAVEALIGN_NCU is '.*none'"):
        find_ncu()


def test_metrics_that_are_not_listed(fake_ncu):
    lines = [text for text in LISTING.splitlines() if "fabric" not in text]
    folder = fake_ncu('cat TABLE > "$log"', "\n".join(lines), wide("k"))
    ncu = str(folder / "ncu")
    listed = available_metrics(ncu, METRICS)
    assert set(METRICS) - set(listed) == {
        "lts__t_sectors_srcunit_ltcfabric.sum",
        "lts__t_sectors_srcunit_ltcfabric_lookup_hit.sum",
        "dram__bytes_op_read.sum",
        "dram__bytes_op_write.sum",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    }
    collect(["x"], 1, timeout_s=60)
    assert "fabric" not in (folder / "arguments").read_text()


def test_required_metrics_that_are_not_listed(fake_ncu):
    lines = [text for text in LISTING.splitlines() if "bytes_read" not in text]
    fake_ncu("", "\n".join(lines))
    message = r"can't collect dram__bytes_read\.sum or dram__bytes_op_read\.sum on this GPU"
    with pytest.raises(MissingCapabilityError, match=message):
        collect(["x"], 1, timeout_s=60)


def test_an_ncu_that_lists_nothing(fake_ncu):
    assert available_metrics(str(fake_ncu("", "") / "ncu"), METRICS) == METRICS


def test_output_recorded_on_an_h200():
    """ncu 2025.3.1, driver 580.159.04: a kernel that reads 256 MiB once, launched twice."""
    text = (ROOT / "tests" / "data" / "ncu_stream_read_h200.csv").read_text()
    first, second = (derive(row) for row in parse_csv(text))
    for counters in (first, second):
        assert counters.kernel == "_stream_read"
        assert check_control(counters, 2**28) is None
        assert counters.hbm_read_bytes == pytest.approx(2**28, rel=0.01)
        assert counters.l2_requested_bytes == pytest.approx(2**28, rel=0.01)
        assert counters.tensor_active_frac == 0
        assert 1.0 < counters.clock_ghz <= 1.98
    assert check_control(first, 2**29) is not None
