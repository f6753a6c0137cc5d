"""An archive in HDFS: as one on a local disk, whenever a run is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq.archive.archive import manifests
from qmq.archive.data_directory import open_data_directory
from qmq.archive.files import LocalFiles
from qmq.archive.hdfs_read import HdfsFiles
from qmq.archive.hdfs_write import WritableHdfsFiles
from qmq.archive.lock import this_process
from qmq.errors import DirectoryInUse, StorageError
from tests.archive import archives
from tests.archive.orders import write_orders
from tests.hdfs.trees import Killed, MortalFiles, archive, beside, files_in, places, positions_in, write_large


def test_holds_what_a_local_one_holds(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    source, local = tmp_path / "data", LocalFiles(tmp_path / "archive")
    sent = write_orders(source, 100)
    archives.archive(source, tmp_path / "archive")
    done = archive(source, tree)
    assert (done.copied, done.receipts, done.kept) == (len(manifests(local)), done.copied, 0)
    files = HdfsFiles(tree.name)
    assert positions_in(files) == places(sent)
    assert sorted(files_in(files)) == sorted(files_in(local))
    for name in files_in(local):
        assert files.read_whole(name) == local.read_whole(name)
    again = archive(source, tree)
    assert (again.copied, again.kept, again.receipts) == (0, done.copied, 0)
    found = open_data_directory(source)
    assert {receipt.destination for segment in found.segments if (receipt := found.receipt(segment))} == {tree.name}
    for receipt in source.rglob("*.receipt"):
        receipt.unlink()
    verified = archive(source, tree)
    assert (verified.copied, verified.receipts) == (0, done.copied)


def test_two_at_once_are_refused(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    write_orders(tmp_path, 2)

    def meanwhile(_done: int, _total: int) -> None:
        with pytest.raises(DirectoryInUse, match=f"is held by {this_process()}"):
            archive(tmp_path, tree)

    assert archive(tmp_path, tree, this_process(), meanwhile).copied == 2


def test_killed_at_any_moment_and_repeated(connection: WritableHdfsFiles, tmp_path: Path) -> None:
    """After each step: what is there is whole, and the next run makes it as if nothing had happened."""
    sent = write_large(tmp_path, 2)
    whole, killed, leftovers = beside(connection), 0, 0
    archive(tmp_path, whole)
    expected = sorted(files_in(whole))
    for last in range(1_000):
        files = beside(connection)
        mortal: Any = MortalFiles(files, last)
        try:
            archive(tmp_path, mortal)
        except Killed:
            killed += 1
        else:
            break
        assert set(positions_in(files)) <= set(places(sent))
        leftovers += any("_" in name.rpartition("/")[2] for name in files_in(files))
        archive(tmp_path, files)
        assert sorted(files_in(files)) == expected
        assert positions_in(files) == places(sent)
    print(f"killed {killed} times, {leftovers} times with something left")
    assert killed > 8
    assert leftovers > 3


def test_a_copy_that_is_not_whole_is_made_again(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    write_orders(tmp_path, 30)
    archive(tmp_path, tree)
    path, manifest = manifests(tree)[0]
    tree.write(f"{path}.messages", bytes(manifest.messages_bytes))
    for receipt in tmp_path.rglob("*.receipt"):
        receipt.unlink()
    assert archive(tmp_path, tree).copied == 1
    assert tree.checksum(f"{path}.messages", lambda _: None) == (manifest.messages_bytes, manifest.messages_crc)


def test_a_wrong_copy_is_found_out(tree: WritableHdfsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what HDFS has is not what was read, nothing gets its name."""
    write_orders(tmp_path, 5)
    copy_in = tree.copy_in
    monkeypatch.setattr(tree, "copy_in", lambda *arguments: copy_in(*arguments) ^ 1)
    with pytest.raises(StorageError, match=f"in {tree.name} has .* bytes with checksum"):
        archive(tmp_path, tree)
    assert manifests(tree) == []
    assert list(tmp_path.rglob("*.receipt")) == []
