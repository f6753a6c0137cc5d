"""Trees of the tests' HDFS. Java takes a second to start: tests that break nothing share one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from qmq.archive.archive import archived_segments
from qmq.archive.data_directory import open_data_directory
from qmq.archive.files import Files, WritableFiles
from qmq.archive.hdfs_write import WritableHdfsFiles
from qmq.archive.lock import ArchiveLock, LockOwner
from qmq.archive.write import Archived, archive_segments
from qmq.errors import StorageFailed
from tests.archive.archives import GONE, NOW_US
from tests.hdfs.cluster import Cluster
from tests.storage.stores import Sender, Sent, close_cleanly, open_store

#: Of these tests' segments, so that each is copied in some pieces.
SEGMENT_BYTES: Final = 10 << 20
_BODY: Final = bytes(range(256)) * 2_000


def connected(hdfs: Cluster) -> WritableHdfsFiles:
    """A new tree, with a Java process of its own."""
    return WritableHdfsFiles(f"{hdfs.address}/{uuid4().hex}", hdfs.settings)


def beside(tree: WritableHdfsFiles, hdfs: Cluster | None = None, **settings: str) -> WritableHdfsFiles:
    """An empty tree of the same Java process; in another HDFS, or with other settings (`a__b_c` is a-b.c)."""
    other: Any = copy.copy(tree)
    if hdfs is not None:
        other.name = f"{hdfs.address}/"
        named = {name.replace("__", "-").replace("_", "."): value for name, value in settings.items()}
        try:
            other._fs = tree._hadoop.open(other.name, {**hdfs.settings, **named})
        except StorageFailed:  # Java has kept a connection to a NameNode that was killed: now it has seen that
            other._fs = tree._hadoop.open(other.name, {**hdfs.settings, **named})
    other._root = f"/{uuid4().hex}"
    other.name = other.name.rpartition("/")[0] + other._root
    other.make_directory("")
    return other  # type: ignore[no-any-return]


def at(tree: WritableHdfsFiles, path: str) -> WritableHdfsFiles:
    """Another tree of the same HDFS."""
    other: Any = copy.copy(tree)
    other._root = f"/{path}"
    other.name = tree.name.rpartition("/")[0] + other._root
    return other  # type: ignore[no-any-return]


def write_large(directory: Path, count: int) -> list[Sent]:
    """A stopped store of so many batches of half a megabyte each, in segments of 10 MB."""
    store = open_store(directory, segment_bytes=SEGMENT_BYTES, max_frame_bytes=1 << 20)
    sender = Sender(store)
    for _ in range(count):
        sender.send("a", _BODY)
    close_cleanly(store)
    return sender.sent


def archive(source: Path, files: WritableFiles, owner: LockOwner = GONE, progress: Any = None) -> Archived:
    """One run; it may be killed, as that of a process that has ended."""
    with ArchiveLock(files, lambda: NOW_US, owner) as lock:
        return archive_segments(open_data_directory(source), files, lock, lambda: NOW_US, progress)


def positions_in(files: Files) -> list[tuple[int, int]]:
    """(partition, position) of all batches of an archive."""
    return [
        (segment.partition, position)
        for segment in archived_segments(files)
        for position in segment.batches(files)["position"].tolist()
    ]


def places(sent: list[Sent]) -> list[tuple[int, int]]:
    return sorted((batch.partition, batch.position) for batch in sent)


def files_in(files: Files, path: str = "") -> Iterator[str]:
    """Paths of all files of a tree."""
    for name in files.names(path):
        below = f"{path}/{name}" if path else name
        found = list(files_in(files, below))
        yield from found or [below]


class Killed(BaseException):
    """The process is no more."""


class MortalFiles:
    """A tree whose process ends with the nth call that changes something."""

    def __init__(self, files: WritableHdfsFiles, last: int) -> None:
        self._files = files
        self._left = last

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if name not in ("make_directory", "write", "copy_in", "rename", "remove", "claim"):
            return found
        return lambda *arguments: self._step(found, *arguments)

    def _step(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._left <= 0:
            raise Killed
        self._left -= 1
        return function(*arguments)
