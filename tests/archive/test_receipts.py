"""Receipts: one beside each segment whose copy was verified, and beside no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.archive.archive import manifests
from qmq.archive.data_directory import open_data_directory
from qmq.archive.files import LocalFiles
from qmq.archive.lock import ArchiveLock, this_process
from qmq.archive.write import archive_segments
from qmq.errors import BadBytes
from qmq.storage.message_log.archive_receipt import ArchiveReceipt
from tests.archive.archives import NOW_US, archive, files_in
from tests.archive.orders import write_orders
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, close_cleanly, open_store, verified


def receipts_of(source: Path) -> list[ArchiveReceipt | None]:
    """Return the receipts of a directory by segment."""
    found = open_data_directory(source)
    return [found.receipt(segment) for segment in found.segments]


def test_every_archived_segment_gets_one(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 60)
    done = archive(source, to)
    told = {(manifest.partition, manifest.base): manifest for _, manifest in manifests(LocalFiles(to))}
    assert done.receipts == len(told) > 2
    for receipt in receipts_of(source):
        assert receipt is not None
        manifest = told[receipt.partition, receipt.base]
        assert (receipt.store_id, receipt.end) == (manifest.store_id, manifest.end)
        assert (receipt.messages_bytes, receipt.messages_crc) == (manifest.messages_bytes, manifest.messages_crc)
        assert (receipt.destination, receipt.verified_at_us) == (str(to), NOW_US)
    assert archive(source, to).receipts == 0
    verified(source)


def test_what_a_broker_still_writes_gets_none(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    store = open_store(source)
    sender = Sender(store)
    for _ in range(30):
        sender.send("a", *[b"body" * 50] * 10)
    archive(source, to)
    assert [receipt is not None for receipt in receipts_of(source)][-2:] == [True, False]
    close_cleanly(store)
    archive(source, to)
    assert None not in receipts_of(source)
    store = open_store(source)
    sender = Sender(store)
    sender.send("a", b"more")
    close_cleanly(store)
    assert receipts_of(source)[-1] is None  # it has gone on
    archive(source, to)
    assert None not in receipts_of(source)
    verified(source)


def test_one_that_is_gone_or_rotten_is_written_again_once_the_copy_was_verified(tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 60)
    archive(source, to)
    before, receipts = files_in(to), sorted(source.rglob("*.receipt"))
    receipts[0].unlink()
    receipts[1].write_bytes(b"{}")
    done = archive(source, to)
    assert (done.copied, done.receipts) == (0, 2)
    assert None not in receipts_of(source)
    assert files_in(to) == before


@pytest.mark.parametrize("suffix", [".messages", ".index", ".keys"])
@pytest.mark.parametrize("how", ["rotten", "gone"])
def test_a_copy_that_is_not_whole_any_more_is_made_again(tmp_path: Path, suffix: str, how: str) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 60)
    archive(source, to)
    before = files_in(to)
    path = sorted(to.rglob(f"*{suffix}"))[0]
    if how == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    for receipt in source.rglob("*.receipt"):
        receipt.unlink()
    done = archive(source, to)
    assert (done.copied, done.receipts) == (1, len(receipts_of(source)))
    assert files_in(to) == before


def test_another_archive_gets_receipts_of_its_own(tmp_path: Path) -> None:
    source = tmp_path / "data"
    write_orders(source, 20)
    archive(source, tmp_path / "first")
    archive(source, tmp_path / "second")
    assert {receipt.destination for receipt in receipts_of(source) if receipt} == {str(tmp_path / "second")}
    archive(source, tmp_path / "first")
    assert {receipt.destination for receipt in receipts_of(source) if receipt} == {str(tmp_path / "first")}


@pytest.mark.parametrize("suffix", [".messages", ".index", ".keys"])
def test_a_copy_that_differs_is_found_out_before_it_gets_its_name(tmp_path: Path, suffix: str) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    write_orders(source, 20)
    disk = FakeDisk()
    disk.flips = suffix
    with pytest.raises(BadBytes, match=rf"_.*{suffix} in .* has .* bytes with checksum .*run it again"):
        archive(source, to, disk)
    assert manifests(LocalFiles(to)) == []
    assert list(source.rglob("*.receipt")) == []
    archive(source, to)
    assert None not in receipts_of(source)


def test_what_retention_drops_meanwhile_is_counted(tmp_path: Path) -> None:
    """Dropped before the run comes to it: with its index, without, and while the archive is read."""
    source = tmp_path / "data"
    write_orders(source, 60)
    found = open_data_directory(source)
    indexed = [segment for segment in found.segments if segment.index_path is not None]
    scanned = [segment for segment in found.segments if segment.index_path is None]
    for gone in (indexed[0], scanned[0]):
        (source / gone.path).unlink()
        (source / gone.path).with_suffix(".index").unlink()
    files = LocalFiles(tmp_path / "archive")
    files.make_directory("")
    with ArchiveLock(files, lambda: NOW_US, this_process()) as lock:
        done = archive_segments(found, files, lock, lambda: NOW_US)
    assert (done.dropped, done.copied) == (2, len(found.segments) - 2)
    assert archive(source, tmp_path / "archive").dropped == 0


def test_a_segment_that_is_dropped_meanwhile_gets_none(tmp_path: Path) -> None:
    source = tmp_path / "data"
    write_orders(source, 20)
    found = open_data_directory(source)
    archive(source, tmp_path / "archive")
    receipt = found.receipt(found.segments[0])
    assert receipt is not None
    (source / found.segments[0].path).unlink()
    for path in source.rglob("*.receipt"):
        path.unlink()
    found.write_receipt(found.segments[0], receipt)
    assert list(source.rglob("*.receipt")) == []
