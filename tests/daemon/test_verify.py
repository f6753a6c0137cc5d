"""`qmq verify` counts what the groups of the last checkpoint have in flight, in retry and dead, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from qmq.daemon.verify import verify
from qmq.format.layout import SCHEDULE_HEADER_SIZE
from qmq.net.protocol.types import Disposition
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log import item_file, timer_queue
from qmq.storage.meta.checkpoint import checkpoint_path, list_checkpoints
from tests.broker.group_state import ledger_of
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer


def stopped(directory: Path, *, retries: int = 3) -> Driven:
    """Return a broker that has stopped, with messages of its group in flight, in retry and dead."""
    driven = Driven(directory)
    driven.send("a", *[b"x"] * 20)
    consumer = Consumer(driven, "c")
    consumer.pull(15)
    consumer.ack(0, 1)
    for number in range(2, 2 + retries):
        consumer.back(number, number + 1, Disposition.NACK, 60_000_000)
    consumer.back(12, 14, Disposition.REJECT)
    driven.checkpoint()
    driven.store.close(clean=True)
    return driven


def with_state(driven: Driven, name: str, change: Any) -> None:
    """Write a checkpoint in which the state of the group has the field *name* changed."""
    driven.open()
    state = driven.broker.checkpoint_state(driven.now)
    groups = msgpack.unpackb(state["groups"], strict_map_key=False)
    number, *packed = groups["g"]
    several = [msgpack.unpackb(one, strict_map_key=False) for one in packed]
    (fields,) = (one for one in several if name in one)
    fields[name] = change(fields[name])
    groups["g"] = number, *map(msgpack.packb, several)
    checkpoint = driven.store.begin_checkpoint({**state, "groups": msgpack.packb(groups)})
    checkpoint.write()
    driven.store.finish_checkpoint(checkpoint)
    driven.store.close(clean=True)


def faults(directory: Path) -> list[str]:
    disk = Disk()
    found = verify(directory, disk).findings
    path = checkpoint_path(directory, list_checkpoints(disk, directory)[0])
    return [one.what for one in found if one.severity == "fault" and one.file == path]


@pytest.mark.parametrize("memory_items", [2, 1_000])
def test_a_directory_whose_groups_add_up_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_items: int
) -> None:  # fmt: skip
    monkeypatch.setattr(timer_queue, "MEMORY_ITEMS", memory_items)  # so that few make sorted runs
    monkeypatch.setattr(item_file, "MEMORY_ITEMS", memory_items)
    stopped(tmp_path, retries=8)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    assert verify(tmp_path, Disk()).is_good
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before, "it changes nothing"


def test_a_retry_that_is_lost_in_the_schedule_is_found(tmp_path: Path) -> None:
    driven = stopped(tmp_path)
    driven.open()
    ledger_of(driven).retries._schedule.clear()  # ``count`` still has them
    ledger_of(driven).retries.changed = True
    checkpoint = driven.store.begin_checkpoint(driven.broker.checkpoint_state(driven.now))
    checkpoint.write()
    driven.store.finish_checkpoint(checkpoint)
    driven.store.close(clean=True)
    (what,) = faults(tmp_path)
    assert "group g has 10 messages in flight, in retry and dead, and by its records it must have 13" in what


def test_a_retry_that_was_taken_in_part_counts_for_its_rest(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.send("a", *[b"x"] * 10)
    consumer = Consumer(driven, "c")
    consumer.pull()
    consumer.back(0, 8, Disposition.NACK, 1_000)
    driven.checkpoint()  # it lies in the schedule
    driven.advance(2)
    assert len(consumer.pull(3)) == 3
    driven.store.close(clean=False)
    driven.open()  # the record says that three of it were taken
    assert ledger_of(driven).retries.counted_in_files() == ledger_of(driven).retries.count == 5
    driven.close()


def test_a_message_in_flight_that_no_pull_has_is_found(tmp_path: Path) -> None:
    driven = stopped(tmp_path)

    def lose(members: list[Any]) -> list[Any]:
        members[0][14][5].pop()  # its last pull
        return members

    with_state(driven, "members", lose)
    (what,) = faults(tmp_path)
    assert "group g has 5 messages in flight" in what


def test_what_a_broker_has_found_is_told(tmp_path: Path) -> None:
    driven = stopped(tmp_path)
    with_state(driven, "unaccounted", lambda before: 3)
    (what,) = faults(tmp_path)
    assert "the cursors of group g have passed 3 messages more or fewer" in what


def test_a_state_that_makes_no_sense_is_a_fault(tmp_path: Path) -> None:
    driven = stopped(tmp_path)
    with_state(driven, "members", lambda members: 7)
    (what,) = faults(tmp_path)
    assert "its state of groups makes no sense" in what


@pytest.mark.parametrize("name", ["retries", "dead"])
def test_rotten_files_are_left_to_their_own_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(timer_queue, "MEMORY_ITEMS", 2)
    monkeypatch.setattr(item_file, "MEMORY_ITEMS", 2)
    driven = Driven(tmp_path)
    driven.send("a", *[b"x"] * 20)
    consumer = Consumer(driven, "c")
    consumer.pull(15)
    for number in range(12):
        disposition = Disposition.NACK if number % 2 else Disposition.REJECT
        consumer.back(number, number + 1, disposition, 60_000_000)
    driven.checkpoint()
    driven.store.close(clean=True)
    runs = [path for path in tmp_path.rglob(f"{name}/*") if path.is_file()]
    assert runs
    for path in runs:
        data = path.read_bytes()
        path.write_bytes(data[:SCHEDULE_HEADER_SIZE] + bytes(len(data) - SCHEDULE_HEADER_SIZE))
    assert not verify(tmp_path, Disk()).is_good
    assert faults(tmp_path) == []


def test_a_directory_without_groups_is_good(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.store.close(clean=False)
    assert verify(tmp_path, Disk()).is_good
