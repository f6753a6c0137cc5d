"""Open the tree of files that a location of a user names: a path, file:// or hdfs://."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from qmq.archive.files import Files, LocalFiles, WritableFiles, local_path
from qmq.archive.hdfs_read import HdfsFiles
from qmq.archive.hdfs_write import WritableHdfsFiles, is_hdfs
from qmq.errors import InvalidOption
from qmq.net.client.address import shown_location


def files_at(location: str) -> Files:
    """Return the tree to read from. Raises InvalidOption, StorageFailed."""
    if is_hdfs(location):
        return HdfsFiles(location)
    path = local_path(location)
    if path is None:
        raise _strange(location)
    return LocalFiles(path.absolute())


@contextmanager
def writable_files_at(location: str, settings: Mapping[str, str] | None = None) -> Iterator[WritableFiles]:
    """Yield the tree to write to; *settings* are Hadoop's. Raises InvalidOption, StorageFailed."""
    if is_hdfs(location):
        with WritableHdfsFiles(location, settings) as files:
            yield files
        return
    path = local_path(location)
    if path is None:
        raise _strange(location)
    yield LocalFiles(path.absolute())


def _strange(location: str) -> InvalidOption:
    return InvalidOption(
        f"{shown_location(location)} is no known kind of location; give a path of this machine, file:// or hdfs://"
    )
