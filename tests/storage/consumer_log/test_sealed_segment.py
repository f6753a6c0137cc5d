"""Sealed entries: found, checked, mapped, and their order made again when it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import BadBytes
from qmq.storage.consumer_log.active import ActiveRows
from qmq.storage.consumer_log.header import DerivedHeader
from qmq.storage.consumer_log.sealed_segment import SealedSegment, count_before
from qmq.storage.disk.disk import Disk
from tests.fake_disk import FakeDisk
from tests.storage.rows import STORE, Feed, as_array

OWNER = DerivedHeader(0, STORE, False, 1_000, 0, 0, 70, 0)


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    """Return the rows of the files in tmp_path."""
    made = Feed()
    journal = ActiveRows(Disk(), tmp_path, OWNER)
    for number in range(30):
        journal.extend(as_array(made.batch([(number % 4, 2), (9, 1)])))
    journal.freeze()
    journal.seal()
    journal.close()
    return made


def test_open_and_read(tmp_path: Path, feed: Feed) -> None:
    segment = SealedSegment.open(Disk(), tmp_path, OWNER, feed.position)
    assert (segment.first_row, segment.count, segment.is_mapped) == (70, 60, False)
    assert segment.rows().tolist() == feed.rows
    assert list(segment.span(9)) == list(range(1, 60, 2))
    assert segment.subjects().tolist() == [0, 1, 2, 3, 9]
    rows = segment.rows()
    segment.unmap()
    assert not segment.is_mapped
    assert rows.tolist() == feed.rows
    assert bytes(segment.data()) == as_array(feed.rows).tobytes()


@pytest.mark.parametrize(
    ("owner", "end"),
    [
        (OWNER._replace(partition=1), 0),
        (OWNER._replace(store_id=b"other1"), 0),
        (OWNER, -1),
    ],
)
def test_files_of_others_and_files_that_know_too_much_are_refused(
    tmp_path: Path, feed: Feed, owner: DerivedHeader, end: int
) -> None:
    with pytest.raises(BadBytes, match="is not a whole sealed segment"):
        SealedSegment.open(Disk(), tmp_path, owner, feed.position + end)


def test_size_and_body_are_checked(tmp_path: Path, feed: Feed) -> None:
    path = next(tmp_path.glob("*.entries"))
    good = path.read_bytes()
    path.write_bytes(good + b"x")
    with pytest.raises(BadBytes, match="is not a whole sealed segment"):
        SealedSegment.open(Disk(), tmp_path, OWNER, feed.position)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    segment = SealedSegment.open(Disk(), tmp_path, OWNER, feed.position)
    with pytest.raises(BadBytes, match="checksum"):
        segment.rows()


@pytest.mark.parametrize("damage", ["missing", "rotten", "short"])
def test_an_order_that_is_lost_is_made_again(tmp_path: Path, feed: Feed, damage: str) -> None:
    path = next(tmp_path.glob("*.order"))
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(good[:-4] + b"\0\0\0\0" if damage == "rotten" else good[:-4])
    segment = SealedSegment.open(Disk(), tmp_path, OWNER, feed.position)
    assert list(segment.span(9)) == list(range(1, 60, 2))
    assert path.read_bytes() == good


def test_reads_by_subject_go_on_while_the_disk_is_full(tmp_path: Path, feed: Feed) -> None:
    next(tmp_path.glob("*.order")).unlink()
    disk = FakeDisk()
    disk.full = True
    segment = SealedSegment.open(disk, tmp_path, OWNER, feed.position)
    assert list(segment.span(9)) == list(range(1, 60, 2))


def test_count_before(feed: Feed) -> None:
    rows = as_array(feed.rows)
    assert count_before(rows, 0) == count_before(rows[:0], 10) == 0
    assert count_before(rows, feed.batches[7][0][1]) == 14
    assert count_before(rows, feed.position) == 60
