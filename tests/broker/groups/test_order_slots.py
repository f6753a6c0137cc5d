"""The slots of order keys in one group, seen through a broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Ack, Administer, DispositionRange, HandBack
from qmq.broker.ports.effects import Acked, Administered, HandedBack
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.test_order import Slots, attempts_of, numbers_of, texts


def test_a_release_of_several_keys_waits_only_where_a_message_before_it_does(tmp_path: Path) -> None:
    driven = Slots(tmp_path)
    one = driven.join("one")
    driven.put("k", "l", "k", "l")
    driven.do(driven.send_command({"a.b": [b"plain"]}))
    answer = driven.take(one)
    assert texts(answer) == ["plain", "k 0", "l 0", "k 1", "l 1"]
    numbers = dict(zip(texts(answer), numbers_of(answer), strict=True))
    backs = (
        DispositionRange(numbers["k 0"], numbers["k 0"] + 1, Disposition.NACK, 500_000, "it broke"),
        DispositionRange(numbers["plain"], numbers["k 0"], Disposition.RELEASE, None, ""),
        DispositionRange(numbers["l 0"], numbers["l 1"] + 1, Disposition.RELEASE, None, ""),
    )
    (said,) = driven.do(HandBack(one.connection, driven.request(), one.subscription, backs))
    assert isinstance(said, HandedBack)
    assert not said.refused
    assert texts(driven.take(one)) == ["plain", "l 0", "l 1"]
    driven.advance(500)
    found = [*texts(driven.take(one)), *texts(driven.take(one))]
    assert found == ["k 0", "k 1"]
    driven.close()


@pytest.mark.parametrize("restarts", [True, False])
def test_a_message_with_two_retries_holds_its_slot_until_both_are_settled(tmp_path: Path, restarts: bool) -> None:
    """A seek back that keeps retries hands a message out beside an earlier life of it."""
    driven = Slots(tmp_path)
    one = driven.join("one", max_attempts=9)
    driven.put("k", "k")
    driven.back(one, *numbers_of(driven.take(one, 1)), delay_us=0)
    fields = {"group": "g", "to": "first", "clear_retries": False}
    assert isinstance(driven.do(Administer(1, driven.request(), "seek_group", fields))[-1], Administered)
    one = driven.join("one")
    for attempt in (2, 1):
        answer = driven.take(one, 1)
        assert (texts(answer), attempts_of(answer)) == (["k 0"], [attempt])
    for number in range(2):
        driven.back(one, number + 1, delay_us=0)
    if restarts:
        driven.restart()
        one = driven.join("one")
    first = driven.take(one, 1)
    assert texts(first) == ["k 0"]
    driven.ack(one, *numbers_of(first))
    second = driven.take(one, 1)
    assert texts(second) == ["k 0"]
    driven.ack(one, *numbers_of(second))
    assert texts(driven.take(one)) == ["k 1"]
    driven.close()


@pytest.mark.parametrize("intervals", [(0, 1, 0, 2), (0, 2, 0, 2), (1, 2, 0, 2), (0, 1, 1, 2)])
def test_an_ack_that_names_a_message_twice_settles_it_once(tmp_path: Path, intervals: tuple[int, ...]) -> None:
    driven = Slots(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "k", "k")
    assert texts(driven.take(one, 3)) == ["k 0", "k 1", "k 2"]
    (said,) = driven.do(Ack(one.connection, driven.request(), one.subscription, intervals))
    assert isinstance(said, Acked)
    assert texts(driven.take(two)) == []
    driven.ack(one, 2)
    assert texts(driven.take(two)) == ["k 3"]
    driven.close()
