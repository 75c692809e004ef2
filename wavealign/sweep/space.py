"""The space of a sweep: axes, policy templates and their parameters, from TOML or options.

docs/sweep.md describes the format. A *condition* is everything but the policy: a mask, a device, a
wave, a seed. Each condition is searched for its best policy.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavealign.errors import InputError, unknown_name
from wavealign.order import DEFAULT_POLICIES, parse_policy
from wavealign.units import parse_size

OWN_PLACES = ("wave", "seed")
"""What a template may name without a parameter of that name: the trial's own."""

DEFAULT = "default"
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "device": ("h100",), "kernel": (DEFAULT,), "l2": (DEFAULT,), "wave": (DEFAULT,),
    "model": ("full",), "regime": ("single",), "seed": (0,), "heads": ("all",),
    "head_dim": (128,), "dtype": ("bf16",),
}  # fmt: skip
CONDITION_AXES = tuple(_DEFAULTS)
_WHOLE = {"wave": 1, "seed": 0, "head_dim": 1}  # axes of whole numbers, and the lowest
_MOST_WHOLE = 2**63 - 1  # what tables have a place for
_MOST_TRIED = 100_000  # combinations that are looked at before anything runs

Value = str | int | float


@dataclass(frozen=True)
class Range:
    """Values of a parameter between two bounds, for the searches that draw.

    Attributes:
        low, high: bounds, both included; whole numbers both, or neither.
        step: distance between neighbouring values; None for 1, or for any real number.
        log: draw the logarithm evenly.
    """

    low: int | float
    high: int | float
    step: int | float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class Space:
    """A checked space.

    Attributes:
        policies: policies and templates, e.g. ``"svd+nnz(rank={rank})"``.
        parameters: values of what the templates name.
        axes: values of each of `CONDITION_AXES`; ``"default"`` is the device's own.
    """

    policies: tuple[str, ...]
    parameters: Mapping[str, tuple[Value, ...] | Range]
    axes: Mapping[str, tuple[Any, ...]]

    def as_json(self) -> dict[str, Any]:
        """The space as plain data, for the manifest."""
        parameters = {
            name: dataclasses.asdict(values) if isinstance(values, Range) else list(values)
            for name, values in self.parameters.items()
        }
        axes = {name: list(self.axes[name]) for name in CONDITION_AXES}
        return {"policies": list(self.policies), "parameters": parameters, "axes": axes}

    def ranges(self) -> list[str]:
        """Names of the parameters that are ranges."""
        return [name for name, values in self.parameters.items() if isinstance(values, Range)]

    def parameters_of(self, template: str) -> list[str]:
        """The parameters that a template names, in its order."""
        return [name for name in _places(template) if name in self.parameters]

    @property
    def combinations(self) -> int:
        """How many policies `grid` makes of it, where it has no ranges."""
        values = ([self.parameters[name] for name in self.parameters_of(t)] for t in self.policies)
        return sum(math.prod(len(v) for v in v if not isinstance(v, Range)) for v in values)

    def grid(self, wave: int, seed: int) -> Iterator[str]:
        """Every policy of a condition, templates filled in, in the order of the space.

        Args:
            wave: rows in flight of the condition.
            seed: of the condition.
        """
        for template in self.policies:
            names = self.parameters_of(template)
            listed = [self.parameters[name] for name in names]
            for values in itertools.product(*(v for v in listed if not isinstance(v, Range))):
                yield fill(template, dict(zip(names, values, strict=True)), wave, seed)

    def single_changes(self) -> Iterator[str]:
        """As `grid`, but every value once, beside the first ones of the other parameters."""
        for template in self.policies:
            listed = {name: self.parameters[name] for name in self.parameters_of(template)}
            values = {n: v for n, v in listed.items() if not isinstance(v, Range)}
            first = {name: found[0] for name, found in values.items()}
            yield fill(template, first, 1, 0)
            for name, found in values.items():
                for value in found[1:]:
                    yield fill(template, first | {name: value}, 1, 0)


def fill(template: str, values: Mapping[str, Value], wave: int, seed: int) -> str:
    """The policy that a template becomes, as `parse_policy` writes it.

    Args:
        template: a policy with names in braces.
        values: of the parameters.
        wave, seed: the trial's own.

    Raises:
        InputError: it isn't a policy.
    """
    policy = template.format_map({"wave": wave, "seed": seed, **values})
    try:
        return parse_policy(policy).name
    except InputError as problem:
        if policy == template:
            raise
        raise InputError(f"policy template '{template}' makes '{policy}': {problem}") from problem


