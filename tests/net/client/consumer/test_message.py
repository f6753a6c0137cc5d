"""Views of received messages."""

from __future__ import annotations

import gc
import sys
import weakref
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow
import pytest

from qmq.errors import QmqError
from qmq.format.build import make_header
from qmq.format.ids import MessageId
from qmq.format.pieces import read_answer
from qmq.format.run import Run
from qmq.net.client.consumer.message import Message, MessageBatch, each_message, messages_of
from tests.net.scripted import START_US, STORE, stored_batch

BODIES = [b"", b"one", bytes(range(256))]


def runs(*batches: bytes) -> list[Run]:
    found, damaged = read_answer(memoryview(b"".join(batches)))
    assert not damaged
    return found


def two_subjects() -> list[Run]:
    """Two batches, three runs, six messages."""
    return runs(
        stored_batch({"a.b": BODIES}, position=9_000, first_sequence=40, partition=2),
        stored_batch({"a.c": [b"x"], "a.b": [b"y", b"z"]}, position=9_900, stored_at_us=START_US + 1),
    )


def test_a_message_shows_its_fields() -> None:
    header = make_header("order-1", ("vip", "eu"), {"price": "125"})
    (run,) = runs(stored_batch({"a.b": BODIES}, position=9_000, first_sequence=40, partition=2, header=header))
    message = messages_of([run])[1]
    assert MessageId.parse(message.id) == MessageId(STORE, 2, 9_001)
    assert (message.subject, message.sequence, message.body, message.attempt) == ("a.b", 41, b"one", 1)
    assert (message.key, message.tags, message.properties) == ("order-1", ("vip", "eu"), {"price": "125"})
    assert message.stored_at == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=START_US)
    assert (message.stored_at_us, message.created_at_us) == (START_US, START_US - 5)
    assert message.stored_at - message.created_at == timedelta(microseconds=5)
    assert repr(message) == f"<Message {message.id} 'a.b' sequence 41, 3 bytes>"


def test_a_message_without_header_has_none_of_it() -> None:
    (run,) = runs(stored_batch({"a.b": BODIES}))
    for message in messages_of([run]):
        assert (message.key, message.tags, message.properties) == (None, (), {})


#: Of one answer: a large run, small ones in one batch beside a large one, small ones alone, and batches of one message.
LARGE_ANSWER = (
    stored_batch({"a.large": [b"%06d" % number * 10 for number in range(3_000)]}, position=9_000),
    stored_batch({f"a.{size}": [bytes(size), b"%d" % size] for size in (1, 10, 20_000, 100)}, position=900_000),
    stored_batch({f"b.{number}": [b"%d" % number * 50] for number in range(500)}, position=1_000_000),
    *(stored_batch({"c": [b"%d" % number]}, position=2_000_000 + 1_000 * number) for number in range(50)),
)
KEYED_ANSWER = tuple(
    stored_batch({subject: bodies}, header=make_header("order-1", ("vip",), {"price": "125"}), position=9_000)
    for subject, bodies in (("few", [bytes(9_000)] * 5), ("many", [bytes(100)] * 600), ("small", [b"1", b"2"]))
)


def shown(message: Message) -> tuple[object, ...]:
    """Return all that a message shows."""
    fields = (name for name, kept in vars(Message).items() if isinstance(kept, property) and not name.startswith("_"))
    return message.body, *(getattr(message, name) for name in fields)


@pytest.mark.parametrize("batches", [LARGE_ANSWER, KEYED_ANSWER])
def test_messages_of_a_large_answer_show_what_they_show_of_a_small_one_and_keep_none_of_it(
    batches: tuple[bytes, ...],
) -> None:
    alone = [message for batch in batches for run in runs(batch) for message in plain_messages_of(run)]
    answer = np.frombuffer(b"".join(batches), np.uint8).copy()
    is_kept = weakref.ref(answer)
    found, _ = read_answer(answer.data)
    batch = MessageBatch(found)
    ways = messages_of(found), list(each_message(found)), [batch[index] for index in range(len(batch))]
    del answer, found, batch
    gc.collect()
    assert is_kept() is None
    wanted = list(map(shown, alone))
    for messages in ways:
        assert list(map(shown, messages)) == wanted


