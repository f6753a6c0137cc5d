"""The table of a message's life: rows that the model of a group does not have, and the diagram in the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from qmq.broker.groups.message_life import MESSAGE_LIFE, MessageEvent, MessageState
from qmq.broker.journal.record_types import RecordKind
from qmq.broker.ports.commands import HandOver
from qmq.broker.ports.limits import BrokerLimits
from qmq.format.copies.for_group import private_batch
from qmq.format.layout import LANE_ORDERED
from qmq.net.protocol.types import Disposition
from tests.broker.find.test_resend import resend
from tests.broker.group_state import WrittenRecords, ledger_of, places_of, waiting_of
from tests.broker.harness import Driven
from tests.broker.retention.test_carry_forward import spoil
from tests.broker.retention.test_retention import driven_in, send, settle
from tests.broker.test_admin import ask
from tests.broker.test_consuming import Consumer, killed
from tests.broker.transfer.test_restore import begin, group_frame, store
from tests.format.test_private import run_of

#: The rows that histories against the model (test_group_model.py) do not have, or hardly ever: each has a test here.
BEYOND_MODEL: Final = {
    (MessageState.READY, MessageEvent.RETENTION),
    (MessageState.RETRYING, MessageEvent.COPY_FAILED),
    (MessageState.QUARANTINED_RETRY, MessageEvent.COPY_FAILED),
    (MessageState.IN_FLIGHT, MessageEvent.LAST_SESSION_EXPIRY),
    (MessageState.STORED, MessageEvent.HANDOVER),
    (MessageState.STORED, MessageEvent.LAST_HANDOVER),
    (MessageState.STORED, MessageEvent.RESTORE),
    (MessageState.STORED, MessageEvent.RESEND),
}
TIMEOUT_MS: Final = 1_000
SECOND_US: Final = 1_000_000


def with_message(path: Path) -> Driven:
    """A broker with one message, of a.b."""
    driven = Driven(path, BrokerLimits(session_timeout_ms=TIMEOUT_MS))
    driven.send("a.b", b"one")
    return driven


def states(driven: Driven) -> list[MessageState]:
    """The states of all messages of the group "g" that are neither stored nor handled."""
    (row,) = ask(driven, "groups", group="g")["rows"]
    ledger = ledger_of(driven)
    found = [MessageState.READY] * row["ready"] + [MessageState.DEAD] * row["dead"]
    found += [MessageState.SKIPPED] * (row["skipped"] + row["filtered"])
    for waiting in waiting_of(driven, ledger):
        found += [waiting.state] * len(waiting.messages)
    for place in places_of(driven, ledger).values():
        is_alone = place.is_quarantined
        state = MessageState.QUARANTINED_IN_FLIGHT if is_alone else MessageState.IN_FLIGHT
        found += [state] * len(place.in_flight)
    return found


def check_row(driven: Driven, records: WrittenRecords, before: MessageState, event: MessageEvent) -> None:
    """All messages have the state that the row says, and one of its records was written."""
    after, kinds = MESSAGE_LIFE[before, event]
    assert set(states(driven)) == {after}
    assert not kinds or {record.kind for record in records.take()}.intersection(kinds)


def test_filter(tmp_path: Path) -> None:
    driven = with_message(tmp_path)
    consumer = Consumer(driven, "one", tags=("vip",))
    assert states(driven) == [MessageState.READY]
    records = WrittenRecords(driven)
    assert consumer.pull() == []
    check_row(driven, records, MessageState.READY, MessageEvent.FILTER)
    driven.close()


def test_retention(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BrokerLimits(retention_max_ms=60_000))
    Consumer(driven, "one")
    send(driven, 10)
    assert set(states(driven)) == {MessageState.READY}
    driven.advance(120_000)
    send(driven, 20)
    records = WrittenRecords(driven)
    assert settle(driven)
    kinds = {record.kind for record in records.take()}
    after, expected = MESSAGE_LIFE[MessageState.READY, MessageEvent.RETENTION]
    assert set(states(driven)) == {MessageState.READY, after}
    assert kinds.intersection(expected)
    driven.close()


@pytest.mark.parametrize("before", [MessageState.RETRYING, MessageState.QUARANTINED_RETRY])
def test_retention_that_cannot_copy_a_retry(tmp_path: Path, before: MessageState) -> None:
    driven = driven_in(tmp_path, BrokerLimits(retention_max_ms=60_000, session_timeout_ms=TIMEOUT_MS))
    consumer = Consumer(driven, "one")
    send(driven, 1)
    consumer.pull()
    if before is MessageState.RETRYING:
        consumer.back(0, 1, Disposition.NACK, 3_600 * SECOND_US)
    driven.advance(TIMEOUT_MS)
    assert states(driven) == [before]
    send(driven, 10)  # so that its segment is sealed
    spoil(driven, entry=0)
    driven.advance(60_000)
    records = WrittenRecords(driven)
    settle(driven)
    after, kinds = MESSAGE_LIFE[before, MessageEvent.COPY_FAILED]
    assert before not in states(driven)
    assert states(driven).count(after) == 1
    assert {record.kind for record in records.take()}.intersection(kinds)
    stats = ask(driven, "stats", after="!")
    assert dict(zip(stats["columns"], stats["groups"][0], strict=True))["died"] == 1
    driven.close()


def test_expire_in_flight(tmp_path: Path) -> None:
    driven = with_message(tmp_path)
    consumer = Consumer(driven, "one", expire_after_us=2 * SECOND_US)
    driven.advance(3_000)
    consumer.join()
    records = WrittenRecords(driven)
    assert consumer.pull() == []
    written = records.take()
    assert [record.kind for record in written] == [RecordKind.PULL, RecordKind.BACK], "in flight, then dead"
    assert states(driven) == [MESSAGE_LIFE[MessageState.IN_FLIGHT, MessageEvent.EXPIRE].state]
    driven.close()


def test_expire_in_quarantine(tmp_path: Path) -> None:
    driven = with_message(tmp_path)
    consumer = Consumer(driven, "one", expire_after_us=2 * SECOND_US)
    assert consumer.pull() == [b"one"]
    driven.advance(TIMEOUT_MS)
    assert states(driven) == [MessageState.QUARANTINED_RETRY]
    driven.advance(3_000)
    consumer.join()
    records = WrittenRecords(driven)
    assert consumer.pull() == []
    written = records.take()
    assert [record.kind for record in written] == [RecordKind.AGAIN, RecordKind.BACK], "in flight alone, then dead"
    assert states(driven) == [MESSAGE_LIFE[MessageState.QUARANTINED_IN_FLIGHT, MessageEvent.EXPIRE].state]
    driven.close()


def test_filter_in_flight(tmp_path: Path) -> None:
    driven = with_message(tmp_path)
    consumer = Consumer(driven, "one", retry_delays_us=(0,))
    assert consumer.pull() == [b"one"]
    consumer.back(0, 1, Disposition.NACK)
    ask(driven, "set_group", group="g", settings={"tags": ["vip"]})
    records = WrittenRecords(driven)
    assert consumer.pull() == []
    assert [record.kind for record in records.take()] == [RecordKind.AGAIN, RecordKind.BACK], "in flight, then filtered"
    assert states(driven) == [MESSAGE_LIFE[MessageState.IN_FLIGHT, MessageEvent.FILTER].state]
    killed(driven)
    assert states(driven) == [MessageState.SKIPPED]
    driven.close()


def test_filter_in_quarantine(tmp_path: Path) -> None:
    driven = with_message(tmp_path)
    consumer = Consumer(driven, "one")
    assert consumer.pull() == [b"one"]
    driven.advance(TIMEOUT_MS)
    assert states(driven) == [MessageState.QUARANTINED_RETRY]
    ask(driven, "set_group", group="g", settings={"tags": ["vip"]})
    consumer.join()
    records = WrittenRecords(driven)
    assert consumer.pull() == []
    assert [record.kind for record in records.take()] == [RecordKind.AGAIN, RecordKind.BACK]
    assert states(driven) == [MESSAGE_LIFE[MessageState.QUARANTINED_IN_FLIGHT, MessageEvent.FILTER].state]
    driven.close()


def test_last_session_expiry_outside_quarantine(tmp_path: Path) -> None:
    """A message that expired alone is nacked, so it is in flight with others; then the group's bound is lowered."""
    driven = with_message(tmp_path)
    consumer = Consumer(driven, "one", retry_delays_us=(0,))
    for _ in range(2):
        assert consumer.pull() == [b"one"]
        driven.advance(TIMEOUT_MS)
        consumer.join()
    assert consumer.pull() == [b"one"]
    (number,) = (number for place in places_of(driven, ledger_of(driven)).values() for number in place.in_flight)
    consumer.back(number, number + 1, Disposition.NACK)
    assert states(driven) == [MessageState.RETRYING]
    assert consumer.pull() == [b"one"]
    assert states(driven) == [MessageState.IN_FLIGHT]
    ask(driven, "set_group", group="g", settings={"max_session_expiries": 1})
    records = WrittenRecords(driven)
    driven.advance(TIMEOUT_MS)
    check_row(driven, records, MessageState.IN_FLIGHT, MessageEvent.LAST_SESSION_EXPIRY)
    driven.close()


