"""Messages that a consumer hands over because their own broker is gone."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Administer, HandOver, ListSubjects, ReadDone
from qmq.broker.ports.effects import Administered, HandedOver, Refused, SubjectList
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import BadBatch, InvalidName, InvalidOption, QmqError, SyncFailed, UnknownGroup
from qmq.format.copies.due import DUE_PRODUCER
from qmq.format.copies.for_group import private_batch
from qmq.net.protocol.types import Disposition
from tests.broker.harness import Driven, batch_of, bodies_of
from tests.broker.test_consuming import Consumer, filled, killed
from tests.fake_disk import FakeDisk
from tests.format.test_private import run_of

OTHERS = run_of(b"from elsewhere", b"second")


def over(
    driven: Driven,
    number: int = 0,
    attempt: int = 1,
    disposition: Disposition = Disposition.NACK,
    delay_us: int | None = 0,
    sequence: int = 0,
    group: str = "g",
    batch: memoryview | None = None,
) -> HandOver:
    if batch is None:
        batch = memoryview(bytearray(private_batch(OTHERS, number, group, b"q" * 16, sequence)))
    return HandOver(9, driven.request(), batch, group, attempt, disposition, delay_us, "broke")


def done(driven: Driven, command: HandOver) -> None:
    answers = [one for one in driven.do(command) if getattr(one, "request", 0) == command.request]
    assert answers == [HandedOver(9, command.request)], answers


def refused(driven: Driven, command: HandOver) -> QmqError:
    (answer,) = driven.do(command)
    assert isinstance(answer, Refused)
    return answer.error


def letters(driven: Driven) -> list[dict[str, object]]:
    (answer,) = driven.do(Administer(1, driven.request(), "dead_letters", {"group": "g"}))
    assert isinstance(answer, Administered)
    found: list[dict[str, object]] = answer.fields["rows"]
    return found


def test_only_the_group_gets_the_message_with_its_next_attempt(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    consumer = Consumer(driven, "c")
    assert consumer.pull() == [b"0"]
    done(driven, over(driven, attempt=3))
    assert consumer.pull() == [b"from elsewhere"]
    assert consumer.got[1] == (b"from elsewhere", 4)
    assert consumer.ack() == 0
    assert bodies_of(driven.pull(driven.subscribe("", group=None, start="first"))) == [b"0"]
    (listed,) = driven.do(ListSubjects(1, driven.request(), "", 0, 100))
    assert isinstance(listed, SubjectList)
    assert [row[0] for row in listed.rows] == ["a.x"]
    driven.close()


def test_it_waits_for_its_delay_and_the_groups_own(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    done(driven, over(driven, delay_us=2_000_000))
    done(driven, over(driven, number=1, delay_us=None, sequence=1))
    assert consumer.pull() == []
    driven.advance(2_000)
    assert consumer.pull() == [b"from elsewhere"]
    driven.advance(3_000)
    assert consumer.pull() == [b"second"]


@pytest.mark.parametrize("stop", [Driven.restart, killed])
def test_a_handover_survives_a_restart(tmp_path: Path, stop: object) -> None:
    driven = filled(tmp_path, 1)
    consumer = Consumer(driven, "c")
    assert consumer.pull() == [b"0"]
    assert consumer.ack() == 0
    done(driven, over(driven))
    stop(driven)  # type: ignore[operator]
    consumer.join()
    consumer.got.clear()
    assert consumer.pull() == [b"from elsewhere"]
    assert bodies_of(driven.pull(driven.subscribe("", group=None, start="first"))) == [b"0"]
    driven.close()


def test_messages_stay_themselves_when_a_start_renumbers_subjects(tmp_path: Path) -> None:
    driven = Driven(tmp_path, partitions=2)
    consumer = Consumer(driven, "c")
    subjects = ["a.x", "a.y", "b", "c"]
    for sequence, subject in enumerate(subjects):
        run = run_of(b"from " + subject.encode())
        run.subject = subject
        batch = memoryview(bytearray(private_batch(run, 0, "g", b"q" * 16, sequence)))
        done(driven, over(driven, disposition=Disposition.REJECT if subject == "b" else Disposition.NACK, batch=batch))
    killed(driven)
    consumer.join()
    assert sorted(consumer.pull()) == [b"from a.x", b"from a.y", b"from c"]
    assert [letter["subject"] for letter in letters(driven)] == ["b"]
    driven.close()


def test_a_repeated_handover_is_one_message(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    for _ in range(2):
        done(driven, over(driven))
    assert consumer.pull() == [b"from elsewhere"]
    assert consumer.pull() == []


@pytest.mark.parametrize("stop", [Driven.restart, killed])
def test_a_handover_repeated_after_a_start_is_one_message(tmp_path: Path, stop: Callable[[Driven], None]) -> None:
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    done(driven, over(driven))
    assert consumer.pull() == [b"from elsewhere"]
    assert consumer.ack() == 0
    stop(driven)
    done(driven, over(driven))
    consumer.join()
    assert consumer.pull() == []
    driven.close()


def test_a_late_handover_is_taken(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    window = driven.limits.producer_window
    for sequence in range(1, 2 * window):
        done(driven, over(driven, sequence=sequence))
    done(driven, over(driven, number=1))
    came = [body for _ in range(3) for body in consumer.pull()]
    assert came == [b"from elsewhere"] * (2 * window - 1) + [b"second"]
    driven.close()


def test_the_answer_waits_for_the_record_on_disk(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    Consumer(driven, "c")
    driven.auto_read = False
    first, second, third = over(driven), over(driven, sequence=1), over(driven, sequence=2)
    assert driven.do(first) == []
    assert driven.do(second, third) == []
    assert driven.read() == [HandedOver(9, first.request)]
    assert len(driven.reads) == 1, "one sync for all that came meanwhile"
    assert driven.read() == [HandedOver(9, second.request), HandedOver(9, third.request)]
    driven.auto_read = True
    driven.close()


def test_answered_handovers_survive_power_loss(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    disk.track(tmp_path / "one")
    driven = Driven(tmp_path / "one", disk=disk)
    Consumer(driven, "c")
    driven.checkpoint()
    done(driven, over(driven))
    disk.without_power(tmp_path / "one", tmp_path / "two")
    driven.store.close(clean=False)
    after = Driven(tmp_path / "two", disk=FakeDisk("boot-2"))
    assert Consumer(after, "c").pull() == [b"from elsewhere"]
    after.close()


def test_a_failed_sync_is_not_answered_as_stored(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    Consumer(driven, "c")
    driven.auto_read = False
    command = over(driven)
    assert driven.do(command) == []
    (wanted,) = driven.reads
    driven.broker.handle(ReadDone(wanted.number, SyncFailed("the disk is gone")), driven.now)
    (answer,) = driven.do()
    assert isinstance(answer, Refused)
    assert (answer.request, type(answer.error)) == (command.request, SyncFailed)


def test_a_handover_waits_for_room_on_a_full_disk(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path, disk=disk)
    Consumer(driven, "c")
    disk.fail_always("pwritev", errno.ENOSPC, ".pulls")
    command = over(driven)
    assert driven.do(command) == []
    assert driven.advance(100) == []
    disk.heal()
    assert HandedOver(9, command.request) in driven.advance(100)


def test_a_broadcasts_member_gets_it_and_no_other_member(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    one, two = (Consumer(driven, name, mode="broadcast") for name in ("one", "two"))
    done(driven, over(driven, group="g@two"))
    assert one.pull() == []
    assert two.pull() == [b"from elsewhere"]


def test_the_same_handover_twice_in_a_turn_is_one_message(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    first, second = over(driven), over(driven)
    assert driven.do(first, second) == [HandedOver(9, first.request), HandedOver(9, second.request)]
    assert consumer.pull() == [b"from elsewhere"]


def test_out_of_attempts_or_rejected_it_is_a_dead_letter_under_its_own_subject(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    Consumer(driven, "c")
    done(driven, over(driven, attempt=16))
    done(driven, over(driven, number=1, disposition=Disposition.REJECT, sequence=1))
    assert [(row["subject"], row["reason"]) for row in letters(driven)] == [("a.b", "broke")] * 2
    assert [row["id"] for row in letters(driven)] == [str(OTHERS.id(0)), str(OTHERS.id(1))], "those they came under"


def test_no_answer_comes_before_the_sync_and_a_lost_one_leaves_no_trace(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    Consumer(driven, "c")
    assert driven.do(over(driven)) == []
    killed(driven)
    driven.auto_sync = True
    consumer = Consumer(driven, "c")
    assert consumer.pull() == [], "nobody was told of it"
    done(driven, over(driven))
    assert consumer.pull() == [b"from elsewhere"]


def test_wrong_handovers_are_refused(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    Consumer(driven, "c")
    assert isinstance(refused(driven, over(driven, group="none")), UnknownGroup)
    assert isinstance(refused(driven, over(driven, disposition=Disposition.RELEASE)), InvalidOption)
    assert isinstance(refused(driven, over(driven, attempt=0)), InvalidOption)
    assert isinstance(refused(driven, over(driven, delay_us=1 << 60)), InvalidOption)
    due = private_batch(OTHERS, 0, "g", DUE_PRODUCER, 0)
    foreign = private_batch(OTHERS, 0, "other", b"q" * 16, 0)
    assert isinstance(refused(driven, over(driven, batch=memoryview(bytearray(foreign)))), InvalidName)
    assert isinstance(refused(driven, over(driven, batch=memoryview(bytearray(due)))), BadBatch)
    two = batch_of({"~g~a.b": [b"1", b"2"]}, 0)
    assert isinstance(refused(driven, over(driven, batch=two)), BadBatch)


def test_no_client_sends_to_a_groups_own_subjects(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    for _ in range(2):  # before the subject exists, and after
        for contents in ({"~g~a.b": [b"x"]}, {"a.x": [b"y"], "~g~a.b": [b"x"]}):
            (answer,) = driven.do(driven.send_command(contents))
            assert isinstance(answer, Refused)
            assert isinstance(answer.error, InvalidName)
        done(driven, over(driven))
    assert consumer.pull() == [b"from elsewhere"]


def test_the_largest_message_of_another_broker_is_taken(tmp_path: Path) -> None:
    other = Driven(tmp_path / "other", BrokerLimits(max_message_bytes=8 << 20))
    other.send("a.b", bytes(5 << 20))
    (large,) = other.pull(other.subscribe("", start="first"))
    driven = Driven(tmp_path / "own", BrokerLimits(max_message_bytes=1 << 10))
    consumer = Consumer(driven, "c")
    done(driven, over(driven, batch=memoryview(bytearray(private_batch(large, 0, "g", b"q" * 16, 0)))))
    assert consumer.pull() == [bytes(5 << 20)]
    driven.close()