def load_table(path: str) -> dict[str, Any]:
    """A space file as a table.

    Raises:
        InputError: it can't be read, or isn't TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"{path}: can't be read ({problem}).") from problem
    except tomllib.TOMLDecodeError as problem:
        raise InputError(f"{path}: is not TOML ({problem}).") from problem


def make_space(
    table: Mapping[str, Any], given: Mapping[str, Sequence[Any]], where: str = "the space"
) -> Space:
    """Check a space file's table together with what the command line says.

    Args:
        table: of the file; empty where there is none.
        given: axes (and ``"policy"``) from options; each replaces nothing: an axis is named in
            one place.
        where: the file, for messages.

    Raises:
        InputError: unknown keys, empty axes, values of the wrong kind, parameters that no policy
            names, templates that name what isn't there, or that make no policy.
    """
    for name in given:
        if name in table:
            raise InputError(
                f"{where}: '{name}' is given there and by --{name.replace('_', '-')} too; give it "
                "in one place."
            )
    merged = {**table, **given}
    policies = tuple(_listed(merged.pop("policy", DEFAULT_POLICIES), "policy", where))
    for policy in policies:
        if not isinstance(policy, str):
            raise InputError(f"{where}: policy {policy!r} is not a string.")
    named = {place for policy in policies for place in _places(policy, where)}
    parameters: dict[str, tuple[Value, ...] | Range] = {}
    axes = dict(_DEFAULTS)
    for key, values in merged.items():
        if key in CONDITION_AXES:
            axes[key] = tuple(_axis(key, values, where))
        elif key in named:
            parameters[key] = _parameter(key, values, where)
        else:
            known = ["policy", *CONDITION_AXES, *sorted(named - set(OWN_PLACES))]
            raise InputError(
                f"{where}: {unknown_name('key', key, known)} A parameter needs a policy that names "
                f"it, e.g. policy = ['svd+nnz(rank={{{key}}})']."
            )
    if missing := sorted(named - set(parameters) - set(OWN_PLACES)):
        template = next(p for p in policies if missing[0] in _places(p))
        raise InputError(
            f"{where}: policy '{template}' names {{{missing[0]}}}, which has no values; add "
            f"{missing[0]} = [...] (parameters here: {', '.join(parameters) or 'none'})."
        )
    ends = {
        name: (values.low, values.high) if isinstance(values, Range) else values
        for name, values in parameters.items()
    }
    tried = Space(policies, ends, axes)
    every = tried.combinations <= _MOST_TRIED
    for _ in tried.grid(1, 0) if every else tried.single_changes():
        pass  # every policy is parsed: nothing runs before all are known good
    return Space(policies, parameters, axes)


def _places(template: str, where: str = "the space") -> list[str]:
    """The names in braces of a template, each once."""
    try:
        found = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as problem:
        raise InputError(f"{where}: policy '{template}' can't be read ({problem}).") from problem
    for name in found:
        if not name.isidentifier():
            raise InputError(
                f"{where}: policy '{template}' has '{{{name}}}'; expected a parameter's name in "
                "the braces."
            )
    return list(dict.fromkeys(found))


def _listed(values: Any, key: str, where: str) -> list[Any]:
    found = list(values) if isinstance(values, list | tuple) else [values]
    if not found:
        raise InputError(
            f"{where}: '{key}' is empty; expected at least one value, or leave it out."
        )
    return found


def _axis(key: str, values: Any, where: str) -> Iterator[Any]:
    for value in _listed(values, key, where):
        if isinstance(value, dict):
            raise InputError(
                f"{where}: '{key}' is a range; only parameters of policies may be, expected a "
                "list of values."
            )
        if key in _WHOLE:
            own = value == DEFAULT and key == "wave"
            if not own and not (_is_whole(value) and _WHOLE[key] <= value <= _MOST_WHOLE):
                raise InputError(
                    f"{where}: {key} has {value!r}; expected whole numbers from {_WHOLE[key]} to "
                    f"{_MOST_WHOLE}."
                )
        elif key == "heads" and _is_whole(value):
            value = str(value)
        elif not isinstance(value, str):
            raise InputError(f"{where}: {key} has {value!r}; expected strings.")
        yield parse_size(value) if key == "l2" and value != DEFAULT else value


def _parameter(key: str, values: Any, where: str) -> tuple[Value, ...] | Range:
    if not isinstance(values, dict):
        listed = _listed(values, key, where)
        for value in listed:
            if not isinstance(value, str | int | float) or isinstance(value, bool):
                raise InputError(f"{where}: {key} has {value!r}; expected numbers or strings.")
        return tuple(listed)
    fields = [field.name for field in dataclasses.fields(Range)]
    for name in values:
        if name not in fields:
            raise InputError(f"{where}: {key}: {unknown_name('key of a range', name, fields)}")
    numbers = [values[name] for name in ("low", "high", "step") if name in values]
    if "low" not in values or "high" not in values or not all(map(_is_number, numbers)):
        raise InputError(f"{where}: {key} is {values!r}; expected numbers low and high.")
    found = Range(**values)
    if not isinstance(found.log, bool) or (found.log and found.step is not None):
        raise InputError(f"{where}: {key} is {values!r}; log is true or false, without a step.")
    if found.low > found.high or (found.log and found.low <= 0) or (found.step or 1) <= 0:
        raise InputError(
            f"{where}: {key} runs from {found.low} to {found.high}; expected low <= high, above 0 "
            "where log = true, and a step above 0."
        )
    if found.whole and not (found.step is None or isinstance(found.step, int)):
        raise InputError(f"{where}: {key} has whole bounds and step {found.step}; write 1.0, ...")
    return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
