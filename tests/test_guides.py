"""Guides run as they are printed: their `sh` and `python` blocks, in order, in one folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DATA, ROOT

GUIDES = ["best-order.md"]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(guide):
    """(language, code, line) of each fenced block; those without a language are only shown."""
    text = (ROOT / "docs" / guide).read_text()
    for match in _BLOCK.finditer(text):
        yield match.group(1), match.group(2), text[: match.start()].count("\n") + 2


def run_block(language, code, folder):
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    command = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    return subprocess.run(
        [*command[language], code],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").symlink_to(DATA)
    return tmp_path


def test_blocks_that_fail_are_seen(folder):
    assert run_block("sh", "wavealign sim --mask none.npz", folder).returncode == 2
    assert run_block("sh", "false\ntrue", folder).returncode == 1
    assert run_block("python", "raise SystemExit(3)", folder).returncode == 3


@pytest.mark.parametrize("guide", GUIDES)
def test_guide(guide, folder):
    found = list(blocks(guide))
    assert {language for language, _, _ in found} <= {"", "sh", "python", "toml"}
    printed = {}
    for language, code, line in found:
        if language in ("sh", "python"):
            done = run_block(language, code, folder)
            assert done.returncode == 0, f"docs/{guide}, line {line}:\n{code}\n{done.stderr}"
            printed[line] = done.stdout
    assert all(text.strip() for text in printed.values())
    if guide == "best-order.md":
        _check_best_order("".join(printed.values()))


def _check_best_order(output):
    """What the guide's words say of what it prints."""
    assert "over limit" in output
    assert "of L2" in output
    assert "spread" in output
    gains = [float(g) for g in re.findall(r"^\S+ +(\d\.\d{3})x$", output, re.MULTILINE)]
    assert len(gains) == 3
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.05
    assert re.search(r"^lockstep +\d+\.\d+ to \d+\.\d+ ms over 5 seeds$", output, re.MULTILINE)
