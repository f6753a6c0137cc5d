"""Restored messages are stored once, for all groups or for one alone, whatever ends in the middle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.journal.durable_replies import SYNC_NUMBER
from qmq.broker.journal.record_types import RecordKind
from qmq.broker.ports.commands import Administer, Disconnected, ListSubjects, Restore, Subscribe
from qmq.broker.ports.effects import Administered, Effect, PulledMessages, Refused, Restored, SubjectList
from qmq.errors import BadBatch, Fenced, InvalidOption, QmqError, UnknownGroup
from qmq.format.copies.due import DUE_PRODUCER
from qmq.format.copies.restored import numbered, restored_batches
from qmq.format.private import private_subject
from qmq.intervals import Intervals
from tests.broker.harness import Driven, bodies_of
from tests.broker.test_consuming import Consumer, filled, killed
from tests.broker.test_rotten_records import records, rotten
from tests.format.contents import CREATED_US
from tests.format.test_private import run_of
from tests.storage.message_log.test_drop import drop

RUN = b"r" * 16
ARCHIVED = run_of(b"")
STOPS = pytest.mark.parametrize("stop", [Driven.restart, killed])


def frame_of(
    *bodies: bytes, number: int = 0, run: bytes = RUN, group: str | None = None, batches: int = 1
) -> memoryview:
    """Return messages of subject a.b as so many consecutive batches of the run."""
    made = bytearray()
    archived = run_of(*bodies)
    for at in range(0, archived.count, -(-archived.count // batches)):
        part = archived.slice(at, min(at + -(-archived.count // batches), archived.count))
        subject = "a.b" if group is None else private_subject(group, "a.b")
        (batch,) = restored_batches([(subject, part)], CREATED_US, 1 << 20)
        numbered(batch.buffer, run, number + at)
        made += batch.buffer
    return memoryview(made)


def answer_of(driven: Driven, command: Restore | Administer) -> Effect:
    said = driven.do(command)
    for _ in range(10):
        found = [one for one in said if getattr(one, "request", -1) == command.request]
        if found:
            return found[0]
        said = driven.advance(0)
    raise AssertionError("no answer came")


def begin(
    driven: Driven, since: list[int] | None = None, group: str | None = None, connection: int = 9, run: bytes = RUN
) -> dict[str, Any]:
    fields = {"run": run, "group": group, "since": since}
    answer = answer_of(driven, Administer(connection, driven.request(), "restore", fields))
    if isinstance(answer, Refused):
        raise answer.error
    assert isinstance(answer, Administered)
    return answer.fields


def store(driven: Driven, frame: memoryview, connection: int = 9) -> tuple[int, ...]:
    answer = answer_of(driven, Restore(connection, driven.request(), frame))
    if isinstance(answer, Refused):
        raise answer.error
    assert isinstance(answer, Restored)
    return answer.ends


def found_in(fields: dict[str, Any]) -> list[int]:
    """Return which messages of run_of are stored, by number."""
    numbers = Intervals()
    for store_id, partition, places in fields["found"]:
        assert (store_id, partition) == (ARCHIVED.store_id, ARCHIVED.partition)
        for start, end in zip(places[::2], places[1::2], strict=True):
            numbers.add(start - ARCHIVED.position, end - ARCHIVED.position)
    return [number for start, end in numbers for number in range(start, end)]


def test_they_are_stored_and_found_by_their_ids(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    begun = begin(driven)
    assert (begun["found"], begun["next"]) == ([], 0)
    ends = store(driven, frame_of(b"x", b"y", b"z", batches=2))
    assert found_in(begin(driven, begun["ends"])) == [0, 1, 2]
    assert begin(driven, begun["ends"])["next"] == 3
    assert found_in(begin(driven, list(ends))) == []
    assert found_in(begin(driven, begun["ends"], run=b"s" * 16)) == []
    runs = driven.pull(driven.subscribe("a.b", group=None, start="first"))
    assert bodies_of(runs) == [b"x", b"y", b"z"]
    assert {run.run_flags for run in runs} == {1}
    assert [run.id(0).position for run in runs] == [ARCHIVED.position, ARCHIVED.position + 2]
    driven.close()


@STOPS
def test_restored_messages_are_found_after_a_restart(tmp_path: Path, stop: Callable[[Driven], None]) -> None:
    driven = filled(tmp_path, 3)
    begun = begin(driven)
    store(driven, frame_of(b"x", b"y"))
    stop(driven)
    with pytest.raises(Fenced):
        store(driven, frame_of(b"z", number=2))
    assert found_in(begin(driven, begun["ends"])) == [0, 1]
    driven.close()


def test_the_later_beginning_of_a_run_takes_over(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    begun = begin(driven, connection=8)
    begin(driven, begun["ends"], connection=9)
    with pytest.raises(Fenced):
        store(driven, frame_of(b"x"), connection=8)
    store(driven, frame_of(b"x"), connection=9)
    driven.do(Disconnected(9))
    with pytest.raises(Fenced):
        store(driven, frame_of(b"x", number=1), connection=9)
    assert found_in(begin(driven, begun["ends"])) == [0]


def test_batches_on_their_way_are_found_by_a_new_beginning(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    begun = begin(driven, connection=8)
    driven.auto_sync = False
    first, again = driven.request(), driven.request()
    fields = {"run": RUN, "since": begun["ends"]}
    said = driven.do(Restore(8, first, frame_of(b"x")), Administer(9, again, "restore", fields))
    assert not said, "nothing is known to be there before it is on disk"
    said = driven.sync() + driven.advance(0)
    (answer,) = [one for one in said if isinstance(one, Administered)]
    assert found_in(answer.fields) == [0]


def test_an_answer_waits_for_the_disk(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    begin(driven)
    driven.auto_sync = False
    assert not driven.do(Restore(9, driven.request(), frame_of(b"x", b"y", batches=2)))
    (answer,) = driven.sync()
    assert isinstance(answer, Restored)


def test_many_are_looked_up_in_several_turns(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    begun = begin(driven)
    for number in range(0, 600, 200):
        store(driven, frame_of(*[b"%d" % at for at in range(200)], number=number, batches=200))
    fields = {"run": RUN, "since": begun["ends"]}
    assert not [one for one in driven.do(Administer(9, driven.request(), "restore", fields)) if one]
    assert driven.broker.tick(driven.now) is not None
    assert found_in(begin(driven, begun["ends"])) == list(range(200))
    assert begin(driven, begun["ends"])["next"] == 600


def test_a_lookup_behind_removed_messages_is_refused(tmp_path: Path) -> None:
    driven = Driven(tmp_path, segment_bytes=64 << 10, max_frame_bytes=32 << 10)
    begun = begin(driven)
    store(driven, frame_of(b"x"))
    while not driven.store.partitions[0].message_log.sealed:
        driven.send("a", b"y" * 10_000)
    assert found_in(begin(driven, begun["ends"])) == [0]
    driven.checkpoint()
    drop(driven.store)
    with pytest.raises(InvalidOption, match="begin it anew"):
        begin(driven, begun["ends"])
    assert begin(driven, [driven.store.partitions[0].message_log.end])["found"] == []


def wrong_frames() -> list[tuple[memoryview, str]]:
    good = frame_of(b"x", b"y", batches=2)
    gap = bytearray(frame_of(b"x"))
    gap += frame_of(b"y", number=7)
    unmarked = bytearray(frame_of(b"x"))
    unmarked[96 + 4] = 0
    return [
        (good[:-1], "sizes"),
        (memoryview(b""), "must have batches"),
        (memoryview(bytes(200)), "sizes"),
        (frame_of(b"x", run=b"s" * 16), "its run as producer"),
        (memoryview(gap), "must follow each other"),
        (memoryview(unmarked), "marked as replayed"),
        (frame_of(*[b""] * 1_025, batches=1_025), "at most 1024"),
    ]


@pytest.mark.parametrize("number", range(7))
def test_wrong_frames_are_refused(tmp_path: Path, number: int) -> None:
    frame, why = wrong_frames()[number]
    driven = filled(tmp_path, 1)
    begun = begin(driven)
    with pytest.raises(BadBatch, match=why):
        store(driven, memoryview(bytearray(frame)))
    assert not found_in(begin(driven, begun["ends"]))


@pytest.mark.parametrize(
    "fields",
    [
        {"run": b"short"},
        {"run": "r" * 16},
        {"run": DUE_PRODUCER},
        {"run": RUN, "since": 7},
        {"run": RUN, "since": [-1]},
    ],
)
def test_wrong_beginnings_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    driven = filled(tmp_path, 1)
    answer = answer_of(driven, Administer(9, driven.request(), "restore", fields))
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, InvalidOption)


def test_clients_cannot_mark_what_they_send(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    command = driven.send_command({"a.b": [b"x"]})
    answer = driven.do(command._replace(batch=frame_of(b"x")))[0]
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, BadBatch)


# --- one group alone -------------------------------------------------------------------------------------------------


def group_frame(*bodies: bytes, number: int = 0, batches: int = 1) -> memoryview:
    return frame_of(*bodies, number=number, group="g", batches=batches)


def test_only_the_group_gets_the_messages_as_for_the_first_time(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    consumer = Consumer(driven, "c")
    assert consumer.pull() == [b"0"]
    begun = begin(driven, group="g")
    store(driven, group_frame(b"x", b"y", b"z", batches=2))
    assert consumer.pull() == [b"x", b"y", b"z"]
    assert {attempt for _, attempt in consumer.got.values()} == {1}
    assert consumer.ack() == 0
    assert found_in(begin(driven, begun["ends"], "g")) == [0, 1, 2]
    assert consumer.pull() == []
    assert bodies_of(driven.pull(driven.subscribe("", group=None, start="first"))) == [b"0"]
    (listed,) = driven.do(ListSubjects(1, driven.request(), "", 0, 100))
    assert isinstance(listed, SubjectList)
    assert [row[0] for row in listed.rows] == ["a.x"]
    driven.close()


@STOPS
def test_the_groups_messages_are_known_after_a_restart(tmp_path: Path, stop: Callable[[Driven], None]) -> None:
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    begun = begin(driven, group="g")
    store(driven, group_frame(b"x", b"y"))
    stop(driven)
    assert found_in(begin(driven, begun["ends"], "g")) == [0, 1]
    consumer.join()
    assert consumer.pull() == [b"x", b"y"]
    driven.close()


def test_stored_messages_without_a_record_come_again_once(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    begun = begin(driven, group="g")
    driven.auto_sync = False
    driven.do(Restore(9, driven.request(), group_frame(b"x", b"y")))
    driven.store.partitions[0].sync()  # the batch is on disk, and the broker ends before it knows
    driven.auto_sync = True
    killed(driven)
    again = begin(driven, begun["ends"], "g")
    assert (found_in(again), again["next"]) == ([], 2)
    store(driven, group_frame(b"x", b"y", number=2))
    consumer.join()
    assert consumer.pull() == [b"x", b"y"]
    assert consumer.pull() == []
    assert found_in(begin(driven, begun["ends"], "g")) == [0, 1]
    driven.close()


def test_messages_that_a_lookup_did_not_find_are_never_named(tmp_path: Path) -> None:
    """Messages that another connection had stored but not named by then are not named later."""
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    begun = begin(driven, group="g", connection=8)
    driven.auto_sync = False
    fields = {"run": RUN, "group": "g", "since": begun["ends"]}
    command = Administer(9, driven.request(), "restore", fields)
    assert not driven.do(Restore(8, driven.request(), group_frame(b"x")), command)
    driven.auto_sync = True
    (answer,) = [one for one in driven.sync() + driven.advance(0) if isinstance(one, Administered)]
    assert (found_in(answer.fields), answer.fields["next"]) == ([], 1)
    store(driven, group_frame(b"x", number=1))
    assert consumer.pull() == [b"x"]
    assert consumer.pull() == []


def test_an_answer_for_a_group_waits_for_the_pull_log(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    Consumer(driven, "c")
    begin(driven, group="g")
    driven.auto_read = False
    assert not [one for one in driven.do(Restore(9, driven.request(), group_frame(b"x"))) if isinstance(one, Restored)]
    assert [wanted.number for wanted in driven.reads] == [SYNC_NUMBER]
    assert [type(one) for one in driven.sync_records() if not isinstance(one, PulledMessages)] == [Restored]


def test_messages_of_a_lost_record_are_named_again(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    driven.checkpoint()
    begun = begin(driven, group="g")
    store(driven, group_frame(b"x", b"y", batches=2))
    rotten(driven, records(driven, RecordKind.RESTORED)[0])
    assert found_in(begin(driven, begun["ends"], "g")) == [0, 1]
    consumer.join()
    assert sorted(consumer.pull()) == [b"x", b"y"]
    assert consumer.pull() == []


def test_one_of_several_records_is_lost(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    consumer = Consumer(driven, "c")
    driven.checkpoint()
    begin(driven, group="g")
    store(driven, group_frame(b"x"))
    store(driven, group_frame(b"y", number=1))
    rotten(driven, records(driven, RecordKind.RESTORED)[0])
    consumer.join()
    assert sorted(consumer.pull()) == [b"x", b"y"]
    assert consumer.pull() == []


def test_the_group_must_exist_and_subjects_must_be_private_to_it(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    with pytest.raises(UnknownGroup):
        begin(driven, group="g")
    Consumer(driven, "c")
    begin(driven, group="g")
    with pytest.raises(QmqError, match="not private to group"):
        store(driven, frame_of(b"x"))
    with pytest.raises(QmqError, match="not private to group"):
        store(driven, frame_of(b"x", group="h"))
    driven.do(Administer(1, driven.request(), "delete_group", {"group": "g"}))
    with pytest.raises(UnknownGroup):
        store(driven, group_frame(b"x"))


def test_for_an_at_most_once_group_it_is_refused(tmp_path: Path) -> None:
    driven = filled(tmp_path, 0)
    driven.do(Subscribe(1, driven.request(), "g", ("",), "c", None, b"n", b"c", mode="at_most_once"))
    with pytest.raises(InvalidOption, match="at_most_once"):
        begin(driven, group="g")
