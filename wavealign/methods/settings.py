"""Parameters as people write them on a command line: ``--set threshold=0.95``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from wavealign.errors import InputError, unknown_name
from wavealign.methods.params import Params

_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_settings(params: type[Params], settings: Sequence[str]) -> Params:
    """The parameters that ``name=value`` settings make of the defaults.

    Raises:
        InputError: an unknown or repeated name, or a value of another kind or out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(params)}
    chosen: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise InputError(f"setting '{setting}' can't be read; expected name=value.")
        if name not in fields:
            raise unknown_name("parameter", name, fields)
        if name in chosen:
            raise InputError(f"parameter '{name}' is set twice.")
        chosen[name] = _value(name, text.strip(), fields[name].default)
    return params(**chosen)


def _value(name: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() in _BOOLS:
            return _BOOLS[text.lower()]
        raise InputError(f"{name}={text}: expected true or false.")
    if isinstance(default, str):
        return text
    if isinstance(default, tuple):
        match = re.fullmatch(r"(\d+)[xX×,](\d+)[xX×,](\d+)", text)
        if match is None:
            raise InputError(f"{name}={text}: expected three sizes, e.g. 6x8x8.")
        return tuple(int(part) for part in match.groups())
    kind = type(default)
    try:
        return kind(text)
    except ValueError as problem:
        expected = "a whole number" if kind is int else "a number"
        raise InputError(f"{name}={text}: expected {expected}.") from problem
