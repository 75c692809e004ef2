"""What a user installs: one top-level name, its data, a light import, cached kernels."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile

import pytest
from helpers import ROOT


def python(code, **options):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_one_package_and_its_data(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"wavealign"}
    assert "wavealign/py.typed" in names
    shipped = {p.relative_to(ROOT).as_posix() for p in (ROOT / "wavealign").rglob("*.toml")}
    assert {n for n in names if n.endswith(".toml")} == shipped
    page = {f"wavealign/report/page/page.{kind}" for kind in ("html", "css", "js")}
    assert page <= set(names)
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "wavealign").rglob("*.py")}
    assert sources <= set(names)


def test_the_installed_wheel_works_from_anywhere(wheel, tmp_path):
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--quiet",
        "--target",
        site,
        wheel,
    ]
    subprocess.run(command, check=True, capture_output=True)
    tops = {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")}
    assert tops - {"bin"} == {"wavealign"}
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import wavealign, numpy as np;"
        "mask = wavealign.BlockMask.from_dense(np.ones((1, 4, 4)));"
        "print(wavealign.__file__, wavealign.simulate(mask, device='a40').device)"
    )
    file, device = python(code, cwd=tmp_path).split()
    assert file.startswith(str(site))
    assert device == "a40"


HEAVY = {"numba", "scipy", "numpy", "torch", "matplotlib", "rich", "jinja2"}


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import wavealign", HEAVY),
        ("import wavealign; wavealign.BlockMask", HEAVY - {"numpy"}),
        (
            "from wavealign.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
            HEAVY,
        ),
        (
            "from wavealign.cli import main\ntry: main(['sim', '--help'])\nexcept SystemExit: pass",
            HEAVY,
        ),
        (
            "from wavealign.cli import main\ntry: main(['policies', '--json'])\n"
            "except SystemExit: pass",
            HEAVY - {"numpy"},
        ),
        (
            "from wavealign.cli import main\ntry: main(['methods', '--json'])\n"
            "except SystemExit: pass",
            HEAVY,
        ),
        ("import wavealign.methods, wavealign.qk", HEAVY - {"numpy"}),
    ],
)
def test_nothing_heavy_is_imported_early(code, forbidden):
    output = python(
        f"{code}\nimport sys; print('loaded', *sorted({forbidden!r} & set(sys.modules)))"
    )
    assert output.splitlines()[-1] == "loaded"


def test_benchmarks_and_tests_import_nothing_of_each_other():
    folders = {name: list((ROOT / name).rglob("*.py")) for name in ("tests", "benchmarks")}
    for own, other in (("tests", "benchmarks"), ("benchmarks", "tests")):
        foreign = {path.stem for path in folders[other]} - {path.stem for path in folders[own]}
        for path in folders[own]:
            text = path.read_text(encoding="utf-8")
            found = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
            assert not found & foreign, path


def defined_names(module):
    """What a module's source binds or imports, lazy names of a package included."""
    base = ROOT.joinpath(*module.split("."))
    source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    names = {p.stem for p in base.glob("*")} if base.is_dir() else set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tools"])
def test_scripts_ask_for_names_that_are_there(folder):
    """No test runs all of the benchmarks, and imports inside functions fail only when they run."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wavealign"):
                wanted = {alias.name for alias in node.names}
                assert wanted <= defined_names(node.module), (path.name, node.module)


def test_public_names():
    python(
        "import wavealign\n"
        "for name in wavealign.__all__:\n"
        "    try: getattr(wavealign, name)\n"
        "    except wavealign.MissingCapabilityError as e: assert 'wavealign[gpu]' in str(e)"
    )
    code = "import wavealign\ntry: wavealign.nothing\nexcept AttributeError as e: print(e)"
    assert python(code) == "module 'wavealign' has no attribute 'nothing'"


def test_kernels_are_compiled_once_and_cached(tmp_path):
    code = (
        "import numpy as np, wavealign\n"
        "from wavealign.sim._partition_kernels import stream_partitioned\n"
        "wavealign.simulate(wavealign.BlockMask.from_dense(np.ones((1, 3, 3))))\n"
        "stats = stream_partitioned.stats\n"
        "print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))"
    )
    import os

    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    assert python(code, env=environment) == "0 1"
    assert python(code, env=environment) == "1 0"
