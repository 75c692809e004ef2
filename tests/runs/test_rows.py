"""Rows that are none: one error that names file, line, key, what was found and expected."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from helpers import measured_result, run_result, trial, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.cli import main
from wavealign.errors import InputError
from wavealign.runs.files import load_rows
from wavealign.runs.result import FIELDS, Result

WRONG = {  # by field: JSON texts, and what is expected there
    "time_ms": (["NaN", "Infinity", "-1", "1e999", '"3"', "true", "[1]", "1e+16"], "a number"),
    "energy_j": (["-0.5", '""'], "a number from 0 to 1e+15 or null"),
    "l2_hit_frac": (["1.5", "-0.1", '"0.5"', "NaN"], "a number from 0 to 1 or null"),
    "lts_sector_hit_frac": (["2", "false"], "a number from 0 to 1"),
    "hbm_read_bytes": (["-1", "1.5", "1000.0", "9" * 30, '"1"'], "a whole number from 0 to"),
    "l2_requested_bytes": (["null", "-1"], "a whole number"),
    "wave": (["0", "-132", "1.5", '"132"', "null", "true"], "a whole number from 1 to"),
    "seed": (["-1", "0.0", "null"], f"a whole number from 0 to {2**63 - 1}"),
    "head": (["-1", "1.0", '"0"'], "a whole number from 0 to"),
    "kv_block_bytes": (["0", "-65536"], "a whole number from 1 to"),
    "heads": (
        ['"all"', '""', '"0-"', '"0,,1"', "0", "null", '"0-99999999999"'], 'heads, e.g. "0,3-7"'
    ),
    "policy": (["3", "null", "[]"], "text"),
    "mask": (["null", "{}"], "text"),
    "source": (['"guessed"', "null", "1"], '"measured" or "simulated"'),
    "regime": (['"Single"', "null"], '"single" or "steady"'),
    "model": (['"slow"', "1"], '"fast" or "full" or null'),
    "roofline": (['"memory "'], '"compute" or "memory" or null'),
    "bound": (['"l3"'], '"hbm" or "l2" or "power" or "tensor" or null'),
}  # fmt: skip
CASES = [(name, text, told) for name, (texts, told) in WRONG.items() for text in texts]


def invoked(*arguments):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def damaged(record, name, text):
    """The line of a record in which a field of its row holds another text."""
    line = json.loads(record.to_json())
    line.get("result", line)[name] = "HERE"
    return json.dumps(line).replace('"HERE"', text)


def commands(path, tmp_path):
    yield "report", path, "--out", tmp_path / "page.html"
    yield "compare", path, path
    yield "calibrate", "--runs", path, "--masks", tmp_path, "--device", "h200"
    yield "calibrate", "--guard", "--runs", path, "--masks", tmp_path, "--device", "h200"


@pytest.mark.parametrize(("name", "text", "told"), CASES)
@pytest.mark.parametrize("make", [run_result, lambda: trial(run_result())], ids=["run", "trial"])
def test_a_field_that_holds_something_else_is_named(tmp_path, name, text, told, make):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{make().to_json()}\n\n{damaged(make(), name, text)}\n")
    with pytest.raises(InputError) as problem:
        load_rows([path])
    said = str(problem.value)
    assert said.startswith(f"{path}: line 3: a ")
    found = "Infinity" if text == "1e999" else text
    assert f"{name} {found}; expected {told}" in said


@pytest.mark.parametrize(("name", "text"), [
    ("time_ms", "NaN"), ("l2_hit_frac", "1.5"), ("wave", "-1"), ("heads", '"x"'),
    ("clock_ghz", '"fast"'),
])  # fmt: skip
def test_every_command_says_so(tmp_path, name, text):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{measured_result().to_json()}\n{damaged(measured_result(), name, text)}\n")
    for command in commands(path, tmp_path):
        result = invoked(*command)
        assert result.exit_code == 2
        assert f"{path}: line 2: a result row has {name} {text}; expected" in result.output
        assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(("line", "message"), [
    ('{"schema": "wavealign.run/1", "schema": "wavealign.run/1"}', "says 'schema' twice"),
    ("[" * 100_000, "nested too deeply"), ('{"time_ms": ' + "9" * 5000 + "}", "is not JSON"),
    ('{"schema": "wavealign.run/1", "time_ms": 1', "is not JSON"), ("\x00", "is not JSON"),
    ("null", "is not a JSON object"), ('{"schema": ["wavealign.run/1"]}', "a row has schema"),
    ('{"schema": null}', "a row has no schema"),
    ('{"schema": "\\u001b[31m' + "z" * 60_000 + '"}', "a row has schema"),
])  # fmt: skip
def test_lines_that_are_none(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{run_result().to_json()}\n{line}\n")
    with pytest.raises(InputError) as problem:
        load_rows([path])
    assert str(problem.value).startswith(f"{path}: line 2: ")
    assert message in str(problem.value)
    assert len(str(problem.value)) < 2001
    assert invoked("report", path, "--out", tmp_path / "page.html").exit_code == 2


@pytest.mark.parametrize(("change", "message"), [
    ({"status": "halfway"}, 'status "halfway"; expected "done" or "failed"'),
    ({"status": "failed"}, "a trial is failed and has a result"),
    ({"result": None}, "a trial is done and has no result"),
    ({"seconds": -1}, "seconds -1; expected a number from 0"), ({"seconds": None}, "seconds null"),
    ({"planning_ms": "5"}, 'planning_ms "5"'), ({"id": "0" * 16}, "has the spec of"),
    ({"more": 1}, "a trial has an unknown key 'more'"),
    ({"spec": None}, "spec null; expected an object"),
    ({"spec": {}}, "a trial's spec lacks source, mask"), ({"worker": 3}, "worker 3; expected text"),
])  # fmt: skip
def test_trials_that_are_none(tmp_path, change, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**json.loads(trial(run_result()).to_json()), **change}) + "\n")
    with pytest.raises(InputError) as problem:
        load_rows([path])
    assert str(problem.value).startswith(f"{path}: line 1: ")
    assert message in str(problem.value)


@pytest.mark.parametrize("name", FIELDS[: FIELDS.index("version") + 1])
def test_a_field_that_is_missing_is_named(name):
    row = json.loads(run_result().to_json())
    del row[name]
    with pytest.raises(InputError, match=f"a result row lacks {name}\\."):
        Result.from_record(row)


def test_keys_of_ones_own_are_passed_over_and_said(tmp_path):
    path = tmp_path / "a.jsonl"
    row = {**json.loads(run_result().to_json()), "tiem_ms": 1.0, "note": [1]}
    path.write_text(json.dumps(row) + "\n")
    loaded = load_rows([path])
    assert loaded.rows[0].result == run_result()
    told = f"{path}: keys that this version doesn't know are passed over: note, tiem_ms."
    assert loaded.notes == [told]
    other = write_lines(tmp_path / "b.jsonl", [run_result(time_ms=3.0)])
    assert told in invoked("compare", path, other).stderr


texts = st.one_of(
    st.sampled_from(["NaN", "-Infinity", "1e999", "null", "true", "-1", "0", "1.5", "[]", '"1"']),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers().map(str), st.text(max_size=4).map(json.dumps),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([name for name in FIELDS if name != "version"]), texts)
def test_whatever_a_field_holds_is_a_row_or_an_error_that_names_it(tmp_path_factory, name, text):
    path = tmp_path_factory.getbasetemp() / "drawn.jsonl"
    path.write_text(damaged(measured_result(), name, text) + "\n")
    try:
        (row,) = load_rows([path]).rows
    except InputError as problem:
        said = str(problem)
        assert said.startswith(f"{path}: line 1: a result row has {name} ")
        assert "; expected " in said
    else:
        assert getattr(row.result, name) == json.loads(text)


plausible = {
    name: st.sampled_from([0, 1, 1e-320, 1e-300, 1e-9, 0.5, 1e14, 1e15]) | st.floats(0, 1e15)
    for name in ("time_ms", "energy_j", "limit_ms", "gap", "clock_ghz")
} | {name: st.floats(0, 1) for name in ("l2_hit_frac", "time_spread_frac")} | {
    "hbm_read_bytes": st.integers(0, 2**63 - 1), "wave": st.sampled_from([1, 132, 2**40]),
    "seed": st.sampled_from([0, 2**64]), "policy": st.sampled_from(["original", "nnz", "x", ""]),
    "mask_digest": st.sampled_from("ab"), "heads": st.sampled_from(["0", "0-1", "5,2"]),
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(st.fixed_dictionaries({}, optional=plausible), min_size=2, max_size=5), st.data())
def test_rows_that_are_read_are_reported_and_compared(tmp_path_factory, changes, data):
    """However large or small their figures are: no traceback, and JSON that is JSON."""
    make = data.draw(st.sampled_from([run_result, measured_result]))
    folder = tmp_path_factory.getbasetemp()
    path = write_lines(folder / "plausible.jsonl", [make(**change) for change in changes])
    metric = data.draw(st.sampled_from(["time_ms", "hbm_read_bytes", "l2_hit_frac", "energy_j"]))
    commands = (
        ("report", path, "--out", folder / "page.html", "--json", "--no-curves"),
        ("compare", path, path, "--metric", metric, "--json"),
        ("compare", path, "--a-policy", "original", "--b-policy", "nnz", "--metric", metric),
    )
    command = data.draw(st.sampled_from(commands))
    result = invoked(*command)
    assert result.exit_code in (0, 2)
    for line in result.stdout.splitlines() if "--json" in command else ():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
