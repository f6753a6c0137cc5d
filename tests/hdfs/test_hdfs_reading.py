"""Reading by hdfs-native: what Hadoop's client has written, and clear words where there is nothing."""

from __future__ import annotations

import pytest

from qmq.archive.hdfs_read import HdfsFiles
from qmq.archive.hdfs_write import WritableHdfsFiles
from qmq.errors import StorageFailed
from tests.hdfs.cluster import free_ports


def test_reads_what_was_written(tree: WritableHdfsFiles) -> None:
    data = bytes(range(256)) * 10_000  # some blocks
    tree.make_directory("a/größe b")
    tree.write("a/größe b/name", data)
    files = HdfsFiles(tree.name + "/")
    assert files.name == tree.name
    assert (files.names(""), files.names("a"), files.names("a/größe b")) == (["a"], ["größe b"], ["name"])
    assert files.names("nothing") == files.names("a/größe b/name") == []
    assert files.read_whole("a/größe b/name") == data
    file = files.open("a/größe b/name")
    assert (file.size(), file.is_near) == (len(data), False)
    for offset, size in ((0, 10), (1 << 20, 1), ((1 << 20) - 5, 10), (len(data) - 1, 9), (len(data), 1), (1 << 30, 1)):
        assert file.read(offset, size) == data[offset : offset + size]
    file.close()
    with pytest.raises(FileNotFoundError):
        files.open("nothing")
    files.close()
    assert files.names("") == ["a"]  # it connects again


def test_the_root_is_a_directory_as_others(tree: WritableHdfsFiles) -> None:
    address, _, directory = tree.name.rpartition("/")
    assert directory in HdfsFiles(address + "/").names("")


def test_nobody_there_is_said() -> None:
    (port,) = free_ports(1)
    with pytest.raises(StorageFailed, match=f"cannot list hdfs://127.0.0.1:{port}/a: .*check that HDFS runs"):
        HdfsFiles(f"hdfs://127.0.0.1:{port}/a").names("")
