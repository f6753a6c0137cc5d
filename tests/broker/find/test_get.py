"""A message by its id, whichever run, batch and partition has it, also while it is delayed; and the refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Administer, Get
from qmq.broker.ports.effects import Effect, FoundMessages, GotMessage, Refused
from qmq.errors import BadBytes, QmqError, UnknownMessage
from qmq.format.ids import MessageId
from qmq.format.layout import DELAY_PARTITION, MESSAGE_ID
from qmq.format.pieces import read_answer
from qmq.net.protocol.selection import Selection
from tests.broker.find.test_find import filled, page, send
from tests.broker.harness import Driven


def asked(driven: Driven, name: MessageId) -> Effect:
    (answer,) = driven.do(Get(1, driven.request(), MESSAGE_ID.pack(*name)))
    return answer


def body_of(answer: Effect) -> bytes:
    assert isinstance(answer, GotMessage), answer
    ((run,), damaged) = read_answer(memoryview(b"".join(answer.buffers)))
    assert not damaged
    assert run.count == 1
    return run.body(0)


def refusal(driven: Driven, name: MessageId, kind: type[QmqError] = UnknownMessage) -> str:
    answer = asked(driven, name)
    assert isinstance(answer, Refused), answer
    assert type(answer.error) is kind
    return str(answer.error)


@pytest.mark.parametrize("partitions", [1, 3])
def test_each_message_is_found_by_its_id(tmp_path: Path, partitions: int) -> None:
    driven = Driven(tmp_path, partitions=partitions, segment_bytes=16 << 10, max_frame_bytes=8 << 10)
    names: dict[MessageId, bytes] = {}
    for number in range(30):
        sent = driven.do(
            driven.send_command({f"shop.{run}": [b"%d %d %d" % (number, run, n) for n in range(4)] for run in range(5)})
        )[0]
        for at in range(20):
            name = MessageId(driven.store.store_id, sent.partition, sent.position + at)  # type: ignore[union-attr]
            names[name] = b"%d %d %d" % (number, at // 4, at % 4)
    for name, body in names.items():
        assert body_of(asked(driven, name)) == body
    behind = list(names)[-1]
    assert "no message" in refusal(driven, behind._replace(position=behind.position + 1))
    assert "no message" in refusal(driven, behind._replace(position=1 << 62))
    assert "of store" in refusal(driven, behind._replace(store_id=b"others"))
    assert "partition" in refusal(driven, behind._replace(partition=partitions))
    assert "delayed" in refusal(driven, behind._replace(partition=DELAY_PARTITION))
    driven.close()


def test_a_message_before_the_log_is_not_kept_any_more(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("shop.mail", b"1")
    assert "not kept any more" in refusal(driven, MessageId(driven.store.store_id, 0, 1))


def test_a_message_that_is_not_in_memory_is_read_beside_the_loop(tmp_path: Path) -> None:
    driven, disk, _ = filled(tmp_path)
    position = driven.store.partitions[0].batches_from(0, 1)["position"][0].item()
    disk.forget()
    driven.auto_read = False
    assert driven.do(Get(1, driven.request(), MESSAGE_ID.pack(driven.store.store_id, 0, position))) == []
    answers: list[Effect] = []
    while not answers:
        answers = driven.read() or driven.advance(0)
    assert body_of(answers[0]).startswith(b"0x")


def test_bad_bytes_are_an_error(tmp_path: Path) -> None:
    driven, _, _ = filled(tmp_path)
    position, following = driven.store.partitions[0].batches_from(0, 2)["position"].tolist()
    driven.store.partitions[0].message_log.unreadable.add(position, 4_096 if following > 4_096 else 8)
    assert "bad" in refusal(driven, MessageId(driven.store.store_id, 0, position), BadBytes)
    found = page(driven, Selection("shop."))
    assert found.unreadable, "a search says that it lacks something"


def test_a_delayed_message_is_found_until_it_is_cancelled(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    sent = send(driven, [("shop.mail", [("a", b"later")])], delay_us=3_600_000_000)
    name = MessageId(driven.store.store_id, DELAY_PARTITION, sent[0].position)
    assert body_of(asked(driven, name)) == b"later"
    driven.do(Administer(1, driven.request(), "cancel", {"id": str(name)}))
    assert "cancelled" in refusal(driven, name)
    driven.close()


def test_a_delivered_message_is_found_by_its_first_id(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    sent = send(driven, [("shop.mail", [("a", b"later"), ("b", b"2")])], delay_us=60_000_000)
    send(driven, [("shop.mail", [("a", b"others")])])
    driven.advance(61_000)
    name = MessageId(driven.store.store_id, DELAY_PARTITION, sent[0].position)
    found = page(driven, Selection(original=MESSAGE_ID.pack(*name)))
    assert isinstance(found, FoundMessages)
    ((run,), _) = read_answer(memoryview(b"".join(found.buffers)))
    assert (run.id(0), run.bodies()) == (name, [b"later"])
    driven.close()
