"""The answer to one pull: new messages, messages in flight, nothing, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq.broker.ports.commands import Subscribe
from qmq.broker.ports.effects import PulledMessages, Refused, Subscribed
from qmq.errors import Overloaded
from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_ORDERED
from qmq.net.protocol.types import AT_MOST_ONCE
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, filled, many


def test_a_pull_that_does_not_wait_gets_less_than_it_asked_for_at_least(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    subscription = driven.subscribe("a.", group="g")
    command = driven.pull_command(subscription, max_count=9)._replace(min_count=5)
    (answer,) = driven.do(command)
    assert isinstance(answer, PulledMessages)
    assert (answer.messages, answer.ranges) == (3, ((0, 3, 1),))


def test_one_that_waits_gets_what_it_asked_for_or_what_is_there_in_the_end(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    subscription = driven.subscribe("a.", group="g")
    command = driven.pull_command(subscription, max_count=9)._replace(min_count=5, timeout_ms=100)
    assert driven.do(command) == []
    (answer,) = driven.advance(200)
    assert isinstance(answer, PulledMessages)
    assert answer.messages == 3
    command = driven.pull_command(subscription, max_count=9)._replace(min_count=2, timeout_ms=100)
    assert driven.do(command) == []
    driven.send("a.x", b"4", b"5")
    assert driven.broker.waiting_pulls() == 0


def test_it_is_answered_with_what_is_held_before_anything_else(tmp_path: Path) -> None:
    driven = filled(tmp_path, 6)
    one = Consumer(driven, "c")
    assert one.pull(4) == many(4)
    one.expected = 1  # all but the first message of the answer was lost
    assert one.pull(9) == many(4)[1:]
    assert one.pull(9) == many(6)[4:]


def test_waiting_pulls_of_a_connection_are_bounded_and_refused_by_name(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a.", group="g")
    answers = []
    for _ in range(driven.limits.max_waiting_pulls + 1):
        answers += driven.do(driven.pull_command(subscription)._replace(timeout_ms=1_000))
    (answer,) = answers
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, Overloaded)
    driven.broker._delivery.refuse_waiting_pulls(Overloaded("the broker stops"))
    assert driven.broker.waiting_pulls() == 0


@pytest.mark.parametrize("group", [{"group": None}, {"group": "g"}, {"group": "g", "mode": AT_MOST_ONCE}])
@pytest.mark.parametrize("lane", [LANE_HIGH, LANE_LOW, LANE_ORDERED | 7])
@pytest.mark.parametrize("is_there", [True, False])
def test_messages_of_one_lane_alone_come_at_once_to_whoever_takes_their_subject(
    tmp_path: Path, group: dict[str, Any], lane: int, is_there: bool
) -> None:
    driven = Driven(tmp_path)
    if is_there:
        driven.do(driven.send_command({"a": [b"1"]}, lane=lane))
    command = Subscribe(1, driven.request(), prefixes=("a",), consumer="c", start="first", nonce=b"n", **group)
    (subscribed,) = driven.do(command)
    assert isinstance(subscribed, Subscribed)
    said = driven.do(driven.pull_command(subscribed.subscription)._replace(timeout_ms=20_000))
    if not is_there:
        assert said == []
        said = driven.do(driven.send_command({"a": [b"1"]}, lane=lane))
    for _ in range(5):  # an at-most-once group writes a block first
        said += driven.advance(1)
    assert [one.messages for one in said if isinstance(one, PulledMessages)] == [1]
