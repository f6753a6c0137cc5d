"""Old segments go by age, by size, and once archived; groups that were behind are moved, counted and reported."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qmq.broker.groups.message_ranges import PARTITIONS, parts_of
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.ports.commands import ListSubjects, Now
from qmq.broker.ports.effects import Sent, SubjectList
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.retention import retention
from qmq.broker.retention.retention import Dropped
from qmq.errors import StorageFailed
from qmq.format.layout import NO_SEQUENCE
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.archive_receipt import ArchiveReceipt, write_receipt
from tests.broker.harness import Driven, bodies_of
from tests.broker.test_admin import ask, group_row
from tests.broker.test_consuming import Consumer, killed
from tests.fake_disk import FakeDisk

SMALL = {"segment_bytes": 8 << 10, "max_frame_bytes": 4 << 10}
HOUR_MS = 3_600_000
BY_AGE = BrokerLimits(retention_max_ms=HOUR_MS, session_timeout_ms=10 * HOUR_MS)


def driven_in(path: Path, limits: BrokerLimits = BY_AGE, **options: Any) -> Driven:
    return Driven(path, limits, **SMALL | options)


def send(driven: Driven, count: int, first: int = 0, size: int = 900, subjects: int = 1) -> None:
    """Send messages b"N...", one a batch, to subjects a.0, a.1, ..."""
    for number in range(first, first + count):
        driven.send(f"a.{number % subjects}", (b"%d " % number).ljust(size, b"."))


def numbers(bodies: list[bytes]) -> list[int]:
    return [int(body.split()[0]) for body in bodies]


def settle(driven: Driven, rounds: int = 30) -> list[Dropped]:
    """Take checkpoints and ticks until nothing more goes; return the dropped segments."""
    gone = list[Dropped]()
    for _ in range(rounds):
        driven.checkpoint()
        driven.advance(1_100)
        for _ in range(10):
            driven.advance(1)
        gone += driven.broker.take_dropped()
    return gone


def unreceipted(driven: Driven, name: str = "a.0") -> tuple[int, int, int]:
    """Return first and next sequence of a subject, and how many messages it has."""
    (answer,) = driven.do(ListSubjects(1, driven.request(), name, 0, 10))
    assert isinstance(answer, SubjectList)
    (row,) = answer.rows
    return row[1:4]


def segments(driven: Driven) -> int:
    return len(list(driven.directory.glob("log-*/*.messages")))


@pytest.mark.parametrize("partitions", [1, 2])
def test_old_segments_go_and_young_ones_stay(tmp_path: Path, partitions: int) -> None:
    driven = driven_in(tmp_path, partitions=partitions)
    send(driven, 40, subjects=2)
    assert settle(driven) == []
    driven.advance(HOUR_MS)
    send(driven, 20, first=40, subjects=2)
    before = segments(driven)
    gone = settle(driven)
    assert len(gone) == before - segments(driven) >= 4
    assert sum(one.messages for one in gone) == 60 - unreceipted(driven)[2] - unreceipted(driven, "a.1")[2]
    assert {one.carried for one in gone} == {0}
    assert "messages stored until 2023-11-14 22:13:" in str(gone[0])
    subscription = driven.subscribe("a.", group=None, start="first")
    left = numbers(bodies_of(driven.pull(subscription)))
    assert left[-20:] == list(range(40, 60))
    assert len(left) <= 60 - 7 * 4
    exact = driven.subscribe("a.1", group=None, start="first")
    assert numbers(bodies_of(driven.pull(exact))) == [n for n in left if n % 2]
    driven.restart()
    assert unreceipted(driven)[1] == 30
    subscription = driven.subscribe("a.", group=None, start="first")
    assert numbers(bodies_of(driven.pull(subscription))) == left
    driven.close()


def test_a_clock_that_was_ahead_once_does_not_stop_retention(tmp_path: Path) -> None:
    """Stamps stay ten years ahead; the age of a segment is that of its file then, also over a restart."""
    driven = driven_in(tmp_path)
    right = driven.now
    driven.now = Now(right.monotonic_us, right.wall_us + 10 * 365 * 24 * HOUR_MS * 1_000)
    send(driven, 20)
    driven.now = right
    send(driven, 20, first=20)
    assert driven.store.last_stored_at_us > right.wall_us + HOUR_MS * 1_000
    assert settle(driven) == []
    driven.advance(HOUR_MS // 2)
    driven.restart()
    assert settle(driven) == []
    driven.advance(HOUR_MS // 2)
    before = segments(driven)
    gone = settle(driven)
    assert gone, "the files are an hour old"
    assert segments(driven) < before
    assert all(one.stored_until_us <= driven.now.wall_us for one in gone)
    driven.close()


def test_a_segment_that_was_looked_at_while_the_clock_was_ahead_goes_by_the_right_one(tmp_path: Path) -> None:
    driven = driven_in(tmp_path)
    right = driven.now
    driven.now = Now(right.monotonic_us, right.wall_us + 10 * 365 * 24 * HOUR_MS * 1_000)
    send(driven, 40)
    assert settle(driven) == []
    driven.now = Now(driven.now.monotonic_us, right.wall_us)
    assert settle(driven) == []
    driven.advance(HOUR_MS)
    assert settle(driven)
    driven.close()


def test_excess_segments_go_oldest_first(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BrokerLimits(retention_bytes=30_000))
    send(driven, 60)
    gone = settle(driven)
    assert gone
    sizes = driven.store.partitions[0].log_bytes()
    assert 30_000 - 8_192 <= sizes <= 30_000
    assert [one.base for one in gone] == sorted(one.base for one in gone)
    driven.close()


def test_nothing_goes_by_default(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BrokerLimits())
    send(driven, 60)
    driven.advance(100_000 * HOUR_MS)
    assert settle(driven, 5) == []
    assert unreceipted(driven) == (0, 60, 60)
    driven.close()


def test_segments_wait_for_their_receipt_when_an_archive_is_required(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BY_AGE._replace(retention_needs_archive=True))
    send(driven, 40)
    driven.advance(HOUR_MS)
    assert settle(driven, 15) == []
    assert driven.broker.take_unreceipted() == []
    log = tmp_path / "log-0"
    sealed = list(driven.store.partitions[0].message_log.sealed)
    driven.advance(2 * HOUR_MS)
    assert settle(driven, 15) == []
    (told,) = driven.broker.take_unreceipted()
    assert (told.partition, told.base, told.end) == (0, *sealed[0])
    assert f"segment {told.base:016x} has no receipt" in str(told)
    assert settle(driven, 15) == []
    assert driven.broker.take_unreceipted() == []
    receipts = [
        ArchiveReceipt(driven.store.store_id.hex(), 0, base, end, end - base, 1, "/archive", 1)
        for base, end in sealed[:3]
    ]
    write_receipt(Disk(), log, receipts[0])
    write_receipt(
        Disk(), log, ArchiveReceipt(*(*(receipts[1].store_id, 0, receipts[1].base, receipts[1].end - 1), 1, 1, "/a", 1))
    )
    write_receipt(Disk(), log, receipts[2])
    gone = settle(driven, 15)
    assert [one.base for one in gone] == [sealed[0].base], "the receipt of the second is not for all of it"
    assert not list(log.glob(f"{sealed[0].base:016x}.*"))
    write_receipt(Disk(), log, receipts[1])
    gone += settle(driven, 25)
    assert [one.base for one in gone[1:]] == [sealed[1].base, sealed[2].base]
    counters = driven.broker.counters
    assert (counters.dropped_segments, counters.dropped_messages) == (3, sum(one.messages for one in gone))
    assert counters.summary() == f"3 segments dropped; {counters.dropped_messages} messages in them"
    driven.close()


@pytest.mark.parametrize("follows", ["a.", "a.0", "both"])
@pytest.mark.parametrize("pulled", [0, 3, 20])
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_group_that_is_behind_is_moved_counted_and_reported(
    tmp_path: Path, follows: str, pulled: int, partitions: int
) -> None:
    driven = driven_in(tmp_path, partitions=partitions)
    send(driven, 40, subjects=2)
    prefixes = ("a.", "a.0") if follows == "both" else (follows,)
    consumer = Consumer(driven, "c", *prefixes)
    had = consumer.pull(pulled) if pulled else []
    if had:
        consumer.ack()
    driven.advance(HOUR_MS)
    send(driven, 10, first=40, subjects=2)
    gone = settle(driven)
    skipped = sum(one.skipped.get("g", 0) for one in gone)
    row = group_row(driven)
    wanted = [n for n in range(50) if follows != "a.0" or n % 2 == 0]
    got = sorted(numbers(had + consumer.pull(100) + consumer.pull(100)))
    assert len(got) == len(set(got))
    assert set(got) <= set(wanted)
    assert row["skipped"] == skipped == len(wanted) - len(got)
    assert row["ready"] == len(got) - len(had)
    assert (skipped > 0) == any("groups that were behind missed some of them: g" in str(one) for one in gone)
    killed(driven)
    assert group_row(driven)["skipped"] == skipped
    driven.close()


def test_missed_messages_are_counted_once_over_any_crash(tmp_path: Path) -> None:
    driven = driven_in(tmp_path)
    send(driven, 40)
    Consumer(driven, "c", "a.0")
    Consumer(driven, "d", "a.")
    driven.checkpoint()
    driven.advance(HOUR_MS)
    for _ in range(40):
        driven.advance(1)
    moved = group_row(driven)["skipped"]
    assert moved, "it was moved before the segment goes"
    killed(driven)
    assert group_row(driven)["skipped"] == moved
    settle(driven)
    assert group_row(driven)["skipped"] == unreceipted(driven)[0]
    consumer = Consumer(driven, "c", "a.0", nonce=b"x")
    assert numbers(consumer.pull(100)) == list(range(unreceipted(driven)[0], 40))
    driven.close()


def test_a_group_that_begins_behind_the_segment_is_not_moved_back(tmp_path: Path) -> None:
    driven = driven_in(tmp_path)
    send(driven, 40)
    late = Consumer(driven, "c", "a.0", start=("sequence", 38))
    driven.advance(HOUR_MS)
    settle(driven)
    assert group_row(driven)["skipped"] == 0
    assert numbers(late.pull(100)) == [38, 39]
    driven.close()


def test_a_dropped_position_is_not_counted_from_the_remaining_log(tmp_path: Path) -> None:
    driven = driven_in(tmp_path)
    send(driven, 40)
    subscription = driven.subscribe("a.")
    driven.pull(subscription)
    first, last = (
        driven.store.partitions[0].consumer_log.read_entry(0)[1],
        driven.store.partitions[0].consumer_log.read_entry(39)[1],
    )
    group = driven.broker.groups["g"]
    messages = MessageRange(PARTITIONS, first, 0, 3, 20, last)
    driven.store.may_wait(True)
    assert parts_of(driven.store, group, messages)
    driven.store.may_wait(False)
    driven.advance(HOUR_MS)
    assert settle(driven)
    driven.store.may_wait(True)
    assert parts_of(driven.store, group, messages) == []
    driven.store.may_wait(False)
    driven.close()


def test_a_segment_goes_later_after_a_disk_error(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    driven = driven_in(tmp_path, disk=disk)
    send(driven, 40)
    driven.checkpoint()
    driven.advance(HOUR_MS)
    disk.fail_always("open", errno.EACCES, "consumer-log")
    assert settle(driven, 3) == []
    (error,) = driven.broker.take_damaged()
    assert isinstance(error, StorageFailed)
    disk.heal()
    assert settle(driven)
    driven.close()


def test_a_repeat_of_a_dropped_batch_is_answered_without_sequences(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BrokerLimits(retention_max_ms=HOUR_MS, producer_ttl_ms=10 * HOUR_MS))
    first = driven.send_command({"a.0": [b"x"], "a.1": [b"y"]})
    again = first._replace(request=driven.request(), batch=memoryview(bytearray(first.batch)))
    (sent,) = driven.do(first)
    assert isinstance(sent, Sent)
    send(driven, 40)
    driven.advance(HOUR_MS)
    assert settle(driven)
    had = unreceipted(driven)
    (repeated,) = driven.do(again)
    assert isinstance(repeated, Sent)
    assert (repeated.request, repeated.position) == (again.request, sent.position)
    assert np.asarray(repeated.first_sequences).tolist() == [NO_SEQUENCE] * 2
    assert unreceipted(driven) == had
    driven.close()


@pytest.mark.parametrize("follows", [("a.0",), ("a.0", "a.1")])
def test_moving_groups_does_not_wait_for_the_disk(tmp_path: Path, follows: tuple[str, ...]) -> None:
    """The lookup of a start by time is read in a thread; everything else goes on meanwhile."""
    disk = FakeDisk("boot-1", forgets=0.0)
    driven = driven_in(tmp_path, disk=disk)
    send(driven, 40, subjects=2)
    Consumer(driven, "c", *follows, start=("time", driven.store.partitions[0].consumer_log.read_entry(3)[2]))
    wanted = 18 * ("a.0" in follows) + 19 * ("a.1" in follows)
    driven.checkpoint()
    driven.advance(HOUR_MS)
    retention = driven.broker._retention
    while retention._dropping is None:
        driven.advance(100)
    driven.auto_read = False
    beside = 0
    while retention._dropping is not None and retention._dropping.groups:
        disk.forget()
        driven.advance(1)
        beside += len(driven.reads)
        if driven.reads:
            driven.send("b", b"0 others go on")
            driven.run_reads()
            driven.finish_reads()
    assert beside
    driven.auto_read = True
    gone = settle(driven)
    left = sum(unreceipted(driven, name)[2] for name in follows)
    assert sum(one.skipped.get("g", 0) for one in gone) == group_row(driven)["skipped"] == wanted - left > 0
    driven.close()


# --- what groups have not taken stays ---------------------------------------------------------------------------------

ONCE_TAKEN = BrokerLimits(retention_ms=HOUR_MS, session_timeout_ms=100 * HOUR_MS)


@pytest.mark.parametrize("prefix", ["a.", "a.0"])
def test_a_segment_stays_until_its_last_message_is_taken(tmp_path: Path, prefix: str) -> None:
    driven = driven_in(tmp_path, ONCE_TAKEN)
    consumer = Consumer(driven, "c", prefix)
    send(driven, 40)
    driven.advance(2 * HOUR_MS)
    before = segments(driven)
    assert settle(driven) == []
    assert driven.broker.retention_holders() == ["g"]
    consumer.pull(40)
    consumer.ack(*range(39))
    driven.advance(HOUR_MS)
    gone = settle(driven)
    assert len(gone) >= 3
    assert not any(one.skipped for one in gone)
    assert sum(one.carried for one in gone) <= 1, "the message in flight is carried forward"
    assert segments(driven) < before
    assert driven.broker.retention_holders() == []
    assert group_row(driven)["skipped"] == 0
    driven.close()


def test_a_segment_stays_where_a_group_was_moved_back_since_it_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are looked at, and then moved, a few in a turn: meanwhile others go on."""
    monkeypatch.setattr(retention, "TURN_WORK", 1)
    driven = driven_in(tmp_path, BrokerLimits(retention_ms=HOUR_MS))
    send(driven, 20)
    for name in ("g", "h"):
        consumer = Consumer(driven, name, "a.", group=name)
        assert len(consumer.pull(20)) == 20
        consumer.ack(*range(20))
    driven.checkpoint()
    driven.advance(HOUR_MS)
    looking = driven.broker._retention
    while looking._dropping is None or len(looking._dropping.groups) > 1:
        driven.advance(1)
    assert not looking._dropping.is_chosen
    ask(driven, "seek_group", group="h", to="first")
    assert settle(driven, rounds=3) == []
    assert driven.broker.retention_holders() == ["h"]
    consumer.join()
    assert numbers(consumer.pull(20)) == list(range(20))
    driven.close()


