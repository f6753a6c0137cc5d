"""Durations as users write them: how they are read, refused and printed."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.durations import duration_text, microseconds_of, milliseconds_of, seconds_of
from qmq.errors import InvalidOption


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        (5, 5.0),
        (0.25, 0.25),
        (timedelta(minutes=5), 300.0),
        ("0", 0.0),
        ("5", 5.0),
        (" 5 ", 5.0),
        (".5", 0.5),
        ("1.5s", 1.5),
        ("1.s", 1.0),
        ("250ms", 0.25),
        ("10us", 0.00001),
        ("5m", 300.0),
        ("5 m", 300.0),
        ("1.5h", 5_400.0),
        ("7d", 604_800.0),
        ("2w", 1_209_600.0),
        ("1h30m", 5_400.0),
        ("1h 30m", 5_400.0),
        ("1d 2h 3m 4s 5ms 6us", 93_784.005006),
    ],
)
def test_numbers_timedeltas_and_texts_are_read(value: object, seconds: float) -> None:
    assert seconds_of("delay", value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        -1, -0.1, 1e12, 1e305, math.inf, -math.inf, math.nan, 10**400, True, None, b"5m", [5], "", " ",
        timedelta(seconds=-1), "m", "-5m", "+5m", "5x", "5M", "5 minutes", "1e3", "1_000", "5m5m", "30m 1h", "1h  30m",
        "5m,", "\u0665m", "nan", "inf", "9" * 90, "9" * 200, "9999999w",
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(InvalidOption, match=r"^delay must be"):
        seconds_of("delay", value)


def test_a_refusal_says_how_to_write_a_duration() -> None:
    with pytest.raises(InvalidOption) as caught:
        seconds_of("drain", "5 minutes")
    assert str(caught.value) == (
        "drain must be a number of seconds, a timedelta, or a text such as "
        '"250ms", "1.5s", "5m", "1h 30m" or "7d", not \'5 minutes\''
    )


def test_whole_units_are_rounded_but_never_to_nothing() -> None:
    assert [microseconds_of("t", value) for value in (0, 1e-9, 0.1, "0.1s", timedelta(days=700), "1.4us")] == [
        0, 1, 100_000, 100_000, 60_480_000_000_000, 1
    ]  # fmt: skip
    assert [milliseconds_of("t", value) for value in (0, "1us", "1.5s", "7d", timedelta(seconds=1))] == [
        0, 1, 1_500, 604_800_000, 1_000
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (1, "1s"),
        (1.5, "1.5s"),
        (0.25, "250ms"),
        (0.0015, "1ms 500us"),
        (0.000002, "2us"),
        (60, "1m"),
        (5_400, "1h 30m"),
        (604_800, "7d"),
        (90_061.25, "1d 1h 1m 1.25s"),
    ],
)
def test_durations_are_printed_shortly(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.integers(0, 10**15))
def test_printed_durations_read_as_the_same_microseconds(us: int) -> None:
    assert microseconds_of("t", duration_text(us / 1e6)) == us
