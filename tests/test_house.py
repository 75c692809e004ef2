"""The arrows between the rooms: one way, in no circle, and as CONTRIBUTING.md draws them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

pytest.importorskip("importlinter")
import house

MOST_LINES = 350


@pytest.fixture(scope="module")
def imports():
    return house.graph()


def test_the_contract_holds():
    """pyproject.toml, [tool.importlinter]: floors from the top down."""
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or "lint-imports"
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_no_modules_import_each_other_in_a_circle(imports):
    modules = sorted(imports.modules)
    number = {module: i for i, module in enumerate(modules)}
    ends = [
        (number[module], number[other])
        for module in modules
        for other in imports.find_modules_directly_imported_by(module)
    ]
    matrix = csr_matrix((np.ones(len(ends)), np.transpose(ends)), shape=(len(modules),) * 2)
    count, labels = connected_components(matrix, directed=True, connection="strong")
    circles = [[m for m in modules if labels[number[m]] == c] for c in range(count)]
    assert [circle for circle in circles if len(circle) > 1] == []


def test_names_that_load_lazily_are_arrows_that_the_graph_sees(imports):
    """A package that hands names on by string names them under TYPE_CHECKING, too."""
    import importlib

    for module in sorted(imports.modules):
        homes = getattr(importlib.import_module(module), "_HOMES", {}) if _light(module) else {}
        known = imports.find_modules_directly_imported_by(module)
        for home in homes:
            assert home in known, f"{module} hands on names of {home}"


def _light(module: str) -> bool:
    return (ROOT / Path(*module.split(".")) / "__init__.py").exists()


def test_contributing_shows_the_house_as_it_is():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert page == house.contributing(page), "out of date: run python tests/house.py"


DOORS = {  # what is said and read in one place, and where
    r"click\.(echo|secho)\(": {"cli/output.py"},
    r"(?<!\w)print\(": {"report/progress.py", "report/tables.py"},
    r"json\.(dumps?|loads?)\(": {"structures.py"},
    r"(?<!\w)Table\(|Console\(|np\.load\(|ZipFile\(": {
        "report/tables.py", "report/progress.py", "archives.py", "npz.py",
    },
}  # fmt: skip
TOML_STRINGS = {"sim/devices.py", "guard/profile.py"}  # are written as JSON's


@pytest.mark.parametrize("pattern", DOORS)
def test_every_door_stands_once(pattern):
    found = {
        str(path.relative_to(ROOT / "wavealign"))
        for path in (ROOT / "wavealign").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(pattern, line) and ">>>" not in line and "... " not in line
    }
    assert found - TOML_STRINGS <= DOORS[pattern]


def test_no_module_is_too_long_to_read_at_once():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "wavealign").rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
