"""Names whose messages nobody takes are reported, once each; time is an argument."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.groups.untaken import NAMED, UNTAKEN_US
from qmq.broker.ports.commands import Disconnected
from qmq.broker.ports.work import whole
from tests.broker.harness import Driven
from tests.broker.test_admin import ask

START = 5_000_000


@pytest.fixture
def driven(tmp_path: Path) -> Driven:
    return Driven(tmp_path)


def codes(driven: Driven, now_us: int) -> list[str]:
    return [one.code for one in whole(driven.broker.untaken.look(now_us))]


def test_a_prefix_that_no_consumer_takes_for_an_hour_is_reported_once(driven: Driven) -> None:
    driven.subscribe("shop.order.", "shop.mail.", connection=1)
    driven.send("shop.order.paid", b"1")
    driven.do(Disconnected(1))
    driven.subscribe("shop.mail.", connection=2)
    assert codes(driven, START) == []
    assert codes(driven, START + UNTAKEN_US - 1) == []
    assert codes(driven, START + UNTAKEN_US) == ["not_taken"]
    (found,) = driven.broker.untaken.found
    assert "'shop.order.'" in found.text
    assert "qmq groups set g" in found.text
    assert codes(driven, START + 2 * UNTAKEN_US) == [], "it was reported"
    assert driven.broker.untaken.found == (found,), "and is still so"
    driven.subscribe("shop.order.", connection=3)
    assert codes(driven, START + 2 * UNTAKEN_US) == []
    assert driven.broker.untaken.found == ()
    driven.do(Disconnected(3))
    assert codes(driven, START + 3 * UNTAKEN_US) == []
    assert codes(driven, START + 4 * UNTAKEN_US) == ["not_taken"], "an hour after it was taken"


@pytest.mark.parametrize("asked", ["shop.", "", "shop.order.paid"])
def test_a_consumer_takes_a_prefix_within_or_around_its_own(driven: Driven, asked: str) -> None:
    driven.subscribe("shop.order.", connection=1)
    driven.send("shop.order.paid", b"1")
    driven.do(Disconnected(1))
    driven.subscribe(asked, connection=2)
    assert codes(driven, START) == codes(driven, START + UNTAKEN_US) == []


def test_a_group_without_consumers_is_reported_when_messages_wait(driven: Driven) -> None:
    driven.subscribe("shop.order.", "shop.mail", connection=1)
    driven.send("shop.mail", b"1")
    driven.do(Disconnected(1))
    codes(driven, START)
    assert codes(driven, START + UNTAKEN_US) == ["no_consumer"], "nothing waits below shop.order."
    (found,) = driven.broker.untaken.found
    assert "has no consumer for 'shop.mail'" in found.text


def test_subjects_that_no_group_follows_are_reported_together(driven: Driven) -> None:
    for number in range(NAMED + 2):
        driven.send(f"mistyped{number}.order", b"1")
    assert codes(driven, START) == codes(driven, START + UNTAKEN_US) == [], "a broker without groups is read in full"
    driven.subscribe("shop.", connection=1)
    driven.send("shop.order", b"1")
    assert codes(driven, START) == []
    assert codes(driven, START + UNTAKEN_US) == ["not_followed"]
    (found,) = driven.broker.untaken.found
    assert "'mistyped0.order', 'mistyped1.order', 'mistyped2.order' and 2 more" in found.text
    assert "shop" not in found.text
    driven.subscribe("mistyped0.", group=None, connection=2)
    codes(driven, START + UNTAKEN_US)
    assert "mistyped0" not in driven.broker.untaken.found[0].text, "a consumer without a group reads it"
    driven.subscribe("", group="all", connection=3)
    assert codes(driven, START + UNTAKEN_US) == []
    assert driven.broker.untaken.found == ()


def test_a_subject_beside_a_prefix_is_reported_at_once(driven: Driven) -> None:
    driven.subscribe("shop.", connection=1)
    driven.send("shop", b"1")
    driven.send("shop.order", b"1")
    assert codes(driven, START) == ["beside_prefix"]
    (found,) = driven.broker.untaken.found
    assert "'shop', though one follows 'shop.'" in found.text
    driven.subscribe("shop", group="other", connection=2)
    assert codes(driven, START) == []
    assert driven.broker.untaken.found == ()


def test_a_group_that_follows_a_name_no_more_is_not_reported(driven: Driven) -> None:
    driven.subscribe("shop.order.", "shop.mail.", connection=1)
    driven.send("shop.order.paid", b"1")
    driven.do(Disconnected(1))
    codes(driven, START)
    ask(driven, "set_group", group="g", follows=["shop.mail."])
    assert codes(driven, START + UNTAKEN_US) == []
