"""Policy strings with parameters: grammar, canonical names, errors, and that they do something."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import random_mask
from hypothesis import given
from hypothesis import strategies as st

from wavealign.cli import main
from wavealign.errors import InputError
from wavealign.masks.files import save_mask
from wavealign.order import build_schedule, parse_policy, registry
from wavealign.order.parameters import format_value
from wavealign.order.registry import ROWS, row_parameters
from wavealign.planning.recipes import Recipe


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("svd+nnz(rank=4,wave=132)", "svd+nnz(rank=4,wave=132)"),
        ("svd+nnz(wave=132,rank=4)", "svd+nnz(rank=4,wave=132)"),
        (" svd+nnz ( wave = 132 , rank=4 ) ", "svd+nnz(rank=4,wave=132)"),
        ("svd(rank=1,sign=long)", "svd"),
        ("svd()", "svd"),
        ("nnz-dealt(span=0.060)/shuffled", "nnz-dealt(span=0.06)/shuffled"),
        ("nnz-dealt(span=6e-2)", "nnz-dealt(span=0.06)"),
        ("nnz-dealt(span=0.08)/shuffled+phased(seed=3)", "nnz-dealt/shuffled+phased(seed=3)"),
        ("nnz-dealt(span=1)", "nnz-dealt(span=1)"),
        ("nnz-dealt(span=1.0)", "nnz-dealt(span=1)"),
        ("nnz-bucket+svd(bucket=3)", "nnz-bucket+svd(bucket=3)"),
        ("nnz-bucket+svd+nnz(bucket=03)", "nnz-bucket+svd+nnz(bucket=3)"),
        ("lockstep(seed=3)", "lockstep(seed=3)"),
        ("resync(seed=3,span=0.06)", "resync(seed=3,span=0.06)"),
        ("nnz-wave(wave=64)/sawtooth(wave=32)", "nnz-wave(wave=64)/sawtooth(wave=32)"),
        ("random(seed=4)/shuffled(seed=5)", "random(seed=4)/shuffled(seed=5)"),
        ("original/ascending", "original/ascending"),
        ("nnz/phased+shuffled", "nnz/phased+shuffled"),
    ],
)
def test_names_are_canonical(written, name):
    assert parse_policy(written).name == name
    assert parse_policy(name).name == name
    mask = random_mask(shape=(1, 20, 20))
    assert build_schedule(mask, written, 4).policy == name


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("svd(rnak=2)", "unknown parameter of 'svd'.*'rnak'. Did you mean 'rank'.*Valid: rank, si"),
        ("svd(wave=3)", "unknown parameter of 'svd'"),
        ("nnz(wave=3)", "'nnz' has no parameters, found 'wave'"),
        ("nnz/ascending(seed=3)", "'ascending' has no parameters, found 'seed'"),
        ("nnz/sawtooth(seed=3)", "unknown parameter of 'sawtooth'"),
        ("svd(rank=two)", "rank is 'two'; expected a whole number from 1 to 8"),
        ("svd(rank=2.5)", "rank is '2.5'; expected a whole number"),
        ("svd(rank=0)", "rank is '0'; expected a whole number from 1 to 8"),
        ("svd(rank=9)", "rank is '9'"),
        ("svd(sign=up)", "sign is 'up'; expected long or short"),
        ("nnz-dealt(span=much)", "span is 'much'; expected a number from 0 to 1"),
        ("nnz-dealt(span=nan)", "span is 'nan'"),
        ("nnz-dealt(span=-0.1)", "span is '-0.1'"),
        ("svd+nnz(wave=0)", "wave is '0'; expected a whole number from 1 up"),
        ("svd(rank=2,rank=3)", "rank is given twice"),
        ("svd(rank=2", "unbalanced parenthesis in 'svd\\(rank=2'"),
        ("svd rank=2)", "unbalanced parenthesis"),
        ("svd(rank=2)/shuffled(seed=1", "unbalanced parenthesis in 'shuffled\\(seed=1'"),
        ("svd(rank=2)+nnz", "behind the whole of"),
        ("svd(rank=2)(sign=long)", "behind the whole of"),
        ("svd((rank=2))", "behind the whole of"),
        ("svd(rank)", "'rank' is no parameter; expected name=value"),
        ("svd(rank=)", "'rank=' is no parameter"),
        ("svd(rank=2,)", "'' is no parameter"),
        ("(rank=2)", "unknown policy ''"),
        ("svdd(rank=2)", "unknown policy 'svdd'. Did you mean 'svd'"),
        ("lockstep(span=0.1)", "unknown parameter of 'lockstep'.*Valid: seed, wave"),
        ("lockstep(seed=1)/sawtooth", "already means"),
        ("nnz-wave(seed=3)", "unknown parameter of 'nnz-wave'"),
    ],
)
def test_parameters_that_are_none(policy, text):
    with pytest.raises(InputError, match=text) as caught:
        parse_policy(policy)
    assert "\n" not in str(caught.value)


def test_parameters_of_an_alias_go_to_its_parts():
    mask = random_mask(3, (2, 60, 50))
    for alias, meaning in (
        ("lockstep(seed=3)", "nnz/shuffled+phased(seed=3)"),
        ("lockstep(wave=5)", "nnz/shuffled+phased(wave=5)"),
        (
            "resync(seed=3,span=0.3,wave=5)",
            "nnz-dealt(span=0.3,wave=5)/shuffled+phased(seed=3,wave=5)",
        ),
        ("nnz-wave(wave=5)", "original+nnz(wave=5)"),
    ):
        a, b = (build_schedule(mask, name, 7) for name in (alias, meaning))
        assert np.array_equal(a.row_order, b.row_order)
        assert np.array_equal(a.indices, b.indices)


@pytest.mark.parametrize("rows", ["nnz-dealt", "nnz-bucket+svd", "greedy", "svd+nnz", "original"])
@pytest.mark.parametrize("visits", ["", "/shuffled+phased", "/sawtooth"])
def test_a_wave_of_ones_own_is_the_launchs_wave(rows, visits):
    """W given as a parameter makes what a launch of that W makes."""
    mask = random_mask(1, (2, 40, 30))
    own = "(wave=6)" if rows != "original" else ""
    own_visits = f"{visits}(wave=6)" if "phased" in visits or "saw" in visits else visits
    a = build_schedule(mask, rows + own + own_visits, 11)
    b = build_schedule(mask, rows + visits, 6)
    assert np.array_equal(a.row_order, b.row_order)
    assert np.array_equal(a.indices, b.indices)


def test_seeds_of_ones_own():
    """A policy's seed replaces the launch's, for that choice alone."""
    mask = random_mask(1, (2, 40, 30))
    plain = build_schedule(mask, "random/shuffled", 8, seed=3)
    rows = build_schedule(mask, "random(seed=3)/shuffled", 8, seed=1)
    visits = build_schedule(mask, "random/shuffled(seed=3)", 8, seed=1)
    assert np.array_equal(rows.row_order, plain.row_order)
    assert not np.array_equal(rows.indices, plain.indices)
    assert np.array_equal(visits.indices, plain.indices)
    assert not np.array_equal(visits.row_order, plain.row_order)


def test_every_parameter_changes_an_order():
    """No parameter is accepted and then ignored."""
    mask = random_mask(4, (1, 120, 90))
    other = {
        "seed": "7", "rank": "3", "sign": "short", "span": "0.5", "wave": "9", "bucket": "4",
        "bins": "2", "rounds": "1", "neighbours": "3",
    }  # fmt: skip
    for base in ROWS:
        for parameter in row_parameters(base, False):
            value = other[parameter.name]
            a = build_schedule(mask, base, 24)
            b = build_schedule(mask, f"{base}({parameter.name}={value})", 24)
            assert not np.array_equal(a.row_order, b.row_order), (base, parameter.name)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_values_read_back(value):
    assert float(format_value(value)) == value


def test_registry_documents_parameters():
    entries = {entry.name: entry for entry in registry()}
    for entry in entries.values():
        for parameter in entry.parameters:
            assert parameter.doc
            assert parameter.type in ("int", "float", "choice")
            assert (parameter.default is None) == ("default: the launch's" in parameter.doc)
            if parameter.default is not None:
                text = format_value(parameter.default)
                assert parameter.parse(text, "") == parameter.default
    assert {p.name for p in entries["resync"].parameters} == {"span", "wave", "seed"}
    seeded = {n for n, e in entries.items() if any(p.name == "seed" for p in e.parameters)}
    assert seeded == {n for n, e in entries.items() if e.seeded}
    with pytest.raises(dataclasses.FrozenInstanceError):
        entries["svd"].name = "other"


def test_planner_takes_defaults_only():
    assert Recipe.parse("svd+nnz(rank=1)").rows == "svd"
    for policy in ("svd+nnz(rank=2)", "lockstep(seed=3)", "nnz/shuffled(seed=1)", "resync(wave=4)"):
        with pytest.raises(InputError, match="parameters aren't planned on a device"):
            Recipe.parse(policy)
    with pytest.raises(InputError, match="'pd-bisect' isn't planned on a device"):
        Recipe.parse("pd-bisect")


def test_commands_take_parameters(tmp_path):
    runner, path = CliRunner(), tmp_path / "m.npz"
    save_mask(path, random_mask(shape=(2, 40, 30)))
    policy = "svd+nnz(wave=8, rank=2)/shuffled"
    order = ["order", "--mask", path, "--policy", policy, "--out", tmp_path / "s.npz", "--json"]
    result = runner.invoke(main, [str(a) for a in order])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["policy"] == "svd+nnz(rank=2,wave=8)/shuffled"
    command = ["sim", "--mask", str(path), "--policy", policy, "--json", "--no-belady"]
    result = runner.invoke(main, command)
    assert json.loads(result.stdout)["policy"] == "svd+nnz(rank=2,wave=8)/shuffled"
    result = runner.invoke(main, ["sim", "--mask", str(path), "--policy", "svd(rank=x)"])
    assert result.exit_code == 2
    assert "rank is 'x'" in result.stderr
    rows = [
        json.loads(line)
        for line in runner.invoke(main, ["policies", "--json"]).stdout.split("\n")
        if line
    ]
    (svd,) = (row for row in rows if row["name"] == "svd")
    assert [p["name"] for p in svd["parameters"]] == ["rank", "sign"]
    text = runner.invoke(main, ["policies"]).stdout
    assert "a whole number from 1 to 8" in text
