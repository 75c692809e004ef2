"""Options that errors name: the command that ended has them, or the error says which one does."""

from __future__ import annotations

import ast
import re

import click
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import ROOT, measured_result, random_mask, write_lines

from wavealign.cli import main
from wavealign.cli.failure import who_has
from wavealign.masks import save_mask

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OF_OTHERS = {"--gpus", "--cap-add", "--pause", "--query-metrics", "--no-deps", "--head"}
"""Of docker, dcgmi, ncu, pip and ray."""


def commands(group=main, name=""):
    for below, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{name}{below} ")
        else:
            yield f"{name}{below}", command


COMMANDS = dict(commands())
OPTIONS = {name: {o for p in c.params for o in p.opts} for name, c in COMMANDS.items()}


def texts(path):
    """The strings of a module that name options, but for docstrings; places in f-strings as {}."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    passed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            passed.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            passed |= set(node.values)
    for node in ast.walk(tree):
        if node in passed:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(getattr(v, "value", "{}") if isinstance(v, ast.Constant) else "{}"
                           for v in node.values)  # fmt: skip
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if OPTION.search(text) and " " in text:
            yield text


MODULES = {
    str(path.relative_to(ROOT / "wavealign")): found
    for path in sorted((ROOT / "wavealign").rglob("*.py"))
    if (found := list(texts(path)))
}


def users(module):
    """The commands of a module of the command line; of a shared one, those that import it."""
    name = "wavealign.cli." + module.removeprefix("cli/").removesuffix(".py")
    found = {n for n, c in COMMANDS.items() if c.callback.__module__ == name}
    if found:
        return found
    return {
        n for n, c in COMMANDS.items()
        if name in (ROOT / (c.callback.__module__.replace(".", "/") + ".py")).read_text()
    }  # fmt: skip


def test_there_are_messages():
    assert sum(map(len, MODULES.values())) > 80
    assert {"masks/files.py", "masks/layouts.py", "cli/qk.py", "runs/pairing.py"} <= set(MODULES)
    assert users("cli/qk.py") == {"mask make", "diagnose"}


@pytest.mark.parametrize("module", MODULES)
def test_every_option_that_is_named_is_one(module):
    for text in MODULES[module]:
        for option in set(OPTION.findall(text)) - OF_OTHERS:
            assert any(option in own for own in OPTIONS.values()), text


# `wavealign methods NAME` lists what `mask make` takes: no error.
OWN = [name for name in MODULES if name.startswith("cli/") and name != "cli/lists.py"]


@pytest.mark.parametrize("module", OWN)
def test_a_command_names_its_own_options(module):
    for text in MODULES[module]:
        named = set(OPTION.findall(re.sub(r"wavealign [a-z][^.;`]*", "", text)))
        for name in users(module):
            assert named <= OPTIONS[name], (name, text)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_lacks_is_said_with_who_has_it(name):
    """Whichever of the messages reaches it."""
    root = click.Context(main, info_name="wavealign")
    context = click.Context(COMMANDS[name], parent=root, info_name=name.rpartition(" ")[2])
    for text in (text for found in MODULES.values() for text in found):
        told = who_has(text, context)
        said = dict(re.findall(r"has no (--[a-z0-9-]+); `wavealign ([a-z ]+)` has", told))
        named = set(OPTION.findall(re.sub(r"wavealign [a-z][^.;`]*", "", text))) - OF_OTHERS
        assert set(said) == named - OPTIONS[name]
        assert all(option in OPTIONS[owner] for option, owner in said.items())
        assert not told or f"`wavealign {name}` has no" in told


@pytest.fixture
def folder(tmp_path):
    """Masks that want to be told more, and runs on them."""
    dense = random_mask(shape=(1, 8, 8)).head(0).to_dense()
    counts, lists = np.ones((1, 8), np.int32), np.zeros((1, 8, 8), np.int32)
    sizes = {"block_size": [128, 128], "BLOCK_SIZE": [128, 128]}
    np.savez(tmp_path / "bare.npz", mask=dense)
    np.savez(tmp_path / "two.npz", a=dense, b=dense)
    np.savez(tmp_path / "ways.npz", kv_num_blocks=counts, kv_indices=lists, q2k_num=counts,
             q2k_index=lists, **sizes)  # fmt: skip
    np.savez(tmp_path / "compact.npz", kv_num_blocks=counts, kv_indices=lists[..., :1] + 3, **sizes)
    save_mask(tmp_path / "good.npz", random_mask())
    for name in ("bare", "two", "ways", "compact"):
        write_lines(tmp_path / f"{name}.jsonl", [measured_result(mask=name)])
    return tmp_path


LACKED = [("bare", "--block"), ("two", "--key"), ("ways", "--format"), ("compact", "--seq-len")]
READING = {
    "sim": ["sim", "--mask"], "curve": ["curve", "--mask"], "guard": ["guard", "--mask"],
    "order": ["order", "--policy", "nnz", "--out", "{d}/o.npz", "--mask"],
    "mask info": ["mask", "info"], "mask convert": ["mask", "convert"],
    "sweep": ["sweep", "--out", "{d}/sweep", "--mask"],
    "calibrate": ["calibrate", "--guard", "--device", "h200", "--simulate"],
    "report": ["report", "{d}/bare.jsonl", "--out", "{d}/page.html", "--mask"],
}  # fmt: skip


@pytest.mark.parametrize(("mask", "option"), LACKED)
@pytest.mark.parametrize("name", READING)
def test_masks_that_want_to_be_told_more(folder, name, mask, option):
    arguments = [a.format(d=folder) for a in READING[name]] + [str(folder / f"{mask}.npz")]
    if name == "mask convert":
        arguments.append(str(folder / "o.npz"))
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert option in result.output
    lacked = f"(`wavealign {name}` has no {option}; `wavealign mask convert` has.)"
    assert (lacked in result.output) == (option not in OPTIONS[name])
