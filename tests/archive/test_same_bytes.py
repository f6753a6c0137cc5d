"""Two directories of one store id: what one has archived never counts as a copy of what the other has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qmq.archive.data_directory import open_data_directory
from qmq.errors import ForeignFile
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.archive_receipt import read_receipt
from qmq.storage.message_log.segment import SegmentOwner
from qmq.storage.verify.renew_id import renew_id
from tests.archive.archives import NOW_US, archive, files_in
from tests.storage.stores import Sender, close_cleanly, damage, open_store


def send(directory: Path, *bodies: bytes) -> Sender:
    """Open a store, send messages one by one, and stop it. Return the sender."""
    sender = Sender(open_store(directory))
    for body in bodies:
        sender.send("a", body)
    close_cleanly(sender.store)
    return sender


def receipts(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*.receipt")]


@pytest.fixture
def twins(tmp_path: Path) -> tuple[Path, Path]:
    """A directory with messages and its clone; both then get another message each, of the same size."""
    first, second = tmp_path / "first", tmp_path / "second"
    send(first, b"common", b"also common")
    shutil.copytree(first, second)
    send(first, b"only in the 1st")
    send(second, b"only in the 2nd")
    return first, second


def test_other_batches_in_the_same_place_are_refused_without_a_receipt(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = twins
    archive(first, tmp_path / "to")
    before = files_in(tmp_path / "to")
    with pytest.raises(ForeignFile, match=r"other messages than .*second.*qmq repair --new-id"):
        archive(second, tmp_path / "to")
    assert (files_in(tmp_path / "to"), receipts(second)) == (before, [])
    renewed = renew_id(second, Disk(), NOW_US)
    done = archive(second, tmp_path / "to")
    assert (done.copied, done.kept) == (1, 0)
    assert f"segments/{renewed.store_id.hex()}-0" in {str(Path(name).parent) for name in files_in(tmp_path / "to")}
    assert before.items() <= files_in(tmp_path / "to").items(), "the other one's copies stay"


@pytest.mark.parametrize("bodies", [[b"more" * 50], [b"x"], [b"more" * 4_000, b"more" * 4_000]])
def test_a_longer_segment_replaces_no_copy_of_other_batches(
    twins: tuple[Path, Path], tmp_path: Path, bodies: list[bytes]
) -> None:
    first, second = twins
    archive(first, tmp_path / "to")
    before = files_in(tmp_path / "to")
    send(second, *bodies)
    with pytest.raises(ForeignFile, match="from position"):
        archive(second, tmp_path / "to")
    assert (files_in(tmp_path / "to"), receipts(second)) == (before, [])


def test_an_older_copy_gets_a_receipt_for_no_more_than_it_has(tmp_path: Path) -> None:
    """What it stores later in the same segment is in no archive."""
    data, older = tmp_path / "data", tmp_path / "older"
    send(data, b"one")
    shutil.copytree(data, older)
    send(data, b"two", b"three")
    archive(data, tmp_path / "to")
    done = archive(older, tmp_path / "to")
    assert (done.copied, done.kept, done.receipts) == (0, 1, 1)
    (segment,) = open_data_directory(older).segments
    owner, log = SegmentOwner(segment.store_id, 0), older / "log-0"
    receipt = read_receipt(Disk(), log, segment.base)
    assert receipt is not None
    assert receipt.covers(owner, segment.base, segment.end)
    send(older, b"TWO")
    (segment,) = open_data_directory(older).segments
    assert not receipt.covers(owner, segment.base, segment.end)
    with pytest.raises(ForeignFile, match="other messages"):
        archive(older, tmp_path / "to")


def test_a_receipt_that_came_with_a_copy_of_the_directory_does_not_cover_what_it_stores_later(tmp_path: Path) -> None:
    data, older = tmp_path / "data", tmp_path / "older"
    send(data, b"one")
    shutil.copytree(data, older)
    send(data, b"two", b"three")
    archive(data, tmp_path / "to")
    for path in (data / "log-0").glob("*.receipt"):
        shutil.copy(path, older / "log-0")
    send(older, b"2")
    (segment,) = open_data_directory(older).segments
    receipt = read_receipt(Disk(), older / "log-0", segment.base)
    assert receipt is not None
    assert receipt.end > segment.end
    assert not receipt.covers(SegmentOwner(segment.store_id, 0), segment.base, segment.end)


@pytest.mark.parametrize("place", ["header", "data"])
def test_a_batch_that_has_rotten_since_is_the_same_one(tmp_path: Path, place: str) -> None:
    data = tmp_path / "data"
    sender = send(data, *[b"body" * 100] * 3)
    archive(data, tmp_path / "to")
    before = files_in(tmp_path / "to")
    sent = sender.sent[1]
    damage(data, sent, 30 if place == "header" else len(sent.data) - 1)
    for path in data.rglob("*.receipt"):
        path.unlink()
    done = archive(data, tmp_path / "to")
    assert (done.copied, done.kept, done.receipts) == (0, 1, 1)
    assert files_in(tmp_path / "to") == before
