"""What parameters of all methods have in common, and how they are written: ``threshold=0.95``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wavealign.errors import InputError, unknown_name
from wavealign.numbers import number, text, truth, whole_number, whole_numbers

_KINDS: dict[str, Callable[[str, Any], Any]] = {
    "bool": truth, "int": whole_number, "float": number, "str": text, "tuple": whole_numbers,
}  # fmt: skip
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Params:
    """Base of all parameters: validation, and the block size a method works in.

    Raises:
        InputError: a value of another kind than its default.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            kind, value = str(field.type).partition("[")[0], getattr(self, field.name)
            object.__setattr__(self, field.name, _KINDS[kind](field.name, value))
        self._check()

    def _check(self) -> None:
        """Raise for a value out of its range; all are of their kind."""

    def block_size(self) -> tuple[int, int]:
        """Tokens per query block and per K/V block."""
        block = getattr(self, "block", None)
        return (block, block) if block else (self.block_q, self.block_kv)  # type: ignore[attr-defined]

    def _expect(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise InputError(f"{name} is {getattr(self, name)}; expected {expected}.")

    def _least(self, least: int, *names: str) -> None:
        for name in names:
            told = f"at least {least}" if least else "0 or more"
            self._expect(name, getattr(self, name) >= least, told)

    def _share(self, *names: str, zero: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            told = f"a share {'from' if zero else 'above'} 0 and up to 1"
            self._expect(name, 0 < value <= 1 or (zero and value == 0), told)

    def _factor(self, name: str) -> None:
        value = getattr(self, name)
        self._expect(name, value > 0 and math.isfinite(value), "a positive number")

    def _one_of(self, name: str, valid: tuple[str, ...]) -> None:
        if getattr(self, name) not in valid:
            raise InputError(f"{name} is '{getattr(self, name)}'; expected {' or '.join(valid)}.")


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
        chosen[name] = _value(name, text.strip(), str(fields[name].type))
    return params(**chosen)


def _value(name: str, text: str, kind: str) -> Any:
    if kind == "bool":
        if text.lower() in _BOOLS:
            return _BOOLS[text.lower()]
        raise InputError(f"{name}={text}: expected true or false.")
    if kind == "str":
        return text
    if kind.startswith("tuple"):
        match = re.fullmatch(r"(\d+)[xX×,](\d+)[xX×,](\d+)", text)
        if match is None:
            raise InputError(f"{name}={text}: expected three sizes, e.g. 6x8x8.")
        return tuple(int(part) for part in match.groups())
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError as problem:
        expected = "a whole number" if kind == "int" else "a number"
        raise InputError(f"{name}={text}: expected {expected}.") from problem
