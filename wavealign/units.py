"""Sizes, blocks and head lists as people write them on a command line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from wavealign.errors import InputError

_FACTORS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes in a size such as ``"50MB"`` (50·10⁶) or ``"37.5MiB"`` (37.5·2²⁰).

    The unit is required: a bare number could be bytes or megabytes.

    Raises:
        InputError: no unit, an unknown unit, or a size that isn't a positive whole
            number of bytes.
    """
    expected = "expected a number and a unit, e.g. 50MB (50·10⁶ bytes) or 48MiB (48·2²⁰ bytes)"
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"size '{text}' can't be read; {expected}.")
    number, unit = match.groups()
    if not unit:
        raise InputError(f"size '{text}' has no unit; {expected}.")
    factor = _FACTORS.get(unit.upper())
    if factor is None:
        raise InputError(
            f"size '{text}' has an unknown unit '{unit}'; units are B, kB, MB, GB (powers of "
            "1000) and KiB, MiB, GiB (powers of 1024)."
        )
    size_bytes = float(number) * factor
    if size_bytes < 1 or not math.isfinite(size_bytes):
        raise InputError(f"size '{text}' must be at least one byte.")
    return round(size_bytes)


def format_size(size_bytes: float, places: int = 1) -> str:
    """A size for people, in powers of 1024: ``"34.0 MiB"``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.{0 if unit == 'B' else places}f} {unit}"
        value /= 1024
    return f"{value:.{places}f} GiB"


def decimal_size(largest_bytes: float) -> Callable[[float], str]:
    """How to write sizes of one column, in the power of 1000 that suits its largest."""
    factor, unit = next(
        ((f, u) for f, u in ((10**9, "GB"), (10**6, "MB")) if largest_bytes >= f), (10**3, "kB")
    )
    return lambda size_bytes: f"{size_bytes / factor:.2f} {unit}"


def decimals(largest: float, unit: str) -> Callable[[float], str]:
    """How to write figures of one column in a fixed unit: two decimals, more where all are small.

    The largest keeps three digits that count: launches of small masks take microseconds.
    """
    places = 2 if largest >= 1 or largest <= 0 else min(2 - math.floor(math.log10(largest)), 9)
    return lambda value: f"{value:.{places}f} {unit}"


def parse_block(text: str) -> tuple[int, int]:
    """``(block_q, block_kv)`` in tokens from ``"128x64"``; ``"128"`` means 128x128.

    Raises:
        InputError: not one or two positive whole numbers.
    """
    match = re.fullmatch(r"(\d{1,15})(?:[xX×,](\d{1,15}))?", text.strip())
    if match is None or "0" in {n.lstrip("0") or "0" for n in match.groups() if n}:
        raise InputError(
            f"block size '{text}' can't be read; expected positive tokens per query block and "
            "per K/V block, e.g. 128x64."
        )
    block_q = int(match.group(1))
    return block_q, int(match.group(2) or block_q)


def parse_heads(text: str, num_heads: int, what: str = "head") -> list[int]:
    """Head indices from ``"0,3-7"``, in the order given, checked against `num_heads`.

    Args:
        text: as written.
        num_heads: how many there are.
        what: what is counted, in messages: "head", "step", "layer".

    Raises:
        InputError: text that isn't a list of indices and ranges, a head that the mask
            doesn't have, or a head named twice.
    """
    heads: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part)
        if match is None:
            raise InputError(
                f"{what}s '{text}' can't be read at '{part}'; expected indices and ranges, e.g. "
                "0,3-7."
            )
        first = int(match.group(1))
        last = int(match.group(2) or first)
        if last < first:
            raise InputError(f"{what}s '{text}': the range '{part.strip()}' runs backwards.")
        if last >= num_heads:
            raise InputError(
                f"{what}s '{text}': {what} {last} doesn't exist; there are {num_heads} "
                f"(valid: 0-{num_heads - 1}, nearest: {num_heads - 1})."
            )
        heads.extend(range(first, last + 1))
    if len(set(heads)) != len(heads):
        raise InputError(f"{what}s '{text}' names a {what} twice.")
    return heads


def format_heads(heads: Sequence[int]) -> str:
    """Head indices as they are given to ``--heads``: ``"0,3-7"``."""
    parts: list[list[int]] = []
    for head in heads:
        if parts and head == parts[-1][-1] + 1:
            parts[-1].append(head)
        else:
            parts.append([head])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
