"""Each script of examples/ runs, prints something, and stands in the list of its README."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DATA, ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 60


def imported(script):
    """Names of the packages that a script imports."""
    nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example(script, tmp_path):
    for package in sorted(imported(script)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} isn't installed")
    (tmp_path / "data").symlink_to(DATA)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 2
    assert [path.name for path in tmp_path.iterdir()] == ["data"], "files were left behind"


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_the_head_of_an_example_says_what_it_teaches(script):
    text = script.read_text(encoding="utf-8")
    head = ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= MOST_LINES
    assert "You will learn" in head
    assert f"python examples/{script.name}" in head
    assert "It prints" in head


def test_the_list_has_every_example_in_order():
    listed = re.findall(r"^\| \[(\S+)\]", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    assert listed == [path.name for path in EXAMPLES]
