"""Traces of one consumer: what it was given and did, by its id or its program, over restarts, and with rights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq.broker.find.trace.consumers import MOST_ROWS_AN_EVENT
from qmq.broker.ports.commands import Connected, TraceConsumer, Unsubscribe
from qmq.broker.ports.effects import Traced
from qmq.broker.ports.rights import Rights
from qmq.format.ids import MessageId
from qmq.format.source import NO_ADDRESS
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.test_filters import sent
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, killed

KEPT = {"pull_log_keep_us": 1 << 50, "pull_log_keep_bytes": 1 << 40}


def traced(driven: Driven, name: str, connection: int = 1, **fields: int) -> Traced:
    said = driven.do(TraceConsumer(connection, driven.request(), name, **fields))
    for _ in range(5_000):
        if said:
            (answer,) = said
            assert isinstance(answer, Traced), answer
            return answer
        said = driven.advance(1)
    raise AssertionError("there is no answer")


def events(driven: Driven, name: str, **fields: int) -> list[tuple[Any, ...]]:
    """Kind, subject, first sequence, count, attempt and reason of each row."""
    return [(kind, *rest) for kind, _, _, _, *rest, _ in traced(driven, name, **fields).rows]


def leave(driven: Driven, consumer: Consumer) -> None:
    driven.do(Unsubscribe(consumer.connection, driven.request(), consumer.subscription))


@pytest.mark.parametrize("stop", [Driven.restart, killed, lambda driven: None])
def test_all_that_a_consumer_did_stands_in_order(tmp_path: Path, stop: Any) -> None:
    driven = Driven(tmp_path, **KEPT)
    sent = driven.send("shop.a", *(b"%d" % number for number in range(4)))
    driven.send("shop.b", b"4")
    driven.do(Connected(1, NO_ADDRESS, program="worker 7"))
    consumer, other = Consumer(driven, "c"), Consumer(driven, "other", connection=2)
    assert len(consumer.pull()) == 5
    consumer.ack(0, 1)
    consumer.back(2, 3, delay_us=0)
    consumer.back(3, 4, Disposition.RELEASE)
    consumer.back(4, 5, Disposition.REJECT)
    assert other.pull() == [b"2", b"3"]
    leave(driven, other)
    assert consumer.pull() == [b"2", b"3"]
    leave(driven, consumer)
    stop(driven)
    wanted = [
        ("joined", None, None, 0, 0, "worker 7"),
        ("handed_out", "shop.a", 0, 4, 1, ""),
        ("handed_out", "shop.b", 0, 1, 1, ""),
        ("acked", "shop.a", 0, 2, 1, ""),
        ("nacked", "shop.a", 2, 1, 1, "broke"),
        ("released", "shop.a", 3, 1, 1, "broke"),
        ("rejected", "shop.b", 0, 1, 1, "broke"),
        ("handed_out", "shop.a", 2, 1, 2, ""),
        ("handed_out", "shop.a", 3, 1, 1, ""),
        ("left", None, None, 0, 0, ""),
    ]
    for name in ("c", "worker 7"):
        found = traced(driven, name)
        assert [(kind, *rest) for kind, _, _, _, *rest, _ in found.rows] == wanted
        assert {tuple(row[2:4]) for row in found.rows} == {("g", "c")}
        assert not found.is_partial
        ids = [row[-1] for row in found.rows]
        assert ids[1] == str(MessageId(driven.store.store_id, sent.partition, sent.position))
        assert ids[4] == str(MessageId(driven.store.store_id, sent.partition, sent.position + 2))
    assert [kind for kind, *_ in events(driven, "other")] == ["joined", "handed_out", "handed_out", "left"]
    assert events(driven, "nobody") == []
    driven.close()


def test_messages_of_a_group_with_tags(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    sent(driven, {"a": [(b"1", ("vip",), 0), (b"2", (), 0), (b"3", ("vip",), 0)]})
    driven.send("a", b"4")
    consumer = Consumer(driven, "c", tags=["vip"])
    assert consumer.pull() == [b"1", b"3"]
    consumer.ack()
    assert events(driven, "c")[1:] == [
        ("handed_out", "a", 0, 1, 1, ""),
        ("handed_out", "a", 2, 1, 1, ""),
        ("acked", "a", 0, 1, 1, ""),
        ("acked", "a", 2, 1, 1, ""),
    ]
    driven.close()


def test_an_expired_session_and_the_consumer_that_came_after_it_are_told_apart(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    driven.send("a", b"1")
    first = Consumer(driven, "c", nonce=b"1", transient=True)
    assert first.pull() == [b"1"]
    driven.advance(31_000)
    again = Consumer(driven, "c", nonce=b"2", transient=True)
    assert again.pull() == [b"1"]
    assert [kind for kind, *_ in events(driven, "c")] == [
        "joined", "handed_out", "session_expired", "joined", "handed_out"
    ]  # fmt: skip
    driven.close()


def test_the_time_and_the_limit_leave_out_what_was_before(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    driven.send("a", *(b"%d" % number for number in range(4)))
    consumer = Consumer(driven, "c")
    assert len(consumer.pull()) == 4
    driven.advance(1_000)
    since_us = driven.now.wall_us
    consumer.ack(*range(4))
    assert events(driven, "c", since_us=since_us) == [("acked", "a", 0, 4, 1, "")]
    assert events(driven, "c", limit=1) == [("acked", "a", 0, 4, 1, "")]
    assert traced(driven, "c", limit=1).is_partial
    driven.close()


def test_many_subjects_of_one_pull_are_cut_and_counted(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    for number in range(MOST_ROWS_AN_EVENT + 5):
        driven.send(f"s.{number:02}", b"x")
    assert len(Consumer(driven, "c").pull()) == MOST_ROWS_AN_EVENT + 5
    rows = [row for row in events(driven, "c") if row[0] == "handed_out"]
    assert [row[1] for row in rows[:-1]] == [f"s.{number:02}" for number in range(MOST_ROWS_AN_EVENT)]
    assert rows[-1] == ("handed_out", None, None, 5, 0, "")
    driven.close()


def test_only_subjects_that_may_be_browsed_are_shown(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    driven.send("shop.a", b"1")
    driven.send("hr.a", b"2")
    assert len(Consumer(driven, "c").pull()) == 2
    driven.do(Connected(2, NO_ADDRESS, Rights("looker", browse=["shop."])))
    driven.do(Connected(3, NO_ADDRESS, Rights("historian", browse=[""])))
    assert [row[4] for row in traced(driven, "c", 2).rows] == ["shop.a"]
    assert [row[4] for row in traced(driven, "c", 3).rows] == [None, "shop.a", "hr.a"]
    driven.close()
