"""Senders are answered once their batch is on disk; repeats are answered like the first send."""

from __future__ import annotations

from pathlib import Path

from qmq.broker.ports.commands import Disconnected, LastSequence, Send
from qmq.broker.ports.effects import LastSequenceIs, Sent
from tests.broker.harness import PRODUCER, Driven, batch_of


def sending(driven: Driven, *, flush: bool = True, connection: int = 1) -> Send:
    return Send(connection, driven.request(), batch_of({"a": [b"one", b"two"]}, 7, PRODUCER), flush)


def test_a_repeat_waits_for_the_sync_that_the_first_one_waits_for(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    first, again = sending(driven), sending(driven, flush=False, connection=2)
    asked = LastSequence(3, driven.request(), PRODUCER)
    assert driven.do(first) == driven.do(again) == driven.do(asked) == []
    waiting = driven.broker._intake.replies.waiting_for_sync
    assert waiting() == 3
    said = driven.sync() + driven.sync()
    assert waiting() == 0
    sent = [one for one in said if isinstance(one, Sent)]
    assert [one.request for one in sent] == [first.request, again.request]
    assert sent[0][2:] == sent[1][2:]
    assert [one for one in said if isinstance(one, LastSequenceIs)] == [LastSequenceIs(3, asked.request, 8)]
    driven.close()


def test_many_answers_of_closed_connections_are_dropped(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    driven.do(sending(driven))
    replies = driven.broker._intake.replies
    (partition,) = driven.broker._intake._partitions
    partition.most_waiting = 4
    for connection in range(2, 10):
        driven.do(sending(driven, connection=connection))
        driven.do(Disconnected(connection))
    assert replies.waiting_for_sync() < 9
    driven.do(Disconnected(1))
    driven.sync()
    assert replies.waiting_for_sync() == 0
    driven.close()