def plain_messages_of(run: Run) -> list[Message]:
    """Return views of the whole run."""
    return [Message(run, run.delivery_sequence + index, run.body(index)) for index in range(run.count)]


@pytest.mark.parametrize("batches", [LARGE_ANSWER, KEYED_ANSWER])
def test_a_message_is_a_run_of_its_own_again_with_its_body(batches: tuple[bytes, ...]) -> None:
    found = runs(*batches)
    for run in found:
        run.delivery_sequence, run.attempt = 700, 3
        for message in messages_of([run])[:: max(run.count // 7, 1)]:
            index = message._number - 700
            again, wanted = message._run.with_body(message._index, message.body), run.slice(index, index + 1)
            assert again.data == wanted.data
            assert (again.delivery_sequence, again.attempt) == (700 + index, 3)
            assert shown(Message(again, 700 + index, again.body(0))) == shown(message)


def test_properties_are_the_callers_own() -> None:
    (run,) = runs(stored_batch({"a.b": [b""]}, header=make_header(None, None, {"a": "1"})))
    message = Message(run, 0, b"")
    message.properties["a"] = "2"
    assert message.properties == {"a": "1"}


def test_messages_come_run_after_run() -> None:
    found = two_subjects()
    wanted = [("a.b", 40), ("a.b", 41), ("a.b", 42), ("a.c", 0), ("a.b", 0), ("a.b", 1)]
    for messages in (messages_of(found), list(each_message(found)), list(MessageBatch(found))):
        assert [(message.subject, message.sequence) for message in messages] == wanted
        assert [message.body for message in messages] == [*BODIES, b"x", b"y", b"z"]


def test_making_messages_leaves_the_collector_as_it_was() -> None:
    found = two_subjects()
    assert gc.isenabled()
    messages_of(found)
    assert gc.isenabled()
    gc.disable()
    try:
        messages_of(found)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_batch_is_a_sequence_with_columns() -> None:
    batch = MessageBatch(two_subjects())
    assert len(batch) == 6
    assert [batch[i].id for i in range(6)] == [message.id for message in batch]
    assert batch[-1].body == b"z"
    assert [message.body for message in batch[2:4]] == [BODIES[2], b"x"]
    assert batch.bodies == [*BODIES, b"x", b"y", b"z"]
    assert batch.subjects == ["a.b", "a.b", "a.b", "a.c", "a.b", "a.b"]
    for index in (6, -7):
        with pytest.raises(IndexError, match="of 6"):
            batch[index]
    assert not MessageBatch([])
    assert list(MessageBatch([])) == []
    assert MessageBatch([]).bodies == []


def test_to_arrow_has_every_field() -> None:
    header = make_header("order-1", ("vip", "eu"), {"price": "125", "b": "2"})
    batch = MessageBatch([*two_subjects(), *runs(stored_batch({"k": [b"\xff"]}, header=header))])
    table = batch.to_arrow()
    rows = table.to_pylist()
    for row, message in zip(rows, batch, strict=True):
        row["properties"] = dict(row["properties"])
        row["keys"], row["tags"] = tuple(row["keys"]), tuple(row["tags"])
        assert row == {name: getattr(message, name) for name in table.column_names}
    assert table.schema.field("stored_at").type == pyarrow.timestamp("us", tz="UTC")
    assert table.schema == MessageBatch([]).to_arrow().schema


def test_to_arrow_raises_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(QmqError, match=r"pip install 'qmq\[arrow\]'"):
        MessageBatch([]).to_arrow()


def test_a_batch_is_acknowledged_by_ranges() -> None:
    class Holder:
        def __init__(self) -> None:
            self.acked: list[tuple[int, int]] = []

        def ack(self, start: int, end: int, *, each: bool) -> None:
            self.acked.append((start, end))

    holder, other = Holder(), Holder()
    found = [*runs(stored_batch({f"a.{number}": [b"", b""] for number in range(5)}))]
    for run, owner, sequence in zip(found, (holder, holder, holder, other, None), (10, 12, 15, 17, 19), strict=True):
        run.in_flight, run.delivery_sequence = owner, sequence
    MessageBatch(found).ack()
    assert holder.acked == [(10, 14), (15, 17)]
    assert other.acked == [(17, 19)]
