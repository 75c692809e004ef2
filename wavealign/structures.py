"""JSON as it is written, and structures as they are read: one declaration each, checked by msgspec.

A structure is a `msgspec.Struct` (or made by `msgspec.defstruct`) whose annotations say the types
and ranges of its keys. What doesn't follow it is one error that names the key, what was found there
and what was expected, in the words of the annotation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec import inspect as types

from wavealign.errors import InputError, unknown_name
from wavealign.foreign import shown

# Beyond these, arithmetic on figures would overflow, and tables of integers have no place.
Amount = Annotated[float, Meta(ge=0, le=1e15)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**63 - 1)]

_Structure = TypeVar("_Structure")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_MOST_DEPTH = 100
_MOST_FOUND = 120  # characters of what was found


def json_text(value: Any, **layout: Any) -> str:
    """A value as JSON, where a figure that is none (NaN, an infinity) is null.

    Args:
        value: of what JSON knows.
        layout: as `json.dumps` takes it, e.g. ``indent=1``.
    """
    try:
        return json.dumps(value, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **layout)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        InputError: it isn't JSON, is nested too deeply, or says a key of an object twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_each_once)
        _check_depth(value)
        return value
    except InputError:
        raise
    except ValueError as problem:  # numbers of thousands of digits, too
        raise InputError(f"is not JSON ({problem}).") from problem
    except RecursionError as problem:
        raise InputError("is not JSON that can be read (nested too deeply).") from problem


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"says '{twice}' twice; expected every key once.")
    return found


def _check_depth(value: Any) -> None:
    """Raise where what walks through a value would go too deep."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [
            item
            for held in level
            if isinstance(held, dict | list)
            for item in (held.values() if isinstance(held, dict) else held)
        ]
        if not level:
            return
    raise InputError(f"is nested too deeply; expected at most {_MOST_DEPTH} levels.")


def structured(value: Any, kind: type[_Structure], what: str) -> _Structure:
    """A value read from JSON or TOML as the structure that it must follow.

    Args:
        value: what was read.
        kind: a `msgspec.Struct`.
        what: it is, for people.

    Raises:
        InputError: a key that is missing, unknown or holds something else, or a figure that is
            none, with what was found and what was expected.
    """
    try:
        made = msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        path = str(problem).partition(" - at `$")[2].rstrip("`")
        found, info = _at(value, types.type_info(kind), path)
        if isinstance(info, types.StructType) and isinstance(found, dict):
            _check_keys(found, info, f"{what}'s {path[1:]}" if path else what)
        expected = in_words(info)
    else:
        fault = next(_no_figures(value), None)
        if fault is None:
            return made
        (path, found), expected = fault, "a number"
    text = shown(json.dumps(found, ensure_ascii=False, default=str), _MOST_FOUND)
    has = f"has {path.lstrip('.')}" if path else "is"
    raise InputError(f"{what} {has} {text}; expected {expected}.")


def _no_figures(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Figures that are none, and the paths that lead there."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _no_figures(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _no_figures(item, f"{path}[{index}]")


def _at(value: Any, expected: types.Type, path: str) -> tuple[Any, types.Type]:
    """What a path leads to, and what belongs there, as far as the structure says."""
    for key, index in _STEP.findall(path):
        expected = next((t for t in _choices(expected) if isinstance(t, _HOLDERS)), expected)
        if isinstance(expected, types.StructType):
            fields = {field.encode_name: field.type for field in expected.fields}
            fields[str(expected.tag_field)] = types.LiteralType((expected.tag,))
            expected = fields.get(key, types.AnyType())
        elif isinstance(expected, types.TupleType):
            expected = expected.item_types[int(index)]
        elif isinstance(expected, types.ListType):
            expected = expected.item_type
        else:
            expected = types.AnyType()
        try:
            value = value[int(index)] if index else value[key]
        except (KeyError, IndexError, TypeError):  # keys of a table, which the path doesn't tell
            break
    inner = next((t for t in _choices(expected) if isinstance(t, types.StructType)), expected)
    return value, inner if isinstance(value, dict) else expected


_HOLDERS = (types.StructType, types.TupleType, types.ListType)


def _choices(expected: types.Type) -> Sequence[types.Type]:
    return expected.types if isinstance(expected, types.UnionType) else (expected,)


def _check_keys(found: dict[str, Any], expected: types.StructType, what: str) -> None:
    """Raise where keys are missing, or one is unknown."""
    tag = [] if expected.tag_field is None else [expected.tag_field]
    names = [*tag, *(field.encode_name for field in expected.fields)]
    needed = [field.encode_name for field in expected.fields if field.required]
    if missing := [name for name in needed if name not in found]:
        raise InputError(f"{what} lacks {', '.join(missing)}.")
    for name in found:
        if name not in names:
            raise InputError(f"{what} has an {unknown_name('key', name, names)}")


def in_words(expected: types.Type) -> str:
    """What a structure takes at some place, for people."""
    match expected:
        case types.Metadata(type=inner, extra_json_schema=extra):
            return str((extra or {}).get("description")) or in_words(inner)
        case types.UnionType(types=choices):
            return " or ".join(map(in_words, choices))
        case types.LiteralType(values=values):
            return " or ".join(f'"{value}"' for value in values)
        case types.IntType(ge=low, le=high) | types.FloatType(ge=low, le=high):
            kind = "a whole number" if isinstance(expected, types.IntType) else "a number"
            if low is None:
                return kind
            # Bounds of whole numbers are written out: 2**63 - 1 has 19 digits.
            ends = [f"{end:g}" if isinstance(end, float) else str(end) for end in (low, high)]
            return f"{kind} >= {ends[0]}" if high is None else f"{kind} from {ends[0]} to {ends[1]}"
        case types.ListType(item_type=inner):
            return f"a list, each entry {in_words(inner)}"
        case types.TupleType(item_types=items):
            return f"a list of {len(items)}"
    return _WORDS.get(type(expected), "an object")


_WORDS: dict[type[types.Type], str] = {
    types.NoneType: "null", types.StrType: "text", types.BoolType: "true or false",
    types.AnyType: "a value without NaN or infinities",
}  # fmt: skip
