"""Text of others is text: in errors, lines, tables, progress, pictures and pages."""

from __future__ import annotations

import os
import re
import unicodedata
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner
from helpers import PROGRAM, random_mask, run_result, trial, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.cli import main
from wavealign.errors import InputError, MissingCapabilityError, WriteError
from wavealign.foreign import shown
from wavealign.masks import save_mask
from wavealign.report.page.curves import curve_sets
from wavealign.report.page.gather import blocks
from wavealign.report.page.html import render
from wavealign.report.progress import Progress
from wavealign.report.tables import print_table, table_frame
from wavealign.runs.files import load_rows

# Of markup, escape sequences (CSI, OSC, C1), bidi controls, line breaks, formulas, halves of pairs.
NASTY = (
    "run[cond]", "x[/attn1]", "[red]r[/]", "a\\[b]", "\x1b[31mred\x1b]0;t\x07", "\x9b31m\x90q",
    "\u202egpj\u2066", "a\nError: fake", "a\r\tb\x0b", "$x^2$ $", "$\\frac{", "<b>&amp;<script>",
    "\udcff", ":smile:", "{0}{name}%s", "\u2028\u2029\x85", "z" * 60_000, "z " * 30_000,
)  # fmt: skip
names = st.one_of(
    st.sampled_from([*NASTY[:-2], "z" * 600, "z " * 1500]),
    st.text(max_size=40),
    st.lists(st.sampled_from([*"[]/\\$<>&{}%:\"'", *NASTY[:-2]]), max_size=8).map("".join),
)
_TURNS = "\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069"
BAD = re.compile(f"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff{_TURNS}]")


def assert_text(printed, most=6000):
    """Nothing in it moves a cursor, changes a colour or turns the writing."""
    assert not (found := BAD.search(printed)), ascii(found)
    assert max(map(len, printed.split("\n"))) <= most


@settings(max_examples=300)
@given(st.one_of(names, st.text()), st.integers(100, 3000))
def test_what_is_shown_is_one_printable_line_and_stays_as_it_is(text, most):
    line = shown(text, most)
    assert len(line) <= most
    assert all(c.isprintable() or unicodedata.category(c) == "Zs" for c in line)
    assert shown(line, most) == line
    if text.isprintable() and len(text) <= 100:
        assert line == text


def test_the_middle_of_what_is_long_is_left_out():
    line = shown(f"FIRST {'x' * 60_000} LAST what to do")
    assert line.startswith("FIRST xxx")
    assert line.endswith("xxx LAST what to do")
    assert "[…59," in line


@settings(max_examples=60)
@given(names)
def test_errors_are_lines(name):
    for error in (InputError, MissingCapabilityError, WriteError):
        assert_text(str(error(f"{name}: no such file; found '{name}'.")), 2000)
    assert_text(str(WriteError.of(name, OSError(28, name))), 2000)


@settings(max_examples=60, deadline=None)
@given(st.lists(names, min_size=1, max_size=3))
def test_cells_are_text_and_rows_are_lines(capsys_of, cells):
    table = table_frame("name", "what", right=[cells[0]])
    for cell in cells:
        table.add_row(cell, "x", "1.0")
    printed = capsys_of(lambda: print_table(table))
    assert_text(printed)
    lines = printed.splitlines()
    if max(map(len, cells)) <= 40:
        assert len(lines) == 1 + len(cells)
    for cell in cells:
        first = "".join(shown(cell, 200).split())[:40]
        assert first in "".join(printed.split())


@pytest.fixture(scope="module")
def capsys_of():
    """What a function prints, captured anew at each call (hypothesis calls many times)."""
    import contextlib
    import io

    def printed(function):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            function()
        return out.getvalue()

    return printed


@pytest.mark.parametrize("name", NASTY)
def test_progress_is_text(name, capsys, monkeypatch):
    monkeypatch.setattr("wavealign.report.progress._EVERY_SECONDS", -1.0)
    with Progress(2, "working") as progress:
        progress.advance(name)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert_text(said, 300)


