"""Records of the pull log that a loss of power took, though later ones are on disk: nothing behind them counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from qmq.broker.journal.record_types import RecordKind
from qmq.broker.ports.commands import Unsubscribe
from qmq.storage.pull_log.records import PullRecord, list_pull_files, pull_file_path, read_pull_log
from tests.broker.delivery.test_at_most_once import joined, taken
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, filled, many
from tests.fake_disk import Operation
from tests.sim.disk import SimulatedDisk
from tests.sim.life import DIRECTORY, SMALL, check_files

PULLS = DIRECTORY / "pulls"


class Killed(Exception):
    """The process ends within an operation."""


def driven_on(disk: SimulatedDisk) -> Driven:
    """A broker with some messages, all of it on disk."""
    driven = Driven(DIRECTORY, disk=disk, **SMALL)
    for body in many(3):
        driven.send("a.x", body)
    return driven


def records_of(driven: Driven) -> list[PullRecord]:
    """All that its pull log has."""
    base = list_pull_files(driven.disk, PULLS)[0]
    return read_pull_log(driven.disk, PULLS, driven.store.store_id, driven.store.secret, base).records


def lose(driven: Driven, disk: SimulatedDisk, kind: RecordKind) -> None:
    """The power fails; of all that was written one record has not reached the disk, the last of that kind."""
    record = [one for one in records_of(driven) if one.kind == kind][-1]
    base = max(base for base in list_pull_files(disk, PULLS) if base <= record.position)
    fd = disk.open(pull_file_path(PULLS, base), os.O_RDWR)
    disk.pwritev(fd, [bytes(12 + len(record.payload))], record.position - base)
    disk.close(fd)
    for file in disk.files.all_files():
        file.sync()
    for directory in disk.files.directories.values():
        directory.sync()
    disk.stop(power=True)
    check_files(disk)


def handed_on(driven: Driven) -> None:
    """Consumer a has three messages and leaves; b gets them, and acknowledges them."""
    a, b = Consumer(driven, "a"), Consumer(driven, "b", connection=2)
    driven.checkpoint()
    assert a.pull() == many(3)
    driven.do(Unsubscribe(1, driven.request(), a.subscription))
    assert b.pull() == many(3)
    assert b.ack() == 0


def held_by_a(driven: Driven) -> bool:
    """All is as it was before a left: it holds the messages, b nothing, and nothing waits."""
    ledger = driven.broker.groups["g"].ledger
    assert ledger is not None
    in_flight = {name: member.in_flight.count for name, member in ledger.by_name.items()}
    return in_flight == {"a": 3, "b": 0} and not ledger.retries.count and driven.store.groups.generation > 1


def test_what_came_after_a_lost_record_does_not_count() -> None:
    disk = SimulatedDisk(1)
    driven = driven_on(disk)
    handed_on(driven)
    lose(driven, disk, RecordKind.LEAVE)
    driven.open()
    assert held_by_a(driven)
    assert any("in a power loss" in note for note in driven.store.recovery.notes)
    disk.stop(power=False)  # and it does not later
    check_files(disk)
    driven.open()
    assert held_by_a(driven)
    assert Consumer(driven, "a", connection=3).pull() == many(3)
    driven.checkpoint()
    driven.store.close(clean=True)
    disk.stop(power=False)
    check_files(disk)


def killed_starts(driven: Driven, disk: SimulatedDisk) -> Iterator[int]:
    """Start on copies of the disk, each start killed one operation later than the one before, then start again."""
    for operations in count():
        driven.disk = image = disk.clone(operations)
        left = operations

        def before(operation: Operation, image: SimulatedDisk = image) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                image.before = None
                image.interrupt(operation)
                raise Killed

        image.before = before
        try:
            driven.open()
        except Killed:
            image.stop(power=False)
            driven.open()
            yield operations
        else:
            yield operations
            assert operations > 10, "a start does as much"
            return


def test_a_start_that_is_killed_does_not_forget_that_power_was_lost() -> None:
    disk = SimulatedDisk(1)
    driven = driven_on(disk)
    handed_on(driven)
    lose(driven, disk, RecordKind.LEAVE)
    for operations in killed_starts(driven, disk):
        assert held_by_a(driven), operations


def test_a_start_that_is_killed_begins_another_generation_all_the_same() -> None:
    """The last record is gone, which leaves no trace, and a client may have seen its delivery sequences."""
    disk = SimulatedDisk(1)
    driven = driven_on(disk)
    handed_on(driven)
    generation = driven.store.groups.generation
    lose(driven, disk, RecordKind.ACK)
    for operations in killed_starts(driven, disk):
        assert driven.store.groups.generation > generation, operations


def test_what_a_block_may_have_given_away_is_not_handed_out_again() -> None:
    disk = SimulatedDisk(1)
    driven = driven_on(disk)
    subscription = joined(driven, max_unacked=1)
    driven.checkpoint()
    driven.subscribe("", group="h")
    assert taken(driven, subscription, 2) == many(2)
    records = records_of(driven)
    assert [one.kind for one in records][-2:] == [RecordKind.RESERVE] * 2
    lose(driven, disk, RecordKind.JOIN)
    driven.open()
    assert not driven.broker.groups["h"].ledger.members  # type: ignore[union-attr]
    left = taken(driven, joined(driven))
    assert not set(left) & set(many(2)), left


def test_who_held_messages_at_bad_bytes_holds_them_on(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    a, b = Consumer(driven, "a"), Consumer(driven, "b", connection=2)
    driven.checkpoint()
    assert a.pull() == many(3)
    driven.do(Unsubscribe(1, driven.request(), a.subscription))
    assert b.pull() == many(3)
    b.back(0, 3, delay_us=6_000_000)
    driven.store.close(clean=False)
    store, pulls = driven.store, tmp_path / "pulls"
    base = list_pull_files(driven.disk, pulls)[0]
    records = read_pull_log(driven.disk, pulls, store.store_id, store.secret, base).records
    left = [one for one in records if one.kind == RecordKind.LEAVE][-1]
    path = pull_file_path(pulls, max(base for base in list_pull_files(driven.disk, pulls) if base <= left.position))
    data = bytearray(path.read_bytes())
    data[left.position - int(path.stem, 16) + 4] ^= 1  # rot, not a loss of power
    path.write_bytes(data)
    driven.open()
    a, c = Consumer(driven, "a", connection=3), Consumer(driven, "c", connection=4)
    assert a.pull() == many(3), "nobody knows that it left"
    driven.advance(7_000)
    assert c.pull() == [], "nor that they came back from another one"
    assert a.ack() == 0
    driven.store.close(clean=False)
