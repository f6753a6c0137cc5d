"""When a message is to be delivered, as callers say it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from qmq.durations import Duration
from qmq.errors import InvalidOption
from qmq.format.layout import DELAY_END_US, MAX_DELAY_US
from qmq.net.client.consumer.in_flight import check_delay
from qmq.net.client.group_settings import packed_settings
from qmq.net.client.options import deliver_at_of, expire_at_of


def test_delays_stay_delays_and_times_stay_times() -> None:
    assert deliver_at_of(None, None) == 0
    assert deliver_at_of(1.5, None) == 1_500_000
    assert deliver_at_of(1e-9, None) == 1  # rounded up: never early
    assert deliver_at_of(0, None) == deliver_at_of(-0.0, None) == 0
    assert deliver_at_of(MAX_DELAY_US / 1e6, None) == MAX_DELAY_US < DELAY_END_US
    at = datetime.now(UTC) + timedelta(days=2)
    assert deliver_at_of(None, at) == deliver_at_of(None, at.timestamp())
    assert abs(deliver_at_of(None, at) - at.timestamp() * 1e6) <= 1
    assert deliver_at_of(None, 5) == 0  # 1970 is past


@pytest.mark.parametrize(
    ("delay", "deliver_at", "says"),
    [
        (1.0, 1.0, "either delay or deliver_at"),
        (-1, None, r"delay must be from 0 to below 1e12 seconds, not -1; give a number"),
        (-1e-9, None, "not -1e-09"),
        (float("nan"), None, r"delay must be from 0 to below 1e12 seconds, not nan"),
        ("3x", None, r"delay must be a number of seconds, .*, not '3x'"),
        (True, None, "delay must be a number"),
        (None, datetime(2030, 1, 1), "no time zone"),  # noqa: DTZ001
        (None, "tomorrow", "deliver_at must be a number of seconds"),
        (MAX_DELAY_US / 1e6 + 1, None, r"delay must be at most 731 days \(two years\), not 63158401"),
        (10**400, None, r"delay must be from 0 to below 1e12 seconds, not 1000"),
        (None, 1e11, r"must be at most 731 days \(two years\) ahead"),
    ],
)
def test_impossible_values_are_refused(delay: float | None, deliver_at: float | None, says: str) -> None:
    with pytest.raises(InvalidOption, match=says):
        deliver_at_of(delay, deliver_at)


TIMES: list[Callable[[Duration], int]] = [
    lambda seconds: deliver_at_of(seconds, None),
    expire_at_of,
    check_delay,
    lambda seconds: packed_settings({"expire_after": seconds})["expire_after_us"],
    lambda seconds: packed_settings({"retry_delays": [seconds]})["retry_delays_us"][0],
]


@pytest.mark.parametrize("given", TIMES)
def test_every_time_that_is_given_has_the_same_bounds(given: Callable[[Duration], int]) -> None:
    most = MAX_DELAY_US // 1_000_000
    assert given(most) == MAX_DELAY_US
    assert given(0.07) == 70_000
    assert given(1e-9) == 1, "it is not nothing, which may mean never"
    for wrong in (most + 1, 2 * 366 * 86_400, "732d", timedelta(days=732)):
        with pytest.raises(InvalidOption, match=r"must be at most 731 days \(two years\), not "):
            given(wrong)
    for wrong in (-1, float("inf"), "-1s", timedelta(days=-1)):
        with pytest.raises(InvalidOption, match=r" must be "):
            given(wrong)


@pytest.mark.parametrize("given", TIMES)
def test_every_time_may_be_a_text_or_a_timedelta(given: Callable[[Duration], int]) -> None:
    assert given("1h 30m") == given(timedelta(minutes=90)) == given(5_400) == 5_400_000_000