def test_progress_on_a_terminal_is_text(monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    with Progress(2, "working") as progress:
        progress.advance("a\x1b]0;title\x07[red]")
        assert "\\x1b]0;title\\x07[red]" in progress._bar.tasks[0].description


@settings(max_examples=40, deadline=None)
@given(name=names, policy=names)
def test_the_page_shows_names_as_text(tmp_path_factory, name, policy):
    rows = [run_result(mask=name, mask_digest=d, policy=p, device=name, kernel=policy, time_ms=ms)
            for d in "ab" for p, ms in (("original", 2.0), (policy, 1.0))]  # fmt: skip
    path = write_lines(tmp_path_factory.mktemp("page") / "a.jsonl", rows)
    loaded = load_rows([path])
    loaded.failed.append(trial(error=name, policy=policy, mask=name))
    loaded.notes.append(name)
    page = render(loaded, {}, curve_sets(blocks(loaded), {}, 1, quiet=True), name)
    body = page.partition("<body")[2]
    assert_text(re.sub("<script.*?</script>", "", body, flags=re.S), 200_000)
    data = page.rpartition('id="data">')[2].partition("</script>")[0]
    assert_text(data, 200_000)
    assert not re.search("[<>&]", data)
    assert "<b>&amp;<" not in body
    for chart in re.findall(r"<svg.*?</svg>", body, re.S):
        ET.fromstring(chart)


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_pictures_show_names_as_text(tmp_path, kind):
    pytest.importorskip("matplotlib")
    from wavealign.report.plots import plot_policies

    path = tmp_path / f"p.{kind}"
    rows = [run_result(policy=name) for name in NASTY]
    plot_policies(rows, rows[0], "".join(NASTY), path)
    if kind == "svg":
        picture = path.read_text(encoding="utf-8")
        ET.fromstring(picture)
        assert "$x^2$ $" in picture  # in the comment beside the glyphs: no formula was made of it
        assert "\\x1b" in picture


ALL = "m[red]\x1b[31m\u202e\nError: $x$ \\[[bold] \x9b\udcff"
"""All of it in one name that a file may have."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    mask = folder / f"{ALL}.npz"
    try:
        save_mask(mask, random_mask(shape=(2, 12, 10)))
    except OSError:
        pytest.skip("this file system takes no such name")
    rows = [run_result(mask=ALL, mask_digest=d, policy=p, time_ms=ms)
            for d in "ab" for p, ms in (("original", 2.0), (ALL, 1.0))]  # fmt: skip
    write_lines(folder / f"{ALL}.jsonl", rows)
    return folder


GOOD = [
    ["order", "--mask", "{m}", "--policy", "nnz", "--out", "{d}/s.npz"],
    ["sim", "--mask", "{m}", "--policy", "nnz", "--schedule", "{d}/s.npz", "--plot", "{d}/p.svg"],
    ["curve", "--mask", "{m}", "--policy", "nnz", "--schedule", "{d}/s.npz", "--plot", "{d}/q.svg"],
    ["guard", "--mask", "{m}"],
    ["mask", "info", "{m}"],
    ["mask", "convert", "{m}", "{d}/{n}.c.npz"],
    ["compare", "{r}", "--a-policy", "original", "--b-policy", "{n}", "--by", "mask"],
    ["report", "{r}", "--out", "{d}/page.html", "--title", "{n}", "--mask", "{m}"],
    ["mask", "make", "--method", "window", "--grid", "1x16x16", "--out", "{d}/{n}.made.npz"],
]
BAD_ARGUMENTS = [
    ["{n}"], ["--{n}"], ["mask", "{n}"], ["sim", "--{n}"], ["policies", "{n}"], ["methods", "{n}"],
    ["sim", "--mask", "{n}"], ["sim", "--mask", "{m}", "--policy", "{n}"],
    ["sim", "--mask", "{m}", "--device", "{n}"], ["sim", "--mask", "{m}", "--device", "{n}.toml"],
    ["sim", "--mask", "{m}", "--kernel", "{n}"], ["sim", "--mask", "{m}", "--l2", "{n}"],
    ["sim", "--mask", "{m}", "--heads", "{n}"], ["sim", "--mask", "{m}", "--format", "{n}"],
    ["sim", "--mask", "{m}", "--key", "{n}"], ["sim", "--mask", "{m}", "--block", "{n}"],
    ["sim", "--mask", "{m}", "--plot", "{d}/{n}.x"], ["sim", "--mask", "{m}", "--out", "{n}/{n}"],
    ["sim", "--mask", "{m}", "--schedule", "{n}"], ["sim", "--mask", "{m}", "--wave", "{n}"],
    ["curve", "--mask", "{m}", "--sizes", "{n}"], ["guard", "--mask", "{m}", "--profile", "{n}"],
    ["guard", "--mask", "{m}", "--objective", "{n}"], ["compare", "{n}", "{n}b"],
    ["compare", "{r}", "{r}", "--where", "{n}"], ["compare", "{r}", "{r}", "--where", "mask={n}x"],
    ["compare", "{r}", "{r}", "--by", "{n}"], ["report", "{n}"], ["report", "{r}", "--mask", "{n}"],
    ["calibrate", "--runs", "{n}", "--device", "h200"], ["calibrate", "--device", "{n}"],
    ["capture", "--layers", "0", "--out", "{d}", "{n}"], ["diagnose", "--qk", "{n}"],
    ["diagnose", "--qk", "{n}.npz"], ["mask", "make", "--method", "{n}", "--out", "{d}/o.npz"],
    ["mask", "make", "--method", "radial", "--set", "{n}", "--out", "{d}/o.npz"],
    ["mask", "make", "--method", "radial", "--grid", "{n}", "--out", "{d}/o.npz"],
    ["mask", "convert", "{m}", "{d}/{n}.x"], ["mask", "convert", "{m}", "{d}/o.npz", "--to", "{n}"],
    ["sweep", "--mask", "{n}", "--out", "{d}/w"], ["sweep", "--mask", "{m}", "--out", "{r}"],
    ["sweep", "--mask", "{m}", "--policy", "{n}", "--out", "{d}/w"],
    ["sweep", "--mask", "{m}", "--space", "{n}", "--out", "{d}/w"],
    ["validate", "--mask", "{m}", "--backend", "{n}"], ["doctor", "{n}"], ["devices", "{n}"],
]  # fmt: skip


def filled(arguments, folder, name):
    known = {"m": folder / f"{ALL}.npz", "r": folder / f"{ALL}.jsonl", "d": folder, "n": name}
    return [str(a).format(**known) for a in arguments]


def invoked(arguments):
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert_text(result.output)
    return result


def test_every_command_shows_names_as_text(files):
    for arguments in GOOD:
        result = invoked(filled(arguments, files, ALL))
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", [ALL, "z" * 60_000, "z " * 30_000], ids=["all", "word", "words"])
def test_every_command_shows_wrong_arguments_as_text(files, name):
    for arguments in BAD_ARGUMENTS:
        result = invoked(filled(arguments, files, name))
        assert result.exit_code == 2, (arguments, result.output)
        assert sum(line.startswith("Error: ") for line in result.output.splitlines()) == 1


def test_a_sweep_shows_names_as_text_and_keeps_them(files, tmp_path):
    import subprocess

    done = subprocess.run(
        [*PROGRAM, *filled(["sweep", "--mask", "{m}", "--policy", "nnz"], files, ALL), "--out",
         tmp_path / ALL, "--jobs", "1"],
        capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_text((done.stdout + done.stderr).decode())
    (name,) = {row.result.mask for row in load_rows([tmp_path / ALL]).rows}
    assert name == ALL
