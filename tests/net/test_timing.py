"""When a message is to be delivered, as callers say it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from qmq.errors import InvalidOption
from qmq.format.layout import DELAY_END_US, MAX_DELAY_US
from qmq.net.timing import deliver_at_of


def test_delays_stay_delays_and_times_stay_times() -> None:
    assert deliver_at_of(None, None) == 0
    assert deliver_at_of(1.5, None) == 1_500_000
    assert deliver_at_of(1e-9, None) == 1  # rounded up: never early
    assert deliver_at_of(0, None) == deliver_at_of(-3, None) == 0
    assert deliver_at_of(MAX_DELAY_US / 1e6, None) == MAX_DELAY_US < DELAY_END_US
    at = datetime.now(UTC) + timedelta(days=2)
    assert deliver_at_of(None, at) == deliver_at_of(None, at.timestamp())
    assert abs(deliver_at_of(None, at) - at.timestamp() * 1e6) <= 1
    assert deliver_at_of(None, 5) == 0  # 1970 is past


@pytest.mark.parametrize(
    ("delay", "deliver_at", "says"),
    [
        (1.0, 1.0, "either delay or deliver_at"),
        (float("nan"), None, "delay must be a number of seconds, not nan"),
        ("3", None, "delay must be a number of seconds, not '3'"),
        (True, None, "delay must be a number"),
        (None, datetime(2030, 1, 1), "no time zone"),  # noqa: DTZ001
        (None, "tomorrow", "deliver_at must be a number of seconds"),
        (MAX_DELAY_US / 1e6 + 1, None, "in 731.0 days; at most 731 days are allowed"),
        (None, 1e11, "at most 731 days are allowed"),
    ],
)
def test_what_cannot_be_is_refused(delay: float | None, deliver_at: float | None, says: str) -> None:
    with pytest.raises(InvalidOption, match=says):
        deliver_at_of(delay, deliver_at)
