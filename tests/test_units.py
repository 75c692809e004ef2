from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavealign.errors import InputError
from wavealign.units import format_heads, format_size, parse_block, parse_heads, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("50MB", 50_000_000),
        ("50MiB", 52_428_800),
        ("37.5 MiB", 39_321_600),
        ("1B", 1),
        ("64kb", 64_000),
        ("1.5GB", 1_500_000_000),
        ("2GiB", 2**31),
        ("2.6B", 3),  # the nearest byte
        ("1.0009765KiB", 1025),
    ],
)
def test_sizes(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["50", "", "MB", "-1MB", "0MB", "0.1B", "5XB", "1e3MB", "nanMB"])
def test_sizes_that_are_none(text):
    with pytest.raises(InputError, match="size"):
        parse_size(text)


def test_format_size():
    assert [format_size(n) for n in (12, 65536, 35651584, 3 * 2**41)] == [
        "12 B", "64.0 KiB", "34.0 MiB", "6144.0 GiB",
    ]  # fmt: skip


def test_blocks():
    assert parse_block("128x64") == (128, 64)
    assert parse_block("128") == (128, 128)
    for text in ("", "x64", "128x", "0x64", "64x00", "-1x2", "1x2x3"):
        with pytest.raises(InputError, match="block size"):
            parse_block(text)


@given(st.lists(st.integers(0, 30), unique=True, min_size=1))
def test_heads_round_trip(heads):
    assert parse_heads(format_heads(heads), 31) == heads
