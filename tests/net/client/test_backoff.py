"""Waiting before another try."""

from __future__ import annotations

import pytest

from qmq.errors import ConnectionLost, Overloaded
from qmq.net.client.backoff import FIRST_DELAY, LONGEST_DELAY, Backoff, RefusalLog


def test_delays_double_from_50_ms_to_1_s_with_jitter() -> None:
    backoff = Backoff(seed=1)
    bounds = [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    delays = [backoff.next_delay() for _ in bounds]
    assert all(bound / 2 <= delay <= bound for delay, bound in zip(delays, bounds, strict=True))
    assert len(set(delays[5:])) == 3


def test_it_begins_anew_after_a_success_and_never_overflows() -> None:
    backoff = Backoff(seed=1)
    for _ in range(2_000):
        assert backoff.next_delay() <= LONGEST_DELAY
    backoff.reset()
    assert backoff.next_delay() <= FIRST_DELAY


def test_clients_do_not_come_back_together() -> None:
    assert Backoff(seed=1).next_delay() != Backoff(seed=2).next_delay()


def test_the_reasons_of_retries_are_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog("this can't be done yet")
    refusals.came(ConnectionLost("gone"))  # of which the link tells
    for _ in range(3):
        refusals.came(Overloaded("too much"))
    assert caplog.messages == ["this can't be done yet: too much; trying again"]
