"""A tree in HDFS does what a local one does: what is written is whole and there, and what cannot be is said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from qmq.archive.files import COPY_BYTES, LocalFiles
from qmq.archive.hdfs_read import HdfsFiles
from qmq.archive.hdfs_write import WritableHdfsFiles, split_location
from qmq.errors import InvalidOption, StorageFailed
from tests.hdfs.cluster import Cluster
from tests.hdfs.trees import beside


def test_copies_in_pieces(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    data = bytes(range(256)) * (COPY_BYTES // 256) + b"rest"
    (tmp_path / "source").write_bytes(data + b"more")
    told: list[int] = []
    with LocalFiles(tmp_path).open("source") as source:
        assert tree.copy_in(source, len(data), "target", told.append) == crc32c(data)
    assert told == [COPY_BYTES, 4]
    assert tree.checksum("target", told.append) == (len(data), crc32c(data))
    assert told == [COPY_BYTES, 4]  # the DataNodes know the checksum
    assert HdfsFiles(tree.name).read_whole("target") == data


def test_a_source_that_has_no_name_any_more_is_copied_all_the_same(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"data")
    with LocalFiles(tmp_path).open("source") as source:
        (tmp_path / "source").unlink()
        tree.copy_in(source, 4, "target", lambda _: None)
    assert tree.read_whole("target") == b"data"


def test_a_source_that_ends_too_early_is_told_of(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"abc")
    with LocalFiles(tmp_path).open("source") as source, pytest.raises(StorageFailed, match="ends at 3 of 4 bytes"):
        tree.copy_in(source, 4, "target", lambda _: None)


class BreakingOff:
    """Copies as Hadoop's client does, and has closed what it writes to before some of its calls, counted from 1."""

    def __init__(self, tree: WritableHdfsFiles, *calls: int) -> None:
        self._copy: Any = tree._copy
        self._at = calls
        self.calls = 0

    def __call__(self, file: Any, stream: Any, *rest: Any) -> int:
        self.calls += 1
        if self.calls in self._at:
            stream.close()
        return int(self._copy(file, stream, *rest))


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_write_that_is_broken_off_is_done_again(tree: WritableHdfsFiles, tmp_path: Path, call: int) -> None:
    data = bytes(range(256)) * (2 * COPY_BYTES // 256) + b"rest"
    (tmp_path / "source").write_bytes(data)
    breaking, told = BreakingOff(tree, call), list[int]()
    other: Any = copy.copy(tree)
    other._copy = breaking
    with LocalFiles(tmp_path).open("source") as source:
        assert other.copy_in(source, len(data), "target", told.append) == crc32c(data)
    assert breaking.calls == call + 3
    assert sum(told) == len(data), "nothing is told of twice"
    assert tree.checksum("target", told.append) == (len(data), crc32c(data))


def test_a_write_that_is_broken_off_twice_ends(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    data = b"data" * 300_000
    breaking = BreakingOff(tree, 1, 2)
    other: Any = copy.copy(tree)
    other._copy = breaking
    with pytest.raises(StorageFailed, match=r"cannot write .*target: ClosedChannelException.*run this again"):
        other.write("target", data)
    assert breaking.calls == 2


@pytest.mark.parametrize("size", [0, 1, 64 << 10, (64 << 10) + 1, 300_000])
def test_writes_what_it_is_given(tree: WritableHdfsFiles, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    tree.write("name", b"before")
    tree.write("name", data[:size])
    assert tree.read_whole("name") == data[:size]
    assert tree.checksum("name", lambda _: None) == (size, crc32c(data[:size]))


def test_one_of_two_claims_a_name(tree: WritableHdfsFiles) -> None:
    assert tree.claim("name", b"first")
    assert not tree.claim("name", b"second")
    assert tree.names("") == ["name"]
    assert tree.read_whole("name") == b"first"
    tree.remove("name")
    tree.remove("name")
    assert tree.claim("name", b"second")


def test_renames_onto_what_is_there(tree: WritableHdfsFiles) -> None:
    tree.make_directory("a/größe b")
    tree.write("a/größe b/new", b"new")
    tree.write("a/größe b/old", b"old")
    tree.write("a/x", b"")
    tree.rename("a/größe b/new", "a/größe b/old")
    assert tree.names("a") == ["größe b", "x"]
    assert tree.names("a/größe b") == ["old"]
    assert tree.read_whole("a/größe b/old") == b"new"
    assert tree.names("nothing") == tree.names("a/x") == []


def test_what_is_not_there_is_said(tree: WritableHdfsFiles) -> None:
    with pytest.raises(FileNotFoundError):
        tree.open("nothing")
    with pytest.raises(FileNotFoundError):
        tree.checksum("nothing", lambda _: None)
    with pytest.raises(StorageFailed, match=f"cannot rename {tree.name}/nothing: .*run this again"):
        tree.rename("nothing", "b")
    with pytest.raises(StorageFailed, match=f"cannot write {tree.name}/nothing/a: .*run this again"):
        tree.write("nothing/a", b"")
    tree.write("file", b"")
    with pytest.raises(StorageFailed, match=f"cannot make the directory {tree.name}/file/a: .*is not a directory"):
        tree.make_directory("file/a")


def test_reads_by_ranges(tree: WritableHdfsFiles) -> None:
    tree.write("name", b"0123456789")
    file = tree.open("name")
    assert (file.size(), file.is_near) == (10, False)
    assert (file.read(2, 3), file.read(8, 9), file.read(10, 1), file.read(99, 1)) == (b"234", b"89", b"", b"")
    file.close()
    large = bytes(range(256)) * (COPY_BYTES // 128) + b"rest"
    tree.write("large", large)
    assert tree.read_whole("large") == large


def test_files_with_another_checksum_are_read_back(
    hdfs: Cluster, connection: WritableHdfsFiles, tmp_path: Path
) -> None:
    """Of crc32 HDFS makes no crc32c."""
    data = bytes(range(256)) * (COPY_BYTES // 256) + b"rest"
    (tmp_path / "source").write_bytes(data)
    told: list[int] = []
    tree = beside(connection, hdfs, dfs_checksum_type="CRC32")
    with LocalFiles(tmp_path).open("source") as source:
        tree.copy_in(source, len(data), "target", lambda _: None)
    assert tree.checksum("target", told.append) == (len(data), crc32c(data))
    assert told == [COPY_BYTES, 4]


def test_a_check_that_is_broken_off_is_done_again(connection: WritableHdfsFiles, hdfs: Cluster) -> None:
    data = b"data" * 300_000
    tree: Any = beside(connection, hdfs, dfs_checksum_type="CRC32")
    tree.write("target", data)
    breaking = tree._copy = BreakingOff(tree, 1)
    assert tree.checksum("target", lambda _: None) == (len(data), crc32c(data))
    assert breaking.calls == 2


def test_places_in_hdfs() -> None:
    assert split_location("hdfs://host:8020/a//b/") == ("hdfs://host:8020", "/a/b")
    assert split_location("hdfs://cluster/") == ("hdfs://cluster", "/")
    assert split_location("hdfs:///a") == ("hdfs://", "/a")
    with pytest.raises(InvalidOption, match="hdfs://host has no path"):
        split_location("hdfs://host")
    for bad in ("hdfs://host/../a", "hdfs://host/a:b"):
        with pytest.raises(InvalidOption, match="a name that HDFS does not allow"):
            split_location(bad)