@pytest.mark.parametrize(
    ("disposition", "event"),
    [(Disposition.NACK, MessageEvent.HANDOVER), (Disposition.REJECT, MessageEvent.LAST_HANDOVER)],
)
def test_handover(tmp_path: Path, disposition: Disposition, event: MessageEvent) -> None:
    driven = Driven(tmp_path)
    Consumer(driven, "one")
    records = WrittenRecords(driven)
    batch = memoryview(bytearray(private_batch(run_of(b"from elsewhere"), 0, "g", b"q" * 16, 0)))
    driven.do(HandOver(9, driven.request(), batch, "g", 1, disposition, 0, "broke"))
    check_row(driven, records, MessageState.STORED, event)
    driven.close()


def test_restore(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    Consumer(driven, "one")
    begin(driven, group="g")
    records = WrittenRecords(driven)
    store(driven, group_frame(b"x", b"y"))
    check_row(driven, records, MessageState.STORED, MessageEvent.RESTORE)
    driven.close()


def test_resend_of_a_message_before_the_start(tmp_path: Path) -> None:
    driven = with_message(tmp_path)
    Consumer(driven, "one", start=("sequence", 1))
    assert states(driven) == []
    records = WrittenRecords(driven)
    resend(driven, prefix="a.b", group="g")
    check_row(driven, records, MessageState.STORED, MessageEvent.RESEND)
    driven.close()


def test_a_nack_of_an_earlier_message_of_its_order_key(tmp_path: Path) -> None:
    driven = Driven(tmp_path, BrokerLimits(session_timeout_ms=TIMEOUT_MS))
    consumer = Consumer(driven, "one")
    driven.do(driven.send_command({"a.b": [b"%d" % number for number in range(20)]}, lane=LANE_ORDERED))
    assert len(consumer.pull()) == 20
    records = WrittenRecords(driven)
    consumer.back(0, 1, Disposition.NACK)
    check_row(driven, records, MessageState.IN_FLIGHT, MessageEvent.EARLIER_BACK)
    driven.close()


def test_a_nack_of_an_earlier_message_of_its_order_key_in_quarantine(tmp_path: Path) -> None:
    driven = Driven(tmp_path, BrokerLimits(session_timeout_ms=TIMEOUT_MS))
    consumer = Consumer(driven, "one")
    driven.do(driven.send_command({"a.b": [b"%d" % number for number in range(20)]}, lane=LANE_ORDERED))
    assert len(consumer.pull()) == 20
    driven.advance(TIMEOUT_MS)
    consumer.join()
    assert consumer.pull() == [b"0", b"1"]
    records = WrittenRecords(driven)
    consumer.back(20, 21, Disposition.REJECT)
    assert MessageState.QUARANTINED_IN_FLIGHT in states(driven)
    consumer.back(21, 22, Disposition.RELEASE)
    assert consumer.pull() == [b"1"]
    consumer.back(22, 23, Disposition.REJECT)
    assert consumer.pull() == [b"2", b"3"]
    records.take()
    consumer.back(23, 24, Disposition.RELEASE)
    (quarantined,) = {state for state in states(driven) if state is not MessageState.DEAD}
    assert quarantined is MESSAGE_LIFE[MessageState.QUARANTINED_IN_FLIGHT, MessageEvent.EARLIER_BACK].state
    assert {record.kind for record in records.take()} == {RecordKind.BACK}
    driven.close()


def test_the_diagram_of_the_docs_has_the_rows_of_the_table() -> None:
    text = Path(__file__).parents[3].joinpath("docs", "ARCHITECTURE.md").read_text("utf-8")
    diagram = text.split("```mermaid", 1)[1].split("```", 1)[0]
    names = {state.value for state in MessageState}
    found = dict[tuple[str, str], set[str]]()
    for before, after, label in re.findall(r"^ +(\S+) --> (\S+): (.*)$", diagram, re.MULTILINE):
        if before in names and after in names:
            found.setdefault((before, after), set()).update(re.findall(r"\b[A-Z]{3,}\b", label))
    expected = dict[tuple[str, str], set[str]]()
    for (state, _), (following, records) in MESSAGE_LIFE.items():
        expected.setdefault((state.value, following.value), set()).update(kind.name for kind in records)
    assert found == expected
