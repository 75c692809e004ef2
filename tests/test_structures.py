"""JSON that is written is JSON; what is read follows its structure, or the error says where not."""

from __future__ import annotations

import json
import math
from typing import Annotated, Literal

import formats
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from wavealign.errors import InputError
from wavealign.structures import Amount, Count, Share, json_text, read_json, structured

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def none_for_no_figure(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: none_for_no_figure(item) for key, item in value.items()}
    return [none_for_no_figure(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=200)
@given(values)
def test_what_is_written_is_json_with_null_for_no_figure(value):
    text = json_text(value)
    assert text.isascii()
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert strict == none_for_no_figure(value)
    assert read_json(text) == strict


@pytest.mark.parametrize(("text", "message"), [
    ("", "is not JSON"), ("{", "is not JSON"), ("{'a': 1}", "is not JSON"),
    (b"\xff", "is not JSON"), ("9" * 5000, "is not JSON"), ("[" * 100_000, "nested too deeply"),
    ('{"a":' * 100_000, "nested too deeply"), ("[" * 101 + "]" * 101, "nested too deeply"),
    ('{"a":' * 500 + "1" + "}" * 500, "nested too deeply"), ('{"a": 1, "a": 2}', "says 'a' twice"),
    ('[{"b": {"c": 1, "c": 1}}]', "says 'c' twice"), ("\ufeff{}", "is not JSON"),
])  # fmt: skip
def test_texts_that_are_no_json(text, message):
    with pytest.raises(InputError, match=message):
        read_json(text)


def test_the_tables_of_the_docs_are_those_of_the_structures():
    page = formats.PAGE.read_text(encoding="utf-8")
    assert page == formats.made(page), "out of date: run python tests/formats.py"


def test_what_is_nested_enough_is_read():
    assert json_text(read_json("[" * 100 + "]" * 100)) == "[" * 100 + "]" * 100


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    share: Share | None
    kind: Literal["one", "two"] = "one"


class Outer(msgspec.Struct, forbid_unknown_fields=True, tag_field="schema", tag="t/1"):
    count: Count
    amount: Amount
    inner: Inner
    low: float = 0.0
    name: Annotated[str, Meta(pattern="^[ab]+$", description="letters a and b")] = "a"
    sizes: tuple[int, int] = (1, 1)
    free: dict[str, object] = {}
    table: dict[str, Share] = {}
    flags: list[bool] = []


GOOD = {"schema": "t/1", "count": 1, "amount": 1, "inner": {"share": 0.5}}


def test_what_follows_the_structure_is_read():
    assert structured(GOOD, Outer, "a thing") == Outer(1, 1.0, Inner(0.5))


@pytest.mark.parametrize(("change", "message"), [
    ({"count": -1}, 'a thing has count -1; expected a whole number from 0 to 9223372036854775807.'),
    ({"count": 1.0}, "count 1.0; expected a whole number"), ({"count": True}, "count true;"),
    ({"count": 10**30}, "count 1000000"), ({"count": "3"}, 'count "3";'),
    ({"amount": math.nan}, "amount NaN; expected a number from 0 to 1e+15."),
    ({"amount": math.inf}, "amount Infinity;"), ({"amount": 1e16}, "amount 1e+16;"),
    ({"amount": "\x1b[31m" + "z" * 60_000}, r"amount "),
    ({"low": -math.inf}, "low -Infinity; expected a number."),
    ({"inner": {"share": 1.5}}, "has inner.share 1.5; expected a number from 0 to 1 or null."),
    ({"inner": {"share": math.nan}}, "inner.share NaN;"),
    ({"inner": []}, "inner []; expected an object"),
    ({"inner": {}}, "a thing's inner lacks share."),
    ({"inner": None}, "inner null; expected an object"),
    ({"inner": {"share": 1, "kin": 1}}, "inner has an unknown key 'kin'. Did you mean 'kind'?"),
    ({"inner": {"share": 1, "kind": "six"}}, 'inner.kind "six"; expected "one" or "two".'),
    ({"name": "abc"}, 'name "abc"; expected letters a and b.'), ({"name": 3}, "name 3; expected"),
    ({"sizes": [1]}, r"sizes [1]; expected a list of 2."), ({"sizes": [1, "x"]}, 'sizes[1] "x";'),
    ({"flags": [True, 1]}, "flags[1] 1; expected true or false."),
    ({"flags": {}}, "flags {}; expected a list"),
    (
        {"free": {"a.b[c] `d`": [1, {"\x1b": math.nan}]}},
        "free.a.b[c] `d`[1].\\x1b NaN; expected a number.",
    ),
    ({"free": {"": math.inf}}, "free. Infinity;"), ({"table": {"a.b": 2}}, "has table"),
    ({"unknown": 1}, "a thing has an unknown key 'unknown'. Valid: schema, count, amount"),
    ({"schema": "t/2"}, 'a thing has schema "t/2"; expected "t/1".'),
])  # fmt: skip
def test_the_error_says_where_what_and_what_was_expected(change, message):
    with pytest.raises(InputError) as problem:
        structured({**GOOD, **change}, Outer, "a thing")
    assert message in str(problem.value)
    assert len(str(problem.value)) < 600


@settings(max_examples=200)
@given(values, st.sampled_from(["count", "amount", "inner", "low", "name", "sizes", "flags"]))
def test_whatever_is_found_is_named_or_right(value, key):
    try:
        made = structured({**GOOD, key: value}, Outer, "a thing")
    except InputError as problem:
        said = str(problem)
        assert f" {key}" in said
        assert len(said) < 600
    else:
        assert msgspec.to_builtins(made)[key] == pytest.approx(value, abs=0, nan_ok=False)
