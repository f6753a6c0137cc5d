"""The sealed segments of a partition: which ones a start takes, and how many are mapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import BadBytes
from qmq.storage.consumer_log import sealed_set
from qmq.storage.consumer_log.header import DerivedHeader
from qmq.storage.consumer_log.sealed_set import SealedSegments, find_sealed, make_again
from qmq.storage.disk.disk import Disk
from tests.fake_disk import FakeDisk
from tests.storage.rows import STORE, Feed, as_array

OWNER = DerivedHeader(0, STORE, False, 0, 0, 0, 0, 0)


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    """Seal five segments of 20 rows in tmp_path."""
    made = Feed()
    for segment in range(5):
        batches = [made.batch([(segment, 1), (9, 1)]) for _ in range(10)]
        owner = OWNER._replace(base=made.bases[-1], first_row=20 * segment)
        make_again(FakeDisk(), tmp_path, owner, made.position, lambda _base, _end, b=batches: map(as_array, b))
        made.roll()
    return made


def sealed_of(feed: Feed) -> list[tuple[int, int, bool]]:
    return feed.segments()[:5]


def test_only_sealed_segments_before_covered_count(tmp_path: Path, feed: Feed) -> None:
    segments = sealed_of(feed)
    assert sorted(find_sealed(Disk(), tmp_path, OWNER, segments, feed.position)) == feed.bases[:5]
    assert sorted(find_sealed(Disk(), tmp_path, OWNER, segments, segments[2][1])) == feed.bases[:3]
    unsealed = [*segments[:4], (*segments[4][:2], False)]
    assert sorted(find_sealed(Disk(), tmp_path, OWNER, unsealed, feed.position)) == feed.bases[:4]


def test_the_newest_bodies_are_checked_at_a_start(tmp_path: Path, feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_set, "CHECKED_AT_START", 2 * 20 * 48)
    for path in tmp_path.glob("*.entries"):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert sorted(find_sealed(Disk(), tmp_path, OWNER, sealed_of(feed), feed.position)) == feed.bases[:3]


def test_few_are_mapped_at_a_time(tmp_path: Path, feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_set, "MAPPED_SEGMENTS", 2)
    held = SealedSegments(Disk(), tmp_path, None)
    for _, segment in sorted(find_sealed(Disk(), tmp_path, OWNER, sealed_of(feed), feed.position).items()):
        held.add(segment)
    for row in (0, 99, 45, 20, 79, 19, 60):
        rows, start = held.rows_at(row)
        assert rows[row - start].item() == feed.rows[row]
        assert sum(segment.is_mapped for segment in held.segments) <= 2
    assert [found.row_range.first_row for found in held.shelves.from_sequence(9, 0)] == [0, 20, 40, 60, 80]
    assert sum(segment.is_mapped for segment in held.segments) <= 2
    held.unmap()
    assert not any(segment.is_mapped for segment in held.segments)


def test_a_message_log_that_has_changed_cannot_repair(
    tmp_path: Path, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_set, "CHECKED_AT_START", 0)
    path = min(tmp_path.glob("*.entries"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    held = SealedSegments(Disk(), tmp_path, lambda _base, _end: iter(feed.batches[0][:1]))
    for _, segment in sorted(find_sealed(Disk(), tmp_path, OWNER, sealed_of(feed), feed.position).items()):
        held.add(segment)
    with pytest.raises(BadBytes, match="has changed"):
        held.rows_at(3)
