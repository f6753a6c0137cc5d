"""Priorities of messages that come again: with new ones of other priorities, for consumers that may have only some."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.slots import Keys, numbers_of, texts
from tests.broker.find.test_resend import resend
from tests.broker.test_admin import ask


def test_a_retry_that_waits_for_another_consumer_holds_no_lower_priority_up(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1"]
    driven.back(one, 0)
    assert texts(driven.take(one, 1)) == ["k 0"]
    driven.put("low")
    assert texts(driven.take(two)) == ["low 0"]
    driven.close()


def test_a_high_retry_of_another_prefix_holds_nothing_up(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", "a."), driven.join("two", "c.")
    driven.put("high")
    assert texts(driven.take(one)) == ["high 0"]
    driven.back(one, 0)
    driven.put("high", "normal", "low", subject="c.b")
    assert texts(driven.take(two)) == ["high 1", "normal 0", "low 0"]
    driven.close()


@pytest.mark.parametrize("most", [1, 10])
def test_in_strict_groups_a_lower_retry_comes_behind_higher_new_messages(tmp_path: Path, most: int) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", priority_share=0)
    driven.put("high", "normal", "low")
    assert texts(driven.take(one)) == ["high 0", "normal 0", "low 0"]
    for number in range(3):
        driven.back(one, number)
    driven.put("high", "normal", "low")
    found = driven.drain(one, most=most)
    assert [body.split()[0] for body in found] == ["high", "high", "normal", "normal", "low", "low"]
    driven.close()


def test_low_messages_get_their_share_beside_normal_retries(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", max_attempts=1_000, priority_share=0.1)
    driven.put(*["normal"] * 5, *["low"] * 50)
    found = list[str]()
    for most in (5, *[1] * 100):
        answer = driven.take(one, most)
        found += texts(answer)
        for number, body in zip(numbers_of(answer), texts(answer), strict=True):
            driven.back(one, number) if body.startswith("normal") else driven.ack(one, number)
    assert 8 <= sum(body.startswith("low") for body in found) <= 12
    driven.close()


def test_nothing_is_saved_up_for_low_messages_before_there_are_any(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", priority_share=0.5)
    driven.put("high", *["normal"] * 20)
    assert len(driven.drain(one)) == 21
    driven.put(*["normal", "low"] * 6)
    found = [body for _ in range(6) for body in texts(driven.take(one, 1))]
    assert 1 <= sum(body.startswith("low") for body in found) <= 3
    driven.close()


def test_retries_that_do_not_fit_stay_in_the_order_of_their_priorities(tmp_path: Path) -> None:
    """Of the retries of a consumer some stay behind, since the answer is full; others may not be for it."""
    driven = Keys(tmp_path)
    one = driven.join("one", "a.", "c.", priority_share=0)
    driven.put("high")
    driven.put("normal", "normal", subject="c.b")
    assert texts(driven.take(one)) == ["high 0", "normal 0", "normal 1"]
    for number in range(3):
        driven.back(one, number)
    two = driven.join("two", "c.")
    command = driven.pull_command(two.subscription, connection=two.connection, max_bytes=10)
    (answer,) = driven.do(command)
    assert texts(answer) == ["normal 0"]
    assert texts(driven.take(one, 1)) == ["high 0"]
    driven.close()


@pytest.mark.parametrize("share", [0, 0.1, 1])
def test_redriven_and_resent_messages_keep_their_priority(tmp_path: Path, share: float) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", priority_share=share)
    driven.put("low", "normal", "high")
    answer = driven.take(one)
    assert sorted(texts(answer)) == ["high 0", "low 0", "normal 0"]
    for number in numbers_of(answer):
        driven.back(one, number, Disposition.REJECT)
    ids = [letter["id"] for letter in ask(driven, "dead_letters", group="g")["rows"]]
    ask(driven, "redrive", group="g", ids=ids)
    expected = ["high 0", "normal 0", "low 0"]
    # With a share of 1, the first pull has left all that follows to lower priorities.
    assert driven.drain(one, most=1) == (expected[::-1] if share == 1 else expected)
    resend(driven, prefix="a.", group="g")
    assert driven.drain(one, most=1) == expected
    driven.close()


def test_quarantined_messages_come_by_priority(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("low", "normal", "high")
    assert texts(driven.take(one)) == ["high 0", "normal 0", "low 0"]
    driven.expire(two)
    assert driven.drain(two) == ["high 0", "normal 0", "low 0"]
    driven.close()
