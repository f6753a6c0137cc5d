"""Names that a registry has lost, found again by way of rows."""

from __future__ import annotations

from pathlib import Path

from qmq.format.build import RunContent
from qmq.format.layout import LANE_HIGH, LANE_NORMAL, LANE_ORDERED
from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.checkpoint import CheckpointClaims, list_checkpoints, read_checkpoint
from qmq.storage.meta.identity import read_copies
from qmq.storage.meta.subjects import SubjectTable, parse_records
from qmq.storage.recovery.lost_names import LOST_PREFIX, NameLookupLog, restore_names
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, close_cleanly, damage, open_store

NAMES = [f"some.{number}" for number in range(12)]
#: In which lane the messages of each are.
LANES = [(LANE_NORMAL, LANE_HIGH, LANE_ORDERED | 9)[number % 3] for number in range(12)]


def make(path: Path) -> Sender:
    """Subjects over two partitions and some segments; the last one was registered and never used."""
    sender = Sender(open_store(path, FakeDisk(), partitions=2))
    for number in range(44):
        both = number % 11, (number + 3) % 11
        runs = [RunContent(NAMES[one], [b"x" * 2_000], None, LANES[one]) for one in both]
        sender.stage(*runs, partition=number % 2)
    sender.write()
    for name, lane in zip(NAMES, LANES, strict=True):
        if sender.store.subjects.number(name, lane) is None:
            sender.store.add_subject(name, lane)
    close_cleanly(sender.store)
    return sender


def open_parts(path: Path) -> tuple[SubjectTable, CheckpointClaims, list[NameLookupLog], list[ConsumerLog]]:
    disk = FakeDisk()
    identity = read_copies(disk, path)[0].identity
    claims = read_checkpoint(disk, path, list_checkpoints(disk, path)[0]).claims
    assert identity is not None
    assert claims is not None
    consumers = [ConsumerLog.open(disk, path / "consumer-log" / str(n), n, identity.store_id) for n in range(2)]
    readers = [
        NameLookupLog(disk, path / f"log-{number}", consumer, identity.secret, claims.partitions[number])
        for number, consumer in enumerate(consumers)
    ]
    table = SubjectTable.open(disk, path / "subjects", identity.store_id, claims.subjects.length_bytes)
    return table, claims, readers, consumers


def names_after(path: Path) -> tuple[list[str], list[str]]:
    table, claims, readers, consumers = open_parts(path)
    _, notes = restore_names(table, claims.subjects.count, readers)
    names = [table.name(number) for number in range(table.count)]
    table.flush()
    read = parse_records((path / "subjects").read_bytes())
    assert (read.names, read.lanes) == (names, table.lanes[: table.count].tolist())
    for name, lane in zip(names, read.lanes, strict=True):
        assert name.startswith(LOST_PREFIX) or lane == LANES[NAMES.index(name)], name
    table.close()
    for consumer in consumers:
        consumer.close()
    return names, notes


def test_a_good_registry_is_left_as_it_is(tmp_path: Path) -> None:
    sender = make(tmp_path)
    before = (tmp_path / "subjects").read_bytes()
    names, notes = names_after(tmp_path)
    assert notes == []
    assert names == [sender.store.subjects.name(number) for number in range(12)]
    assert (tmp_path / "subjects").read_bytes() == before


def test_lost_names_are_found_and_the_unused_one_keeps_its_number(tmp_path: Path) -> None:
    sender = make(tmp_path)
    expected = [sender.store.subjects.name(number) for number in range(12)]
    assert expected[11] == NAMES[11]
    (tmp_path / "subjects").unlink()
    names, notes = names_after(tmp_path)
    assert names == [*expected[:11], f"{LOST_PREFIX}11"]
    assert notes == [f"{tmp_path / 'subjects'} had lost 12 names; 11 were found again in the message log"]


def test_one_damaged_record_among_good_ones(tmp_path: Path) -> None:
    sender = make(tmp_path)
    expected = [sender.store.subjects.name(number) for number in range(12)]
    data = bytearray((tmp_path / "subjects").read_bytes())
    place = data.index(expected[4].encode())
    data[place] ^= 1
    (tmp_path / "subjects").write_bytes(data)
    names, notes = names_after(tmp_path)
    assert names == expected
    assert "had lost 1 names; 1 were found" in notes[0]


def test_a_batch_that_is_bad_tells_no_name(tmp_path: Path) -> None:
    sender = make(tmp_path)
    expected = [sender.store.subjects.name(number) for number in range(12)]
    for sent in sender.sent:
        if any(name == expected[2] for name, _, _ in sent.runs):
            damage(tmp_path, sent, 130)
    (tmp_path / "subjects").write_bytes((tmp_path / "subjects").read_bytes()[:40])
    assert names_after(tmp_path)[0][2] == f"{LOST_PREFIX}2"
    assert Disk().exists(tmp_path / "subjects")
