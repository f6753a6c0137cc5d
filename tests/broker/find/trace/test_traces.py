"""Traces of one message: every state, events over restarts and kept files, bursts of traces, and what is refused."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.find.trace.places import find_place
from qmq.broker.find.trace.records import FileFacts, FoundRecords, RecordScan
from qmq.broker.find.trace.traces import GROUPS_AT_ONCE, MOST_OF_ONE, MOST_PLACES, MOST_WAITING
from qmq.broker.journal.record_types import RecordKind
from qmq.broker.ports.commands import Disconnected, Subscribe, TraceMessage, Unsubscribe
from qmq.broker.ports.effects import Effect, Refused, Sent, Subscribed, Traced
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import InvalidOption, Overloaded, QmqError, UnknownMessage
from qmq.format.ids import MessageId
from qmq.format.layout import DELAY_PARTITION, MESSAGE_ID
from qmq.net.protocol.types import AT_MOST_ONCE, BROADCAST, Disposition
from qmq.storage.disk.disk import Disk
from qmq.storage.pull_log.kept import KEPT_SUFFIX
from qmq.storage.pull_log.records import PullRecord, record_at
from qmq.storage.verify.verify import verify
from tests.broker.delay.test_delay import cancel, delay
from tests.broker.delivery.test_filters import sent
from tests.broker.harness import Driven, bodies_of
from tests.broker.retention.test_retention import driven_in, send, settle
from tests.broker.test_admin import ask
from tests.broker.test_consuming import Consumer, filled, killed
from tests.fake_disk import FakeDisk

KEPT = {"pull_log_keep_us": 1 << 50, "pull_log_keep_bytes": 1 << 40}
TIMEOUT_MS = 1_000
Row = dict[str, Any]


def id_of(driven: Driven, sent: Sent, at: int = 0) -> MessageId:
    return MessageId(driven.store.store_id, sent.partition, sent.position + at)


def begun(driven: Driven, name: MessageId, *places: tuple[int, int], connection: int = 1) -> list[Effect]:
    return driven.do(TraceMessage(connection, driven.request(), MESSAGE_ID.pack(*name), places))


def answer_to(driven: Driven, name: MessageId, *places: tuple[int, int]) -> Effect:
    said = begun(driven, name, *places)
    for _ in range(1_000):
        if said:
            (answer,) = said
            return answer
        said = driven.advance(1)
    raise AssertionError("there is no answer")


def traced(driven: Driven, name: MessageId, *places: tuple[int, int]) -> dict[str, Row]:
    answer = answer_to(driven, name, *places)
    assert isinstance(answer, Traced), answer
    return {row["group"]: row for row in answer.rows}


def at_most_once(driven: Driven, group: str) -> int:
    """Join a group as its consumer, and return the subscription."""
    command = Subscribe(1, driven.request(), group, ("shop.",), "c", None, b"n", b"c", mode=AT_MOST_ONCE)
    (answer,) = driven.do(command)
    assert isinstance(answer, Subscribed), answer
    return answer.subscription


def states(rows: dict[str, Row]) -> dict[str, str]:
    return {group: row["state"] for group, row in rows.items()}


def kinds(row: Row) -> list[str]:
    return [event[0] for event in row["events"]]


def refusal(driven: Driven, name: MessageId, kind: type[QmqError], *places: tuple[int, int]) -> str:
    answer = answer_to(driven, name, *places)
    assert isinstance(answer, Refused), answer
    assert type(answer.error) is kind
    return str(answer.error)


@pytest.mark.parametrize("stop", [Driven.restart, killed, lambda driven: None])
def test_three_groups_one_with_retries_one_dead_one_redriven(tmp_path: Path, stop: Any) -> None:
    driven = Driven(tmp_path, **KEPT)
    driven.send("shop.a", b"before")
    name = id_of(driven, driven.send("shop.a", b"it"))
    retried, dead, redriven = (Consumer(driven, f"{group}-1", group=group) for group in ("retried", "dead", "redriven"))
    for consumer in (retried, dead, redriven):
        assert consumer.pull() == [b"before", b"it"]
        consumer.ack(0)
    retried.back(1, 2, delay_us=0)
    assert retried.pull() == [b"it"]
    retried.back(2, 3, delay_us=7_000_000)
    dead.back(1, 2, Disposition.REJECT)
    redriven.back(1, 2, Disposition.REJECT)
    assert ask(driven, "redrive", group="redriven") == {"messages": 1}
    assert redriven.pull() == [b"it"]
    stop(driven)
    rows = traced(driven, name)
    assert states(rows) == {"retried": "retrying", "dead": "dead", "redriven": "in_flight"}
    row = rows["retried"]
    assert kinds(row) == ["handed_out", "nacked", "handed_out", "nacked"]
    assert [event[3] for event in row["events"]] == [1, 1, 2, 2], "the attempts"
    assert {event[2] for event in row["events"]} == {"retried-1"}
    assert row["due_us"] - row["since_us"] == 7_000_000
    assert (row["attempts"], row["reason"], row["consumer"]) == (2, "broke", "retried-1")
    row = rows["dead"]
    assert kinds(row) == ["handed_out", "rejected"]
    assert (row["attempts"], row["reason"], row["events"][1][4]) == (1, "broke", "broke")
    row = rows["redriven"]
    assert kinds(row) == ["handed_out", "rejected", "redriven", "handed_out"]
    assert (row["attempts"], row["consumer"]) == (1, "redriven-1")
    times = [event[1] for event in row["events"]]
    assert times == sorted(times)
    redriven.join()
    assert redriven.ack(2) == 0
    row = traced(driven, name)["redriven"]
    assert (row["state"], row["consumer"], kinds(row)[-1]) == ("acked", "redriven-1", "acked")
    assert row["since_us"] == row["events"][-1][1]
    driven.close()


def test_a_deleted_dead_letter_is_not_called_acked(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    name = id_of(driven, driven.send("a", b"1"))
    consumer = Consumer(driven, "one")
    consumer.pull()
    consumer.back(0, 1, Disposition.REJECT)
    ask(driven, "delete_dead", group="g")
    row = traced(driven, name)["g"]
    assert (row["state"], row["reason"]) == ("deleted", "broke")
    driven.close()


def test_expired_sessions_and_leaves_are_events(tmp_path: Path) -> None:
    driven = Driven(tmp_path, BrokerLimits(session_timeout_ms=TIMEOUT_MS), **KEPT)
    name = id_of(driven, driven.send("a", b"1"))
    one = Consumer(driven, "one", transient=True, nonce=b"1")
    assert one.pull() == [b"1"]
    driven.advance(2 * TIMEOUT_MS)
    row = traced(driven, name)["g"]
    assert (row["state"], kinds(row)) == ("retrying", ["handed_out", "session_expired"])
    assert row["events"][0][2] == "one", "a consumer that is forgotten is known by its join"
    driven.close()


def test_a_takeover_that_expires_a_session_is_an_event_and_a_late_ack_is_none(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    name, other = (id_of(driven, driven.send("a", body)) for body in (b"1", b"2"))
    first = Consumer(driven, "one", nonce=b"1")
    assert first.pull() == [b"1", b"2"]
    second = Consumer(driven, "one", nonce=b"2", connection=2)
    row = traced(driven, name)["g"]
    assert (row["state"], kinds(row)) == ("in_flight", ["handed_out"]), "the first takeover takes over what it has"
    third = Consumer(driven, "one", nonce=b"3", connection=3)
    assert (third.consumer_state.epoch, second.consumer_state.epoch) == (3, 2)
    row = traced(driven, name)["g"]
    assert (row["state"], kinds(row)) == ("retrying", ["handed_out", "session_expired"])
    assert third.pull() == [b"1"], "alone, since it may be deadly"
    assert third.ack(2) == 0
    known = {"since_us": third.consumer_state.since_us, "generation": driven.store.groups.generation}
    assert third.pull() == [b"2"]
    assert ask(driven, "handled", group="g", consumer="one", handled=[0, 4], **known) == {"taken": True}
    for each in (name, other):
        row = traced(driven, each)["g"]
        assert (row["state"], kinds(row)) == ("acked", ["handed_out", "session_expired", "handed_out", "acked"])
    driven.close()


def test_seeks_are_events_that_end_what_is_in_flight(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    names = [id_of(driven, driven.send("a", body)) for body in (b"1", b"2")]
    consumer = Consumer(driven, "one")
    consumer.pull()
    consumer.ack(0)
    consumer.back(1, 2, delay_us=9_000_000)
    for to, clears in (("new", False), ("new", False), ("first", True)):
        ask(driven, "seek_group", group="g", to=to, clear_retries=clears)
        driven.advance(1)
    rows = [traced(driven, name)["g"] for name in names]
    assert [row["state"] for row in rows] == ["waiting", "waiting"]
    assert [kinds(row) for row in rows] == [
        ["handed_out", "acked", "sought", "sought"], ["handed_out", "nacked", "sought", "sought"],
    ]  # fmt: skip
    assert rows[0]["events"][-1][4] == "to the first message, retries were dropped"
    assert rows[0]["events"][-2][4].startswith("to 20")
    consumer.join()
    assert consumer.pull() == [b"1", b"2"]
    ask(driven, "seek_group", group="g", to=["sequence", 1])
    row = traced(driven, names[0])["g"]
    assert (kinds(row)[-2:], row["events"][-1][4]) == (["handed_out", "sought"], "to sequence 1")
    assert row["state"] == "before_start"
    consumer.join()
    assert consumer.pull() == [b"2"]
    driven.do(Unsubscribe(1, driven.request(), consumer.subscription))
    assert kinds(traced(driven, names[0])["g"]) == kinds(row), "the seek had taken it from the consumer that leaves now"
    assert kinds(traced(driven, names[1])["g"])[-1] == "left"
    driven.close()


@pytest.mark.parametrize("stop", [Driven.restart, killed, lambda driven: None])
def test_the_deletion_of_a_dead_letter_is_an_event(tmp_path: Path, stop: Any) -> None:
    driven = Driven(tmp_path, **KEPT)
    names = [id_of(driven, driven.send("a", b"%d" % number)) for number in range(5)]
    consumer = Consumer(driven, "one")
    consumer.pull()
    consumer.back(0, 2, Disposition.REJECT)
    consumer.back(3, 4, delay_us=9_000_000)
    consumer.back(2, 3, Disposition.REJECT)
    consumer.back(4, 5, Disposition.REJECT)
    assert ask(driven, "delete_dead", group="g", numbers=[2, 3]) == {"messages": 2}
    assert ask(driven, "redrive", group="g", numbers=[1]) == {"messages": 1}
    stop(driven)
    rows = [traced(driven, name)["g"] for name in names]
    assert [row["state"] for row in rows] == ["retrying", "deleted", "deleted", "retrying", "dead"]
    assert [kinds(row)[1:] for row in rows] == [
        ["rejected", "redriven"], ["rejected", "deleted"], ["rejected", "deleted"], ["nacked"], ["rejected"],
    ]  # fmt: skip
    assert rows[1]["since_us"] == rows[1]["events"][-1][1], "it is deleted since its deletion"
    assert (rows[1]["attempts"], rows[1]["reason"]) == (1, "broke")
    assert ask(driven, "delete_dead", group="g") == {"messages": 1}
    assert kinds(traced(driven, names[4])["g"]) == ["handed_out", "rejected", "deleted"]
    assert kinds(traced(driven, names[3])["g"]) == ["handed_out", "nacked"], "a retry is no dead letter"
    driven.close()


def test_the_states_of_groups_of_every_kind(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    old = id_of(driven, driven.send("shop.a", b"old"))
    Consumer(driven, "c", group="late", start="new")  # type: ignore[arg-type]
    Consumer(driven, "c", group="second", start=("sequence", 1))
    name = id_of(driven, driven.send("shop.a", b"it"))
    Consumer(driven, "c", "other.", group="other")
    Consumer(driven, "c", group="tagged", tags=("vip",)).pull()
    Consumer(driven, "c", group="tagged-idle", tags=("vip",))
    Consumer(driven, "c", group="impatient", expire_after_us=1_000)
    Consumer(driven, "c", "shop.", group="waiting")
    once = at_most_once(driven, "once")
    assert driven.pull(once)
    at_most_once(driven, "once-idle")
    Consumer(driven, "c", group="each", mode=BROADCAST, start=("sequence", 0)).pull()
    driven.advance(5)
    assert states(traced(driven, name)) == {
        "late": "waiting",
        "second": "waiting",
        "other": "not_subscribed",
        "tagged": "filtered",
        "tagged-idle": "filtered",
        "impatient": "expired",
        "waiting": "waiting",
        "once": "handed_out",
        "once-idle": "waiting",
        "each@c": "in_flight",
    }
    rows = traced(driven, old)
    assert (rows["late"]["state"], rows["second"]["state"]) == ("before_start", "before_start")
    assert "sequence 1" in rows["second"]["reason"]
    assert "vip" in rows["tagged"]["reason"]
    driven.close()


@pytest.mark.parametrize("others", [True, False])
def test_a_pull_that_filtered_some_messages_and_skipped_others_tells_of_the_filtered(
    tmp_path: Path, others: bool
) -> None:
    """The record counts both, and does not say which is which: that goes by tags, and by the times of expiry."""
    driven = Driven(tmp_path, **KEPT)
    once = at_most_once(driven, "once")
    ask(driven, "set_group", group="once", settings={"tags": ["vip"]})
    past = driven.now.wall_us // 1_000 * 1_000 - 1_000_000
    messages = [(b"filtered", ("eu",), 0), (b"filtered, expired", ("eu",), past), (b"skipped", ("vip",), past)]
    if others:
        messages.append((b"handed out", ("vip",), 0))
    sent(driven, {"shop.a": messages})
    assert bodies_of(driven.pull(once)) == [b"handed out"] * others
    (position,) = driven.store.partitions[0].batches_from(0, 10)["position"].tolist()
    told = [
        kinds(traced(driven, MessageId(driven.store.store_id, 0, position + at))["once"]) for at in range(len(messages))
    ]
    assert told == [["filtered"], ["filtered"], [], *[[]] * others]
    driven.close()


def test_a_message_that_is_late_is_traced_as_delayed(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = Driven(tmp_path, disk=disk, **KEPT)
    Consumer(driven, "c", "a")
    early, late = (MessageId.parse(name) for name in delay(driven, "a", 1_000_000, 2_000_000))
    assert cancel(driven, str(early))
    disk.fail_always("pwritev", errno.ENOSPC)
    driven.advance(3_000)
    assert driven.broker.delayed() == {"a": 1}
    assert traced(driven, late)["g"]["state"] == "delayed", "the disk is full"
    assert traced(driven, early)["g"]["state"] == "cancelled"
    disk.heal()
    driven.advance(1_000)
    assert driven.broker.delayed() == {}
    (position,) = driven.store.partitions[0].batches_from(0, 10)["position"].tolist()
    assert traced(driven, late, (0, position))["g"]["state"] == "waiting"
    assert traced(driven, early)["g"]["state"] == "cancelled"
    driven.close()


def test_a_delayed_message_is_traced_until_it_is_delivered_or_cancelled(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    Consumer(driven, "c", "a")
    Consumer(driven, "c", "b", group="other")
    first, second = (MessageId.parse(name) for name in delay(driven, "a", 2_000_000, 5_000_000))
    rows = traced(driven, first)
    assert states(rows) == {"g": "delayed", "other": "not_subscribed"}
    assert rows["g"]["due_us"] >= driven.now.wall_us
    assert cancel(driven, str(second))
    assert traced(driven, second)["g"]["state"] == "cancelled"
    driven.advance(6_000)
    assert traced(driven, second)["g"]["state"] == "cancelled", "its time has come"
    (position,) = driven.store.partitions[0].batches_from(0, 10)["position"].tolist()
    assert traced(driven, first, (0, position))["g"]["state"] == "waiting", "its copy is where it fell due"
    assert "no delayed message" in refusal(driven, first._replace(position=1 << 62), UnknownMessage)
    driven.close()


def test_a_dropped_message_and_its_copies_for_groups(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BrokerLimits(retention_max_ms=60_000, session_timeout_ms=1 << 40), **KEPT)
    consumer = Consumer(driven, "one")
    Consumer(driven, "two", group="behind")
    send(driven, 10)
    first = driven.store.partitions[0].batches_from(0, 1)["position"][0].item()
    name = MessageId(driven.store.store_id, 0, first)
    assert len(consumer.pull()) == 10
    driven.advance(120_000)
    send(driven, 20)
    assert settle(driven)
    assert states(traced(driven, name)) == {"g": "dropped", "behind": "dropped"}
    number = driven.store.subjects.number("~g~a.0")
    assert number is not None
    ((partition, rows),) = driven.store.subject_rows(number, 0, 1)
    rows_found = traced(driven, name, (partition, int(rows["position"][0])))
    assert states(rows_found) == {"g": "in_flight", "behind": "dropped"}
    assert rows_found["g"]["consumer"] == "one"
    driven.close()


def with_kept_files(path: Path, disk: Disk | None = None) -> tuple[Driven, MessageId]:
    """Return a broker whose pull log has the events of a message in its oldest kept file."""
    driven = Driven(path, disk=disk, segment_bytes=64 << 10, max_frame_bytes=4 << 10, **KEPT)
    name = id_of(driven, driven.send("a", b"it"))
    consumer = Consumer(driven, "one")
    assert consumer.pull() == [b"it"]
    consumer.ack(0)
    for number in range(700):
        driven.advance(1)
        driven.send("a", b"%d" % number)
        consumer.pull()
        consumer.ack(number + 1)
        if number % 200 == 0:
            driven.checkpoint()
    for _ in range(3):
        driven.checkpoint()
    assert kept(driven)
    return driven, name


def kept(driven: Driven) -> list[Path]:
    return sorted((driven.directory / "pulls").glob(f"*{KEPT_SUFFIX}"))


def test_events_come_from_kept_files_too_and_a_start_reads_none_of_them(tmp_path: Path) -> None:
    disk = FakeDisk()
    driven, name = with_kept_files(tmp_path, disk)
    disk.fail_always("open", errno.EIO, KEPT_SUFFIX)
    driven.store.close(clean=True)
    driven.open()
    disk.heal()
    row = traced(driven, name)["g"]
    assert (row["state"], kinds(row)) == ("acked", ["handed_out", "acked"])
    answer = answer_to(driven, name)
    assert isinstance(answer, Traced)
    assert not answer.is_partial
    disk.fail_always("open", errno.EIO, KEPT_SUFFIX)
    answer = answer_to(driven, name)
    assert isinstance(answer, Traced)
    assert (answer.is_partial, answer.rows[0]["state"]) == (True, "acked"), "a disk that fails costs events alone"
    disk.heal()
    for path in kept(driven):
        path.unlink()
    answer = answer_to(driven, name)
    assert isinstance(answer, Traced)
    assert (answer.is_partial, answer.rows[0]["state"], answer.rows[0]["events"]) == (True, "acked", [])
    driven.close()


def test_rot_in_a_kept_file_costs_its_events_and_is_noted_by_verify(tmp_path: Path) -> None:
    driven, name = with_kept_files(tmp_path)
    driven.store.close(clean=True)
    path = kept(driven)[0]
    data = bytearray(path.read_bytes())
    (pull,) = [record for record in records_of(driven, path) if record.kind == RecordKind.PULL][:1]
    data[pull.position - int(path.stem, 16) + 20] ^= 1
    path.write_bytes(data)
    report = verify(tmp_path, Disk(), None)
    assert not report.faults
    assert any("no record" in note.what and note.file == path for note in report.findings), report.findings
    driven.open()
    row = traced(driven, name)["g"]
    assert (row["state"], row["events"]) == ("acked", [])
    driven.store.close(clean=True)


def records_of(driven: Driven, path: Path) -> list[PullRecord]:
    """Return the records of one file."""
    found, secret = list[PullRecord](), driven.store.secret
    data, base = memoryview(path.read_bytes()), int(path.stem, 16)
    offset = 64
    while (record := record_at(data, offset, base, secret)) is not None:
        found.append(record)
        offset += record.size
    return found


def test_records_between_two_attempts_are_not_decoded(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    name = id_of(driven, driven.send("a", b"it"))
    consumer = Consumer(driven, "one")
    assert consumer.pull() == [b"it"]
    consumer.back(0, 1, delay_us=500_000)
    for number in range(100):
        driven.send("a", b"%d" % number)
        consumer.pull()
        consumer.ack(number + 1)
    driven.advance(500)
    assert consumer.pull() == [b"it"]
    consumer.ack(101)
    place = find_place(driven.store, name.partition, name.position)
    assert place is not None
    scan = RecordScan(driven.store.groups.scan_pulls(0), [place], {})
    while scan.step():
        pass
    assert scan.found.decoded.count <= 6, "a join, two pulls, a nack and an ack, of more than 200 records"
    row = traced(driven, name)["g"]
    assert kinds(row) == ["handed_out", "nacked", "handed_out", "acked"]
    driven.close()


def test_files_that_are_known_to_be_of_other_messages_are_not_read_again(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **KEPT)
    first = id_of(driven, driven.send("a", b"it"))
    consumer = Consumer(driven, "one")
    assert consumer.pull() == [b"it"]
    consumer.ack(0)
    middle = first
    for number in range(3):
        driven.restart()  # the pull log goes on in another file
        consumer = Consumer(driven, "one")
        middle = id_of(driven, driven.send("a", b"%d" % number))
        assert consumer.pull() == [b"%d" % number]
        consumer.ack(*consumer.got)
    facts = dict[int, FileFacts]()
    found = dict[tuple[MessageId, bool], FoundRecords]()
    skipped = 0
    for is_known in (False, True):
        for name in (first, middle):
            place = find_place(driven.store, name.partition, name.position)
            assert place is not None
            scan = RecordScan(driven.store.groups.scan_pulls(0), [place], facts if is_known else {})
            while scan.step():
                pass
            found[name, is_known] = scan.found
            scan = RecordScan(driven.store.groups.scan_pulls(0), [place], facts)
            while scan.step():
                pass
            skipped += scan.skipped
            for one in ("given", "settled", "departed", "brought", "letters", "sought"):
                assert getattr(scan.found, one) == getattr(found[name, False], one)
            assert {**scan.found.names, **found[name, False].names} == found[name, False].names
    assert skipped > 0
    driven.close()


def test_sequences_and_positions_of_several_subjects_and_batches(tmp_path: Path) -> None:
    driven = Driven(tmp_path, partitions=2, **KEPT)
    names = dict[bytes, MessageId]()
    for number in range(12):
        contents = {f"shop.{run}": [b"%d %d %d" % (number, run, at) for at in range(3)] for run in range(3)}
        (sent,) = driven.do(driven.send_command(contents))
        assert isinstance(sent, Sent)
        for at in range(9):
            names[b"%d %d %d" % (number, at // 3, at % 3)] = id_of(driven, sent, at)
    driven.checkpoint()
    consumers = [
        Consumer(driven, "all", group="all"),
        Consumer(driven, "prefix", "shop.", group="prefix"),
        Consumer(driven, "exact", "shop.1", group="exact"),
    ]
    for consumer in consumers:
        while consumer.pull(10):
            pass
        odd = [number for number in consumer.got if number % 3]
        consumer.ack(*odd)
    for body, name in names.items():
        rows = traced(driven, name)
        for consumer in consumers:
            numbers = [number for number, (got, _) in consumer.got.items() if got == body]
            row = rows[consumer.group]
            if not numbers:
                assert row["state"] == "not_subscribed"
            else:
                assert (row["state"], kinds(row)[-1]) == (
                    ("acked", "acked") if numbers[0] % 3 else ("in_flight", "handed_out")
                )
    driven.close()


def test_a_burst_of_traces_is_bounded_and_sends_wait_for_none_of_them(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    name = MessageId(driven.store.store_id, 0, driven.store.partitions[0].batches_from(0, 1)["position"][0].item())
    for number in range(5 * GROUPS_AT_ONCE):
        Consumer(driven, "c", group=f"g{number}")
    refused = 0
    for connection in range(2, 2 + 2 * MOST_WAITING // MOST_OF_ONE):
        for _ in range(MOST_OF_ONE + 1):
            said = begun(driven, name, connection=connection)
            assert not said or type(said[0]) is Refused
            refused += sum(isinstance(one, Refused) and type(one.error) is Overloaded for one in said)
    assert refused == 2 * (MOST_WAITING // MOST_OF_ONE) * (MOST_OF_ONE + 1) - MOST_WAITING
    answers, rounds = list[Effect](), 0
    while len(answers) < MOST_WAITING:
        said = driven.do(driven.send_command({"a.x": [b"more"]}))
        assert [type(one) for one in said] == [Sent], "a turn has no step of a trace"
        for milliseconds in (0, 0, 0, 0, 1):
            answers += driven.advance(milliseconds)
        rounds += 1
    assert rounds >= 5 * MOST_WAITING, "a millisecond passes between two steps, and a step looks at few groups"
    assert all(isinstance(one, Traced) and len(one.rows) == 5 * GROUPS_AT_ONCE for one in answers)
    driven.close()


def test_traces_of_a_closed_connection_end(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    name = MessageId(driven.store.store_id, 0, driven.store.partitions[0].batches_from(0, 1)["position"][0].item())
    Consumer(driven, "c")
    for _ in range(3):
        begun(driven, name, connection=7)
    driven.advance(1)
    driven.do(Disconnected(7))
    assert [driven.advance(1) for _ in range(20)] == [[]] * 20
    assert traced(driven, name)["g"]["state"] == "waiting"
    driven.close()


def test_wrong_ids_are_refused_each_with_its_reason(tmp_path: Path) -> None:
    driven = filled(tmp_path, 2)
    first = MessageId(driven.store.store_id, 0, driven.store.partitions[0].batches_from(0, 1)["position"][0].item())
    Consumer(driven, "c")
    assert "of store" in refusal(driven, first._replace(store_id=b"others"), UnknownMessage)
    assert "of partition 9" in refusal(driven, first._replace(partition=9), UnknownMessage)
    assert "no batch" in refusal(driven, first._replace(position=first.position + 1), UnknownMessage)
    assert "no batch" in refusal(driven, first._replace(position=1 << 62), UnknownMessage)
    assert "no delayed message" in refusal(driven, first._replace(partition=DELAY_PARTITION), UnknownMessage)
    assert "copies" in refusal(driven, first, InvalidOption, *[(0, 1)] * (MOST_PLACES + 1))
    assert states(traced(driven, first._replace(position=1))) == {"g": "dropped"}, "before the log"
    assert states(traced(driven, first._replace(store_id=b"others"), (0, first.position))) == {"g": "waiting"}
    assert states(traced(driven, first, (9, 1), (0, 1))) == {"g": "waiting"}, "copies that are gone do no harm"
    driven.close()
