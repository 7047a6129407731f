"""Hostile and binary text does nothing, and what is ordinary stays as it was."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.text import (
    as_json_value,
    counted,
    duration,
    listed,
    number,
    percent,
    sanitise,
    size,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, Grüße, 损失, ∇", "plain text, Grüße, 损失, ∇"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07after", "after"),
        ("\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq#0\x1b\\x", "x"),
        ("\x1b]0;" + 510 * "a" + "and the error", "and the error"),
        ("\x9b2Jx", "x"),
        ("\x1bcx", "x"),
        ("a\x00b\x07c\x7fd", "a�b�c�d"),
        ("abc\u202etxt.exe", "abc�txt.exe"),
        ("a\u2028b\u2029c\u200bd", "a�b�c�d"),
        ("\ud800", "�"),
        ("one\ntwo", "one two"),
    ],
)
def test_what_would_do_something_is_taken_away_or_shown(text, shown):
    """Escape sequences vanish, and other controls, surrogates and marks of direction are
    replaced.
    """
    assert sanitise(text) == shown


def test_a_long_text_is_cut_and_lines_stay_where_they_may():
    """The bound holds, with a mark; with lines a carriage return is a line break."""
    assert sanitise("x" * 5000, most=10) == "x" * 9 + "…"
    assert sanitise("a\r\nb\rc", lines=True) == "a\nb\nc"
    assert sanitise(None) == "None"


@given(st.text())
def test_nothing_that_is_not_seen_remains(text):
    """Of any text, what remains is printable, fits UTF-8 and is inert already."""
    shown = sanitise(text)
    shown.encode()
    assert shown.isprintable()
    assert sanitise(shown) == shown


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(_VALUES)
def test_any_value_becomes_strict_json(value):
    """A parser that refuses NaN and lone surrogates takes it, and finite numbers are the same."""
    text = json.dumps(as_json_value(value), allow_nan=False)
    text.encode()
    if isinstance(value, float) and math.isfinite(value):
        assert json.loads(text) == value


def test_a_duration_has_its_two_largest_units():
    """Nothing is said of units that are 0, and less than a tenth of a second is milliseconds."""
    shown = [
        duration(seconds) for seconds in (0, 0.0042, 0.5, 8.2, 45, 60, 185, 11_135, 7200, 187_200)
    ]
    assert shown == [
        "0.0 s",
        "4.2 ms",
        "0.5 s",
        "8.2 s",
        "45 s",
        "1 min",
        "3 min 5 s",
        "3 h 5 min",
        "2 h",
        "2 d 4 h",
    ]


def test_a_size_has_three_digits_and_never_an_exponent():
    """What three digits would round to 1,000 is shown in the next unit."""
    sizes = [size(count) for count in (0, 999, 1000, 1536, 1023 << 10, (1 << 20) - 300, 5 << 40)]
    assert sizes == ["0 B", "999 B", "0.977 KiB", "1.5 KiB", "0.999 MiB", "1 MiB", "5 TiB"]
    assert not any("e" in size(count) for count in range(990_000, 1_060_000, 13))


def test_numbers_are_rounded_for_people():
    """Four digits of a number, two of a percentage."""
    assert [number(value) for value in (0.0123456, 12.345678, 98765.4)] == [
        "0.01235",
        "12.35",
        "98,765",
    ]
    assert [percent(share) for share in (0.0812, 0.5, 0.00123)] == ["8.1 %", "50 %", "0.12 %"]


def test_counts_and_lists_read_as_in_a_sentence():
    """A noun is singular or plural, and a long list is cut."""
    assert [counted(count, "batch") for count in (0, 1, 1200)] == [
        "0 batches",
        "1 batch",
        "1,200 batches",
    ]
    assert listed([]) == ""
    assert listed("ab") == "a and b"
    assert listed(range(3), most=2) == "0, 1 and 2"
    assert listed(range(9), most=2) == "0, 1 and 7 more"
