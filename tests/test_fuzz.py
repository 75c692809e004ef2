"""A short run of fuzz_readers.py; `python tests/fuzz_readers.py` runs for ten minutes."""

import subprocess
import sys

import pytest
from helpers import ROOT


def test_damaged_files_are_refused_or_read_as_what_they_were():
    pytest.importorskip("safetensors")
    command = [sys.executable, ROOT / "tests/fuzz_readers.py", "--rounds", "40", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "40 rounds, 0 wrong" in done.stdout
