"""What became of the messages of groups adds up at each checkpoint; where it does not, the broker says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgpack
import pytest

from qmq.broker.groups.group import Group
from qmq.broker.groups.passed import PASSED, Unaccounted, wrongly_held, wrongly_passed
from qmq.broker.ports.limits import BrokerLimits
from qmq.net.protocol.types import Disposition
from qmq.storage.store import subject_ranges_of
from tests.broker.delivery.test_filters import numbered, sent
from tests.broker.group_state import ledger_of
from tests.broker.harness import START_US, Driven
from tests.broker.retention.test_retention import driven_in, send
from tests.broker.test_admin import ask
from tests.broker.test_consuming import Consumer, killed
from tests.sim.disk import SimulatedDisk
from tests.sim.life import DIRECTORY

#: Ways to stop and start a broker, or to take a checkpoint only.
STOPS = [Driven.checkpoint, Driven.restart, killed]


def group_of(driven: Driven, name: str = "g") -> Group:
    return driven.broker.groups[name]


def passed(driven: Driven) -> int:
    """Return how many messages the group's cursors have passed since the checkpoint, by the cursors themselves."""
    ledger = ledger_of(driven)
    ledger.totals.passed_before += 1_000_000  # more than any test sends, so that the accounts differ
    try:
        found = wrongly_passed(driven.store, group_of(driven))
    finally:
        ledger.totals.passed_before -= 1_000_000
    assert found is not None
    return found.found


def pass_one(driven: Driven, by: int = 1) -> None:
    """Move a cursor of the group, without a record."""
    group = group_of(driven)
    group.cursors.set(0, group.cursors.get(0) + by)
    group.dirty = True


def texts(driven: Driven) -> list[str]:
    return [one.text for one in driven.broker.unaccounted()]


def look(driven: Driven) -> None:
    """Take a checkpoint, whatever it finds."""
    checkpoint = driven.store.begin_checkpoint(driven.broker.checkpoint_state(driven.now))
    checkpoint.write()
    driven.store.finish_checkpoint(checkpoint)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("prefix", ["", "a.x"])
@pytest.mark.parametrize("start", [None, "new", ("time", START_US + 500_000), ("sequence", 2)])
def test_what_the_cursors_pass_is_what_pulls_were_given(
    tmp_path: Path, start: Any, prefix: str, stop: Any
) -> None:  # fmt: skip
    driven = Driven(tmp_path)
    for _ in range(2):
        driven.send("a.x", *[b"old"] * 3)
        driven.send("b", b"old")
        driven.advance(1_000)
    consumer = Consumer(driven, "c", prefix, start=start)
    driven.send("a.x", b"new", b"new")
    driven.send("c", b"new")
    given = len(consumer.pull())
    assert given == passed(driven)
    stop(driven)
    if stop is not Driven.checkpoint:
        consumer.join()
        consumer.got.clear()
        consumer.pull()
        consumer.ack()
    driven.send("a.x", *[b"newer"] * 5)
    before = 0 if stop is not killed else given
    given = len(consumer.pull())
    assert given
    # After a kill nobody knows which subjects had their numbers before: the group begins at 2 in these.
    is_known = start != ("sequence", 2) or stop is not killed
    assert group_of(driven).is_comparable == is_known
    assert not is_known or passed(driven) == before + given
    driven.close()


@pytest.mark.parametrize("stop", STOPS)
def test_filtered_and_expired_messages_are_counted(tmp_path: Path, stop: Any) -> None:
    driven = Driven(tmp_path)
    sent(driven, {"a": [*numbered(10, [("vip",), ("eu",)]), *numbered(4, [("vip",)], START_US - 1)]})
    consumer = Consumer(driven, "c", "a", tags=["vip"])
    assert len(consumer.pull()) == 5
    consumer.pull()
    totals = ledger_of(driven).totals
    assert (totals.handed, totals.filtered, totals.passed) == (9, 5, 14)
    stop(driven)
    totals = ledger_of(driven).totals
    assert (totals.handed, totals.filtered, totals.held) == (9, 5, 9)
    driven.close()


def test_a_cursor_that_passes_a_message_without_a_word_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    driven = Driven(tmp_path)
    driven.send("a", *[b"x"] * 10)
    consumer = Consumer(driven, "c")
    assert len(consumer.pull(3)) == 3
    pass_one(driven, 2)
    with caplog.at_level(logging.ERROR):
        look(driven)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "group g have passed 5 messages since the last checkpoint, and records count 3 of them" in line
    assert "qmq trace" in line
    (found,) = driven.broker.unaccounted()
    assert (found.group, found.messages) == ("g", 2)
    assert len(consumer.pull(3)) == 3
    look(driven)
    assert [one.messages for one in driven.broker.unaccounted()] == [2], "the same messages are reported once"
    driven.store.close(clean=False)
    driven.open()
    assert [one.messages for one in driven.broker.unaccounted()] == [2], "a start forgets nothing"
    ask(driven, "seek_group", group="g", to="first")
    driven.close()


