"""Receipts beside segments: read as written, valid for one segment only, and known as files of QMQ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qmq.errors import BadBytes, ForeignFile, StorageFailed, StorageFull
from qmq.storage.disk.checksummed_json import pack_json
from qmq.storage.message_log.archive_receipt import ArchiveReceipt, read_receipt, receipt_path, write_receipt
from qmq.storage.message_log.segment import SegmentOwner, base_of
from qmq.storage.verify.repair import repair
from tests.fake_disk import FakeDisk
from tests.storage.stores import NOW_US, Sender, close_cleanly, open_store, segment_files, verified
from tests.storage.verify.test_verify import notes

STORE = bytes.fromhex("7f0000015191")
MADE = ArchiveReceipt(STORE.hex(), 3, 1 << 60, (1 << 60) + 1_000, 1_000, 0xFFFF_FFFF, "hdfs://host:8020/qmq", NOW_US)


def test_written_and_read_again(tmp_path: Path) -> None:
    disk = FakeDisk()
    assert read_receipt(disk, tmp_path, MADE.base) is None
    write_receipt(disk, tmp_path, MADE)
    assert read_receipt(disk, tmp_path, MADE.base) == MADE
    longer = replace(MADE, end=MADE.end + 1)
    write_receipt(disk, tmp_path, longer)
    assert read_receipt(disk, tmp_path, MADE.base) == longer
    assert [path.name for path in tmp_path.iterdir()] == ["1000000000000000.receipt"]


def test_is_about_one_segment_up_to_its_very_end() -> None:
    owner = SegmentOwner(STORE, 3)
    assert MADE.covers(owner, MADE.base, MADE.end)
    assert not MADE.covers(owner, MADE.base, MADE.end - 1), "it is of other bytes"
    assert not MADE.covers(owner, MADE.base, MADE.end + 1)
    assert not MADE.covers(owner, MADE.base + 1, MADE.end)
    assert not MADE.covers(SegmentOwner(STORE, 4), MADE.base, MADE.end)
    assert not MADE.covers(SegmentOwner(bytes(6), 3), MADE.base, MADE.end)
    assert not replace(MADE, destination="").covers(owner, MADE.base, MADE.end)


def test_bytes_that_are_no_receipt_are_refused(tmp_path: Path) -> None:
    path = receipt_path(tmp_path, MADE.base)
    write_receipt(FakeDisk(), tmp_path, MADE)
    packed = path.read_bytes()
    for at in range(len(packed) - 1):
        path.write_bytes(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])
        with pytest.raises(BadBytes, match=f"{path} .*the next run of qmq archive"):
            read_receipt(FakeDisk(), tmp_path, MADE.base)
    for content in ({}, {**vars(MADE), "store_id": "7f"}, {**vars(MADE), "end": "1"}):
        path.write_bytes(pack_json(1, content))
        with pytest.raises(BadBytes, match="is no receipt"):
            read_receipt(FakeDisk(), tmp_path, MADE.base)
    path.write_bytes(pack_json(2, vars(MADE)))
    with pytest.raises(ForeignFile, match="version 2"):
        read_receipt(FakeDisk(), tmp_path, MADE.base)


def test_a_failed_write_is_named_and_leaves_the_old_receipt(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    write_receipt(disk, tmp_path, MADE)
    for operation in ("pwritev", "fsync", "rename"):
        disk.fail(operation)
        with pytest.raises((StorageFull, StorageFailed), match="receipt"):
            write_receipt(disk, tmp_path, replace(MADE, end=0))
        assert read_receipt(disk, tmp_path, MADE.base) == MADE
    disk.fail("pread")
    with pytest.raises(StorageFailed, match="cannot read"):
        read_receipt(disk, tmp_path, MADE.base)
    assert disk.still_open() == []


def test_receipts_beside_segments_disturb_nothing(tmp_path: Path) -> None:
    """A start, a broker, verify and repair leave receipts alone; a rotten one is noted, and is no fault."""
    store = open_store(tmp_path)
    sender = Sender(store)
    for _ in range(30):
        sender.send("a", *[b"body" * 50] * 10)
    for path in segment_files(tmp_path):
        base = base_of(path.name)
        assert base is not None
        write_receipt(FakeDisk(), path.parent, replace(MADE, store_id=store.store_id.hex(), partition=0, base=base))
    for _ in range(30):
        sender.send("a", *[b"body" * 50] * 10)
    close_cleanly(store)
    receipts = sorted((tmp_path / "log-0").glob("*.receipt"))
    assert len(receipts) > 1
    verified(tmp_path)
    assert notes(tmp_path) == []
    repair(tmp_path, FakeDisk(), NOW_US)
    close_cleanly(open_store(tmp_path))
    assert sorted((tmp_path / "log-0").glob("*.receipt")) == receipts
    receipts[0].write_bytes(b"{}")
    receipts[1].with_name(receipts[1].name + ".tmp").write_bytes(b"")
    rotten, left = notes(tmp_path)
    assert "is no receipt, or a rotten one" in rotten
    assert "was left by a write that was interrupted" in left