def test_messages_that_no_group_wants_go_by_age(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, ONCE_TAKEN)
    consumer = Consumer(driven, "c", "b.")
    send(driven, 40)
    driven.advance(2 * HOUR_MS)
    assert len(settle(driven)) >= 4
    assert group_row(driven)["skipped"] == 0
    assert consumer
    driven.close()


def test_a_group_that_was_deleted_keeps_nothing(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, ONCE_TAKEN)
    Consumer(driven, "c")
    send(driven, 40)
    driven.advance(2 * HOUR_MS)
    assert settle(driven) == []
    ask(driven, "delete_group", group="g")
    driven.advance(HOUR_MS)
    assert len(settle(driven)) >= 4
    driven.close()


@pytest.mark.parametrize("limit", [{"retention_max_ms": 3 * HOUR_MS}, {"retention_bytes": 9_000}])
def test_a_hard_limit_waits_for_no_group(tmp_path: Path, limit: dict[str, int]) -> None:
    driven = driven_in(tmp_path, ONCE_TAKEN._replace(**limit))
    Consumer(driven, "c")
    send(driven, 40)
    driven.advance(2 * HOUR_MS)
    gone = settle(driven)
    driven.advance(2 * HOUR_MS)
    gone += settle(driven)
    assert len(gone) >= 3
    assert group_row(driven)["skipped"] == sum(one.skipped["g"] for one in gone) > 0
    driven.close()


def test_a_solo_consumer_keeps_nothing(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, ONCE_TAKEN)
    subscription = driven.subscribe("a.", group=None, start="first")
    send(driven, 40)
    driven.advance(2 * HOUR_MS)
    assert len(settle(driven)) >= 4
    assert numbers(bodies_of(driven.pull(subscription)))[-1] == 39
    driven.close()