def test_a_cursor_that_goes_back_is_reported(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a", *[b"x"] * 10)
    assert len(Consumer(driven, "c").pull(6)) == 6
    driven.checkpoint()
    pass_one(driven, -4)
    assert wrongly_passed(driven.store, group_of(driven)) == Unaccounted("g", PASSED, 0, -4)
    pass_one(driven, 4)
    driven.close()


def test_a_cursor_that_is_unset_again_passes_nothing(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for subject in ("a", "b", "c"):
        driven.send(subject, *[b"x"] * 4)
    consumer = Consumer(driven, "c")
    assert len(consumer.pull(4)) == 4
    driven.checkpoint()
    cursors = group_of(driven).cursors
    cursors.set(0, 0)
    assert len(consumer.pull(4)) == 4
    assert passed(driven) == 4
    cursors.set(0, 4)
    driven.close()


def test_a_message_that_is_counted_and_not_passed_is_reported(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a", *[b"x"] * 10)
    assert len(Consumer(driven, "c").pull(6)) == 6
    ledger_of(driven).totals.filtered += 1
    assert wrongly_passed(driven.store, group_of(driven)) == Unaccounted("g", PASSED, 7, 6)
    ledger_of(driven).totals.filtered -= 1
    driven.close()


def test_a_lost_retry_is_reported_until_retries_are_cleared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driven = Driven(tmp_path)
    driven.send("a", *[b"x"] * 4)
    consumer = Consumer(driven, "c")
    consumer.pull()
    consumer.back(0, 3, Disposition.RELEASE)
    driven.checkpoint()
    ledger_of(driven).retries._due.clear()
    ledger_of(driven).retries.changed = True
    with caplog.at_level(logging.ERROR):
        look(driven)
        look(driven)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "group g has 1 messages in flight, in retry and dead, and by its records it must have 4" in line
    assert [one.messages for one in driven.broker.unaccounted()] == [3]
    driven.store.close(clean=False)
    driven.open()
    look(driven)
    assert [one.messages for one in driven.broker.unaccounted()] == [3], "a start looks at all groups"
    ask(driven, "seek_group", group="g", to="new", clear_retries=True)
    driven.close()


@pytest.mark.parametrize("stop", STOPS)
def test_every_way_out_is_counted(tmp_path: Path, stop: Any) -> None:
    driven = Driven(tmp_path, BrokerLimits())
    driven.send("a", *[b"x"] * 10)
    consumer = Consumer(driven, "c", max_attempts=2)
    consumer.pull()
    consumer.ack(0, 1)
    consumer.back(2, 4, Disposition.REJECT)
    consumer.back(4, 5, Disposition.NACK, 0)
    (letter, _) = ask(driven, "dead_letters", group="g")["rows"]
    ask(driven, "redrive", group="g", numbers=[letter["number"]])
    ask(driven, "delete_dead", group="g", numbers=None)
    stop(driven)
    totals = ledger_of(driven).totals
    assert (totals.handed, totals.acked, totals.deleted, totals.held) == (10, 2, 1, 7)
    assert wrongly_held(group_of(driven)) is None
    ask(driven, "seek_group", group="g", to="new")
    totals = ledger_of(driven).totals
    assert (totals.dropped, totals.held) == (5, 2)
    ask(driven, "seek_group", group="g", to="new", clear_retries=True)
    assert totals.held == 0
    driven.close()


def test_a_checkpoint_without_totals_begins_them_anew(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a", *[b"x"] * 10)
    consumer = Consumer(driven, "c")
    consumer.pull(6)
    consumer.back(0, 2, Disposition.REJECT)
    consumer.back(2, 4)
    state = driven.broker.checkpoint_state(driven.now)
    groups = msgpack.unpackb(state["groups"], strict_map_key=False)
    number, come, ledger = groups["g"]
    fields, ledger_fields = (msgpack.unpackb(one, strict_map_key=False) for one in (come, ledger))
    del fields["unaccounted"], ledger_fields["totals"]
    groups["g"] = number, msgpack.packb(fields), msgpack.packb(ledger_fields)
    checkpoint = driven.store.begin_checkpoint({**state, "groups": msgpack.packb(groups)})
    checkpoint.write()
    driven.store.finish_checkpoint(checkpoint)
    driven.store.close(clean=True)
    driven.open()
    totals = ledger_of(driven).totals
    assert (totals.begun, totals.handed, totals.held) == (6, 0, 6)
    consumer.join()
    assert len(consumer.pull()) == 2  # in flight
    consumer.ack()
    assert len(consumer.pull()) == 4
    assert passed(driven) == 4
    driven.close()


def test_after_a_loss_of_power_cursors_are_compared_anew(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimulatedDisk(3)
    driven = Driven(DIRECTORY, disk=disk, auto_sync=False)
    driven.send("a", b"x", flush=False)
    consumer = Consumer(driven, "c")
    driven.checkpoint()
    driven.send("a", *[b"x"] * 5, flush=False)
    consumer.pull()
    disk.stop(power=True)
    driven.wanted.clear()
    driven.reads.clear()
    with caplog.at_level(logging.INFO, "qmq.broker"):
        driven.open()
    assert [line for line in caplog.messages if "from the next checkpoint on" in line]
    assert not group_of(driven).is_comparable
    driven.checkpoint()
    assert group_of(driven).is_comparable


def test_it_is_not_compared_where_that_needs_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.broker.groups.passed.MOST_LOOKED_UP", 2)
    driven = Driven(tmp_path)
    for number in range(4):
        driven.send(f"a.{number}", b"old")
    consumer = Consumer(driven, "c", "a.", start=("time", START_US))
    assert len(consumer.pull(2)) == 2
    assert passed(driven) == 2
    assert len(consumer.pull(2)) == 2
    pass_one(driven)
    assert wrongly_passed(driven.store, group_of(driven)) is None
    pass_one(driven, -1)
    driven.close()


def test_prefixes_that_start_apart_are_compared_where_one_takes_a_subject(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    for subject in ("a.x", "b"):
        driven.send(subject, b"old", b"old")
    driven.advance(1_000)
    first = Consumer(driven, "c", "a.")
    Consumer(driven, "d", "b", start=("sequence", 1), connection=2)
    assert len(first.pull()) == 2
    assert passed(driven) == 2
    driven.checkpoint()
    driven.close()


def test_deleted_and_at_most_once_groups_have_no_problem(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a", *[b"x"] * 10)
    consumer = Consumer(driven, "c")
    consumer.pull(5)
    pass_one(driven)
    look(driven)
    assert texts(driven)
    ask(driven, "delete_group", group="g")
    assert not texts(driven)
    Consumer(driven, "c").pull(5)
    driven.close()


def test_the_broker_compares_only_groups_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(tmp_path)
    driven.send("a", *[b"x"] * 10)
    consumers = {name: Consumer(driven, "c", group=name) for name in ("g", "h")}
    for consumer in consumers.values():
        consumer.pull(5)
    driven.checkpoint()
    looked_at: list[str | None] = []

    def held(group: Group) -> None:
        looked_at.append(group.name)

    monkeypatch.setattr("qmq.broker.groups.accounts.wrongly_held", held)
    driven.checkpoint()
    assert not looked_at
    consumers["h"].ack()
    driven.checkpoint()
    assert looked_at == ["h"]
    driven.close()


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_group_that_begins_behind_a_leaving_segment_gets_earlier_messages_of_others(
    tmp_path: Path, partitions: int, has_checkpoint: bool
) -> None:
    driven = driven_in(tmp_path, partitions=partitions)
    Consumer(driven, "c", "a.").pull(1)
    send(driven, 2, subjects=2)
    for number in range(40):  # a batch lies in the partition of its first subject
        names = ("a.0", "a.1") if number % 2 else ("a.1", "a.0")
        driven.do(driven.send_command({name: [b"x" * 400] for name in names}))
    driven.checkpoint()
    part = driven.store.partitions[0]
    base, _ = part.removable()[-1]
    part.leave(base, subject_ranges_of(part.old_segment(base).rows()))
    ask(driven, "seek_group", group="g", to="first")
    if has_checkpoint:
        look(driven)
    consumer = Consumer(driven, "c", "a.")
    assert consumer.pull(82)
    assert wrongly_passed(driven.store, group_of(driven)) is None
    driven.store.close(clean=False)  # the segment has not gone, and no record says that it was leaving
    driven.open()
    look(driven)
    assert texts(driven) == []
    driven.close()


def test_a_group_that_begins_now_gets_what_another_partition_syncs_later(tmp_path: Path) -> None:
    driven = Driven(tmp_path, partitions=2, auto_sync=False)
    for subject in ("a.0", "a.1"):
        driven.do(driven.send_command({subject: [b"old"]}))
    driven.sync()
    for subject in ("a.0", "a.1"):
        driven.do(driven.send_command({subject: [b"stored"]}))
    driven.wanted, later = driven.wanted[1:], driven.wanted[:1]
    driven.sync()  # the one that was stored last can be seen
    consumer = Consumer(driven, "c", "a.", start="new")
    driven.wanted += later
    driven.sync()
    assert consumer.pull() == [b"stored"]
    assert wrongly_passed(driven.store, group_of(driven)) is None
    driven.checkpoint()
    driven.do(driven.send_command({"a.0": [b"new"]}))
    driven.sync()
    assert consumer.pull() == [b"new"]
    assert passed(driven) == 1
    driven.close()
