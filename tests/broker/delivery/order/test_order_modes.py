"""Plain messages, priorities and order keys on one subject, for groups of every mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Subscribe
from qmq.broker.ports.effects import Subscribed
from qmq.net.protocol.types import AT_MOST_ONCE, BROADCAST
from tests.broker.delivery.order.slots import Keys, numbers_of, texts
from tests.broker.delivery.test_at_most_once import stopped
from tests.broker.harness import bodies_of
from tests.broker.test_consuming import Consumer

MIXED = ("normal", "k", "low", "l", "high", "k", "normal", "low", "k", "high", "l")
STOPS = pytest.mark.parametrize("stop", [None, stopped, Keys.kill])


@pytest.mark.parametrize("prefixes", [("a.",), ("a.b", "")])
@pytest.mark.parametrize("most", [1, 3, 100])
def test_one_group_gets_high_ones_first_and_each_key_in_order(
    tmp_path: Path, prefixes: tuple[str, ...], most: int
) -> None:
    driven = Keys(tmp_path, partitions=3)
    one = driven.join("one", *prefixes, priority_share=0)
    two = driven.join("two", *prefixes)
    sent = driven.put(*MIXED)
    found = driven.drain(one, two, most=most)
    assert sorted(found) == sorted(sent)
    kinds = [body.split()[0] for body in found]
    assert kinds[:2] == ["high"] * 2
    assert kinds[-2:] == ["low"] * 2
    for key in set(MIXED):
        assert [body for body in found if body.split()[0] == key] == [body for body in sent if body.split()[0] == key]
    driven.close()


@pytest.mark.parametrize("share", [0.1, 1])
def test_low_messages_move_beside_a_flood_of_order_keys(tmp_path: Path, share: float) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", priority_share=share)
    driven.put(*"klmn" * 15, *["low"] * 6)
    found = [body for _ in range(30) for body in texts(driven.take(one, 1))]
    low = sum(body.startswith("low") for body in found)
    assert low == (6 if share == 1 else 2)
    driven.close()


@STOPS
@pytest.mark.parametrize("mode", [AT_MOST_ONCE, BROADCAST, "solo"])
def test_other_modes_get_all_lanes_in_stored_order(
    tmp_path: Path, mode: str, stop: Callable[[Keys], None] | None
) -> None:
    driven, prefix = Keys(tmp_path), "a."

    def subscribe() -> int:
        if mode == "solo":
            return driven.subscribe(prefix, group=None, start="first")
        return joined(driven, prefix, mode)

    subscription = subscribe()
    sent = driven.put(*MIXED)
    found = [body.decode() for body in bodies_of(driven.pull(subscription, max_count=3))]
    assert found == sent[:3]
    if stop is not None:
        stop(driven)
        subscription = subscribe()
    rest = list[str]()
    while some := bodies_of(driven.pull(subscription, max_count=2)):
        rest += [body.decode() for body in some]
    if mode == "solo" and stop is not None:
        assert rest == sent  # the broker keeps no cursor for it
    elif mode == AT_MOST_ONCE and stop is Keys.kill:
        assert rest == sent[len(sent) - len(rest) :]  # none twice
    else:
        assert rest == sent[3:]
    driven.close()


def joined(driven: Keys, prefix: str, mode: str, connection: int = 1) -> int:
    """Join a group of that mode on a connection of its own; return the subscription."""
    name, nonce = f"c{connection}", b"%16d" % connection
    command = Subscribe(connection, driven.request(), "h", (prefix,), name, None, nonce, nonce, mode=mode)
    (answer,) = [one for one in driven.do(command) or driven.sync_records() if isinstance(one, Subscribed)]
    return answer.subscription


def test_a_failed_message_of_a_broadcast_holds_nothing_up(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    consumer = Consumer(driven, "c", "a.", mode=BROADCAST, retry_delays_us=(0,), group="h")
    driven.put("k", "k", "k")
    assert consumer.pull(2) == [b"k 0", b"k 1"]
    consumer.back(0, 1)
    found = consumer.pull() + consumer.pull()
    assert sorted(found) == [b"k 0", b"k 2"]
    assert consumer.ack() == 1, "the nacked one alone is not in flight any more"
    driven.close()


def test_two_consumers_of_an_at_most_once_group_share_the_messages_of_a_slot(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    subscriptions = {connection: joined(driven, "a.", AT_MOST_ONCE, connection) for connection in (1, 2)}
    sent = driven.put(*["k"] * 6)
    found = list[str]()
    for connection in (1, 2, 1):
        command = driven.pull_command(subscriptions[connection], max_count=2, connection=connection)
        (answer,) = driven.do(command)
        found += texts(answer)
    assert found == sent
    driven.close()


def test_a_group_takes_the_first_order_key_while_it_waits(tmp_path: Path) -> None:
    """Until then the subject had no lanes, and pulls took the short ways."""
    driven = Keys(tmp_path)
    one, two = driven.join("one", "a.b"), driven.join("two", "a.b")
    driven.put("normal")
    assert driven.drain(one) == ["normal 0"]
    assert driven.wait(two, max_count=1) == []
    said = driven.do(driven.command_of("k"))
    assert [texts(answer) for answer in said if getattr(answer, "ranges", None)] == [["k 0"]]
    driven.put("k", "normal")
    assert texts(driven.take(one)) == ["normal 1"], "the slot belongs to the other"
    driven.ack(two, 0)
    answer = driven.take(one)
    assert texts(answer) == ["k 1"]
    driven.ack(one, *numbers_of(answer))
    driven.close()
