"""Rotten records of whole groups and of handovers: no message is lost, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.broker.journal.record_types import RecordKind
from qmq.broker.ports.commands import Administer
from qmq.broker.ports.effects import Administered
from qmq.broker.ports.limits import BrokerLimits
from qmq.storage.disk.disk import Disk
from qmq.storage.pull_log.records import PullRecord, pull_file_path, read_pull_log
from qmq.storage.verify.verify import verify
from tests.broker.harness import Driven
from tests.broker.retention.test_retention import HOUR_MS, driven_in, numbers, send
from tests.broker.startup.test_rewind import spoil
from tests.broker.test_consuming import Consumer, filled, killed, many
from tests.broker.transfer.test_handover import done, over
from tests.storage.stores import identity_of


def records(driven: Driven, kind: RecordKind) -> list[PullRecord]:
    """Return the records of that kind in the pull log."""
    identity = identity_of(driven.directory)
    found = read_pull_log(Disk(), driven.directory / "pulls", identity.store_id, identity.secret, 0)
    return [record for record in found.records if record.kind == kind]


def rotten(driven: Driven, record: PullRecord, bit: int = 100) -> None:
    """Kill the broker, let one record rot, and start again; the broker must name file and place."""
    driven.store.close(clean=False)
    file = spoil(driven.directory, record, bit)
    killed(driven)
    holes = driven.store.groups.holes
    if holes:
        base = int(file.stem, 16)
        assert pull_file_path(driven.directory / "pulls", base) == file
        told = f"{file} has no good record at bytes {record.position - base} to "
        assert any(told in note for note in driven.store.recovery.notes), driven.store.recovery.notes


def ended(driven: Driven) -> None:
    """Stop the broker; verify must find no fault in the directory."""
    driven.checkpoint()
    driven.close()
    assert verify(driven.directory, Disk()).is_good


def administered(driven: Driven, action: str, **fields: object) -> None:
    said = driven.do(Administer(1, driven.request(), action, {"group": "g", **fields}))
    assert any(isinstance(one, Administered) for one in said), said


def rest(driven: Driven, consumer: Consumer) -> list[bytes]:
    """Pull and ack all that the group still gets."""
    consumer.join()
    consumer.got.clear()
    found = list[bytes]()
    for _ in range(4):
        while consumer.pull():
            found += [body for body, _ in consumer.got.values()]
            assert consumer.ack() == 0
            consumer.got.clear()
        driven.advance(10_000)
    return found


def acked(driven: Driven, consumer: Consumer) -> None:
    assert consumer.pull(1)
    assert consumer.ack() == 0


def nothing(driven: Driven, consumer: Consumer) -> None:
    """The rotten record is the last one."""


@pytest.mark.parametrize("then", [acked, nothing])
@pytest.mark.parametrize("again", [False, True], ids=["", "sent again"])
def test_a_hand_over_whose_record_is_lost_is_found_again(
    tmp_path: Path, then: Callable[[Driven, Consumer], None], again: bool
) -> None:
    driven = filled(tmp_path, 3)
    consumer = Consumer(driven, "c")
    driven.checkpoint()
    done(driven, over(driven, delay_us=60_000_000))
    then(driven, consumer)
    (record,) = records(driven, RecordKind.OVER)
    rotten(driven, record)
    if again:  # as the sender does without an answer
        done(driven, over(driven))
    found = rest(driven, consumer)
    assert sorted(found) == sorted([*many(3), b"from elsewhere"]), "also what was given behind the bad bytes"
    killed(driven)
    assert rest(driven, consumer) == [], "what was found again is named by a record now"
    ended(driven)


def test_one_that_was_handed_out_already_stays_with_who_holds_it(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    consumer = Consumer(driven, "c")
    acked(driven, consumer)
    done(driven, over(driven))
    done(driven, over(driven, number=1, sequence=1))
    assert consumer.pull() == [b"from elsewhere", b"second"]
    (first, _) = records(driven, RecordKind.OVER)
    rotten(driven, first)
    found = rest(driven, consumer)
    assert set(found) == {b"from elsewhere", b"second"}
    ended(driven)


def test_no_record_of_a_segment_that_goes_takes_messages_from_a_group_that_is_rewound(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BrokerLimits(retention_max_ms=HOUR_MS, session_timeout_ms=100 * HOUR_MS))
    send(driven, 30)
    consumer = Consumer(driven, "c")
    driven.checkpoint()
    assert numbers(consumer.pull(3)) == [0, 1, 2]
    driven.advance(HOUR_MS)
    for _ in range(20):
        driven.advance(1)
    assert records(driven, RecordKind.MOVED)
    assert records(driven, RecordKind.FORWARD)
    rotten(driven, records(driven, RecordKind.PULL)[0])
    consumer.join()
    assert numbers(consumer.pull()) == list(range(30)), "nothing has gone yet, and no copy comes beside its original"
    ended(driven)


@pytest.mark.parametrize("to", ["first", "new"])
def test_a_seek_whose_record_is_lost_did_not_happen(tmp_path: Path, to: str) -> None:
    driven = filled(tmp_path, 8)
    consumer = Consumer(driven, "c")
    assert consumer.pull(4) == many(4)
    assert consumer.ack(0, 1) == 0
    driven.checkpoint()
    administered(driven, "seek_group", to=to)
    driven.send("a.x", b"new")
    consumer.join()
    consumer.got.clear()
    assert consumer.pull(1) == [b"0" if to == "first" else b"new"]
    (record,) = records(driven, RecordKind.SEEK)
    rotten(driven, record)
    found = rest(driven, consumer)
    # All messages without an ack come, none counts as acked; those pulled after the seek stay in flight.
    assert set(found) >= {*many(8)[2:], b"new"}
    assert rest(driven, consumer) == []
    ended(driven)


def test_a_deletion_whose_record_is_lost_did_not_happen(tmp_path: Path) -> None:
    driven = filled(tmp_path, 5)
    consumer = Consumer(driven, "c")
    assert consumer.pull(3) == many(3)
    assert consumer.ack(0) == 0
    administered(driven, "delete_group")
    (record,) = records(driven, RecordKind.DELETE)
    rotten(driven, record)
    assert set(rest(driven, consumer)) >= set(many(5)[1:])
    ended(driven)


def test_a_group_made_again_after_a_deletion_that_is_lost_is_another_one(tmp_path: Path) -> None:
    driven = filled(tmp_path, 5)
    consumer = Consumer(driven, "c")
    assert consumer.pull(3) == many(3)
    consumer.back(0, 1)
    driven.checkpoint()
    administered(driven, "delete_group")
    consumer.join()
    consumer.got.clear()
    assert consumer.pull(2) == many(2)
    assert consumer.ack() == 0
    (record,) = records(driven, RecordKind.DELETE)
    rotten(driven, record)
    assert sorted(rest(driven, consumer)) == many(5)[2:], "all but what was acknowledged since, and each once"
    ended(driven)
