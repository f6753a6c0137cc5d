"""One partition brought up to its end: rows made again, and what is told of what was found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qmq.errors import StorageError
from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.consumer_log.rebuild import Damaged
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.segment import SegmentOwner
from qmq.storage.meta.checkpoint import list_checkpoints, read_checkpoint
from qmq.storage.meta.identity import read_copies
from qmq.storage.meta.subjects import SubjectTable
from qmq.storage.recovery.decide import Tail
from qmq.storage.recovery.replay import PartitionReplay
from qmq.storage.types import Hole
from tests.fake_disk import FakeDisk
from tests.storage.stores import (
    Sender,
    checkpoint,
    damage,
    file_of,
    kill,
    open_store,
    segment_files,
)

SEGMENT_BYTES = 64 << 10


def store_with(path: Path, before: int = 60, after: int = 40) -> Sender:
    sender = Sender(open_store(path, FakeDisk()))
    for number in range(before + after):
        if number == before:
            checkpoint(sender.store)
        sender.send(f"s.{number % 5}", b"x" * 3_000)
    if not after:
        checkpoint(sender.store)
    kill(sender.store)
    return sender


class Replayed:
    """A partition opened by hand, without a store around it."""

    def __init__(self, path: Path, *, claimed: bool = True, disk: Disk | None = None) -> None:
        disk = disk if disk is not None else FakeDisk()
        identity = read_copies(disk, path)[0].identity
        assert identity is not None
        claims = read_checkpoint(disk, path, list_checkpoints(disk, path)[0]).claims
        assert claims is not None
        length = claims.subjects.length_bytes if claimed else None
        self.subjects = SubjectTable.open(disk, path / "subjects", identity.store_id, length)
        self.consumer = ConsumerLog.open(disk, path / "consumer-log" / "0", 0, identity.store_id)
        self.identity = identity.partitions[0]
        self.replay = PartitionReplay(
            disk,
            path / "log-0",
            SegmentOwner(identity.store_id, 0),
            identity.secret,
            self.consumer,
            self.subjects,
            claims.partitions[0] if claimed else None,
            self.identity.floor,
        )

    def close(self) -> None:
        self.consumer.close()
        self.subjects.close()


def test_only_what_the_checkpoint_does_not_know_is_read(tmp_path: Path) -> None:
    sender = store_with(tmp_path)
    opened = Replayed(tmp_path)
    opened.replay.load()
    assert opened.consumer.end_row == 60
    assert opened.replay.claimed == sender.sent[59].position + len(sender.sent[59].data)
    assert opened.replay.read_tail(SEGMENT_BYTES, rewrite=True) is Tail.WHOLE
    report = opened.replay.report
    assert (report.replayed_batches, report.replayed_messages, report.rebuilt_bytes) == (40, 40, 0)
    assert report.rewritten_bytes == sum(len(sent.data) for sent in sender.sent[60:])
    assert opened.consumer.end_row == 100
    assert opened.replay.end == sender.sent[-1].position + len(sender.sent[-1].data)
    opened.close()


def test_without_a_checkpoint_everything_is_read(tmp_path: Path) -> None:
    store_with(tmp_path)
    opened = Replayed(tmp_path, claimed=False)
    opened.replay.load()
    assert opened.consumer.end_row == 0
    assert opened.replay.read_tail(SEGMENT_BYTES, rewrite=False) is Tail.WHOLE
    assert opened.replay.report.replayed_batches == opened.consumer.end_row == 100
    assert opened.replay.report.rewritten_bytes == 0
    opened.close()


@pytest.mark.parametrize(("offset", "tail"), [(-1, Tail.HOLES), (30, Tail.HOLES | Tail.BLIND)], ids=["data", "header"])
def test_what_is_told_of_a_bad_batch(tmp_path: Path, offset: int, tail: Tail) -> None:
    sender = store_with(tmp_path)
    bad = sender.sent[70]
    damage(tmp_path, bad, offset % len(bad.data))
    opened = Replayed(tmp_path)
    opened.replay.load()
    assert opened.replay.read_tail(SEGMENT_BYTES, rewrite=True) == tail
    assert opened.replay.report.holes == [Hole(bad.position, bad.position + len(bad.data))]
    ((_, first, count),) = bad.runs
    known = [] if Tail.BLIND in tail else [Damaged(0, first, first + count)]
    assert opened.replay.damaged == known
    assert opened.replay.blind_bytes == (len(bad.data) if Tail.BLIND in tail else 0)
    opened.close()


def test_a_log_that_ends_before_the_checkpoint_is_short(tmp_path: Path) -> None:
    sender = store_with(tmp_path, after=0, before=10)
    file, start = file_of(tmp_path, sender.sent[7])
    with file.open("r+b") as opened_file:
        opened_file.truncate(start)
    opened = Replayed(tmp_path)
    opened.replay.load()
    assert opened.replay.read_tail(SEGMENT_BYTES, rewrite=True) == Tail.SHORT | Tail.SEVERED
    end = sender.sent[-1].position + len(sender.sent[-1].data)
    assert opened.replay.report.damaged == [Hole(sender.sent[7].position, end)]
    opened.close()


def test_rows_of_a_segment_are_read_again_as_they_were(tmp_path: Path) -> None:
    sender = store_with(tmp_path)
    opened = Replayed(tmp_path)
    opened.replay.load()
    opened.replay.read_tail(SEGMENT_BYTES, rewrite=False)
    opened.consumer.publish(2**63)
    base = int(segment_files(tmp_path)[1].stem, 16)
    end = int(segment_files(tmp_path)[2].stem, 16)
    again = [row for piece in opened.replay.reread(base, end) for row in np.atleast_1d(piece).tolist()]
    inside = [number for number, sent in enumerate(sender.sent) if base <= sent.position < end]
    assert again == opened.consumer.rows(inside[0], len(inside)).tolist()
    opened.close()


def test_it_goes_on_where_the_log_ends_or_at_the_floor(tmp_path: Path) -> None:
    store_with(tmp_path)
    for jump in (0, 1 << 20):
        opened = Replayed(tmp_path)
        opened.replay.load()
        opened.replay.read_tail(SEGMENT_BYTES, rewrite=True)
        end = opened.replay.end
        floor = end + jump if jump else opened.identity.floor
        log = opened.replay.finish(
            floor=floor, reserve=end + (1 << 22), segment_bytes=SEGMENT_BYTES, now_us=5, sync=True
        )
        assert log.end == (floor + 64 if jump else end)
        assert log.synced == log.end
        assert log.reserve == end + (1 << 22)
        assert [span.base for span in log.spans()] == [int(file.stem, 16) for file in segment_files(tmp_path)]
        log.close()
        opened.close()


def test_everything_is_on_disk_when_it_is_finished(tmp_path: Path) -> None:
    path, lost = tmp_path / "a", tmp_path / "b"
    store_with(path)
    disk = FakeDisk("boot-1")
    disk.track(path)
    opened = Replayed(path, disk=disk)
    opened.replay.load()
    opened.replay.read_tail(SEGMENT_BYTES, rewrite=True)
    claimed = opened.replay.claimed
    log = opened.replay.finish(floor=0, reserve=2**62, segment_bytes=SEGMENT_BYTES, now_us=5, sync=True)
    disk.without_power(path, lost)
    for file, copy in zip(segment_files(path), segment_files(lost), strict=True):
        start = max(0, claimed - int(file.stem, 16))
        end = min(log.end - int(file.stem, 16), file.stat().st_size)
        if start < end:
            assert copy.read_bytes()[start:end] == file.read_bytes()[start:end]
    log.close()
    opened.close()


def test_no_segment_of_all_is_a_disk_that_is_not_there(tmp_path: Path) -> None:
    store_with(tmp_path)
    for file in segment_files(tmp_path):
        file.unlink()
    opened = Replayed(tmp_path)
    with pytest.raises(StorageError, match="is its disk mounted"):
        opened.replay.load()
    opened.close()
