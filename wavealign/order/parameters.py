"""Parameters of registry entries, and how they are written in a policy: ``svd+nnz(rank=4)``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wavealign.errors import InputError, unknown_name

Value = int | float | str
Values = Mapping[str, Value]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a row order or visit order.

    Attributes:
        name: as written in a policy.
        type: ``"int"``, ``"float"`` or ``"choice"``.
        default: its value where a policy doesn't say; None where the launch decides.
        doc: what it is, in one line; says what the launch decides.
        minimum, maximum: bounds of a number, both allowed; None for no bound.
        choices: the words that a ``"choice"`` may be.
    """

    name: str
    type: str
    default: Value | None
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def range_text(self) -> str:
        """What is allowed, in words."""
        if self.type == "choice":
            return " or ".join(self.choices)
        kind = "a whole number" if self.type == "int" else "a number"
        if self.minimum is not None and self.maximum is not None:
            low, high = format_value(self.minimum), format_value(self.maximum)
            return f"{kind} from {low} to {high}"
        return kind if self.minimum is None else f"{kind} from {format_value(self.minimum)} up"

    def parse(self, text: str, policy: str) -> Value:
        """The value that `text` stands for.

        Raises:
            InputError: another type, or out of bounds.
        """
        value = self._value(text)
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        if value is None or not (isinstance(value, str) or low <= value <= high):
            raise InputError(
                f"policy '{policy}': {self.name} is '{text}'; expected {self.range_text}."
            )
        return value

    def _value(self, text: str) -> Value | None:
        if self.type == "choice":
            return text if text in self.choices else None
        if self.type == "int":
            return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else None
        try:
            value = float(text)
        except ValueError:
            return None
        return value if math.isfinite(value) else None


def format_value(value: Value) -> str:
    """A value as a policy writes it: the shortest text that reads back as the same."""
    text = str(value)
    return text.removesuffix(".0") if isinstance(value, float) else text


def format_arguments(values: Values) -> str:
    """``(a=1,b=2)``, sorted; nothing where there are none."""
    if not values:
        return ""
    return "(" + ",".join(f"{k}={format_value(values[k])}" for k in sorted(values)) + ")"


def split_arguments(text: str, policy: str) -> tuple[str, dict[str, str]]:
    """``"svd+nnz(rank=4,wave=132)"`` → ``"svd+nnz"`` and its arguments as text.

    Raises:
        InputError: unbalanced parentheses, text behind them, an argument without a value or
            given twice.
    """
    match = re.fullmatch(r"([^()]*?)\s*(?:\(([^()]*)\))?", text)
    if match is None:
        if text.count("(") != text.count(")"):
            raise InputError(
                f"policy '{policy}': unbalanced parenthesis in '{text}'; expected "
                "NAME(parameter=value,...)."
            )
        raise InputError(
            f"policy '{policy}': parameters stand once, behind the whole of '{text}' and with "
            "nothing after them: svd+nnz(rank=4,wave=132)."
        )
    arguments: dict[str, str] = {}
    for part in (match[2] or "").split(",") if (match[2] or "").strip() else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise InputError(
                f"policy '{policy}': '{part.strip()}' is no parameter; expected name=value."
            )
        if name in arguments:
            raise InputError(f"policy '{policy}': {name} is given twice.")
        arguments[name] = value
    return match[1], arguments


def bind(
    arguments: Mapping[str, str], parameters: Sequence[Parameter], owner: str, policy: str
) -> dict[str, Value]:
    """The arguments that differ from the defaults, as values.

    Args:
        arguments: name → text, as written in the policy.
        parameters: that the owner has.
        owner, policy: names, for messages.

    Raises:
        InputError: a parameter that `owner` doesn't have, or a value that it can't take.
    """
    known = {parameter.name: parameter for parameter in parameters}
    values: dict[str, Value] = {}
    for name, text in arguments.items():
        if name not in known:
            if not known:
                raise InputError(f"policy '{policy}': '{owner}' has no parameters, found '{name}'.")
            raise unknown_name(f"parameter of '{owner}' in policy '{policy}':", name, known)
        value = known[name].parse(text, policy)
        if value != known[name].default:
            values[name] = value
    return values
