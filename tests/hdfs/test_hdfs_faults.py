"""HDFS breaks while something is archived: each time that ends well, or with a clear error and nothing half visible."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qmq.archive.archive import archived_segments
from qmq.archive.hdfs_read import HdfsFiles
from qmq.archive.hdfs_write import WritableHdfsFiles
from qmq.archive.lock import ArchiveLock, this_process
from qmq.errors import DirectoryInUse, StorageError, StorageFailed, StorageFull
from tests.hdfs.cluster import TIMEOUT_S, Cluster
from tests.hdfs.trees import archive, at, beside, files_in, places, positions_in, write_large
from tests.storage.stores import Sent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Sent]]:
    """Three segments of ten megabytes, and one of a few."""
    directory = tmp_path_factory.mktemp("large") / "data"
    return directory, write_large(directory, 65)


class Fault:
    """Happens once, when so many bytes have been copied."""

    def __init__(self, at_bytes: int, *actions: Callable[[], None]) -> None:
        self._at_bytes = at_bytes
        self._actions = actions
        self.struck = 0

    def __call__(self, done: int, _total: int) -> None:
        if done >= self._at_bytes and not self.struck:
            self.struck += 1
            for action in self._actions:
                action()


@contextmanager
def healed(hdfs: Cluster) -> Iterator[None]:
    """However it goes, the next test has it whole."""
    try:
        yield
    finally:
        hdfs.heal()


def check_nothing_is_half_visible(place: str, sent: list[Sent]) -> None:
    """What a reader sees is whole, and was sent."""
    files, by_position = HdfsFiles(place), {batch.position: batch.data for batch in sent}
    for segment in archived_segments(files):
        data = files.read_whole(segment.path)
        for position in segment.batches(files)["position"].tolist():
            assert data[position - segment.base :].startswith(by_position[position])


def test_datanodes_are_killed(hdfs: Cluster, connection: WritableHdfsFiles, source: tuple[Path, list[Sent]]) -> None:
    """One is left for the other; without any the run ends."""
    directory, sent = source
    first, last = Fault(6 << 20, lambda: hdfs.kill_datanode(0)), Fault(6 << 20, lambda: hdfs.kill_datanode(1))
    with healed(hdfs):
        tree = beside(connection)
        done = archive(directory, tree, progress=first)
        assert done.receipts == done.copied == 4
        assert positions_in(HdfsFiles(tree.name)) == places(sent)
        # Without it each of the reads that find no DataNode waits for 12 to 23 s before it gives up.
        other = beside(connection, hdfs, dfs_client_retry_window_base="50")
        with pytest.raises(StorageError, match="run this again"):
            archive(directory, other, progress=last)
    check_nothing_is_half_visible(tree.name, sent)
    check_nothing_is_half_visible(other.name, sent)
    archive(directory, other)
    assert positions_in(HdfsFiles(other.name)) == places(sent)
    print(f"the first DataNode was killed {first.struck} times, the last one {last.struck} times")
    assert (first.struck, last.struck) == (1, 1)


def test_a_datanode_stands_still(hdfs: Cluster, connection: WritableHdfsFiles, source: tuple[Path, list[Sent]]) -> None:
    """It is left for the other, or the run ends and says so: which of the two is not for the client to know. It takes
    the time that `dfs.client.socket-timeout` says, and 5 s for each DataNode.
    """
    directory, sent = source
    fault = Fault(6 << 20, lambda: hdfs.freeze_datanode(0, frozen=True))
    with healed(hdfs):
        tree = beside(connection, hdfs, dfs_client_socket__timeout="500")
        try:
            with archiving(StorageFailed, StorageFull):
                archive(directory, tree, progress=fault)
        finally:
            hdfs.freeze_datanode(0, frozen=False)
    check_nothing_is_half_visible(tree.name, sent)
    archive(directory, tree)
    assert positions_in(HdfsFiles(tree.name)) == places(sent)
    print(f"a DataNode was frozen {fault.struck} times")
    assert fault.struck == 1


def test_the_namenode_is_restarted(
    hdfs: Cluster, connection: WritableHdfsFiles, source: tuple[Path, list[Sent]]
) -> None:
    directory, sent = source
    fault = Fault(6 << 20, hdfs.kill_namenode, hdfs.start_namenode)
    with healed(hdfs):
        tree = beside(connection, hdfs, dfs_client_retry_policy_spec="500,400")
        archive(directory, tree, progress=fault)
    check_nothing_is_half_visible(tree.name, sent)
    assert positions_in(HdfsFiles(tree.name)) == places(sent)
    print(f"the NameNode was restarted {fault.struck} times")
    assert fault.struck == 1


def test_the_namenode_is_gone(hdfs: Cluster, connection: WritableHdfsFiles, source: tuple[Path, list[Sent]]) -> None:
    directory, sent = source
    fault = Fault(6 << 20, hdfs.kill_namenode)
    with healed(hdfs):
        tree = beside(connection, hdfs, dfs_client_retry_policy_spec="50,5")
        with pytest.raises(StorageFailed, match="check that HDFS runs"):
            archive(directory, tree, progress=fault)
    check_nothing_is_half_visible(tree.name, sent)
    archive(directory, tree)
    assert positions_in(HdfsFiles(tree.name)) == places(sent)
    print(f"the NameNode was killed {fault.struck} times")
    assert fault.struck == 1


def test_a_quota_is_reached(tree: WritableHdfsFiles, source: tuple[Path, list[Sent]]) -> None:
    directory, sent = source
    set_quota(tree, 40 << 20)  # both copies count
    with pytest.raises(StorageFull, match=r"DiskSpace quota .*raise the quota"):
        archive(directory, tree)
    check_nothing_is_half_visible(tree.name, sent)
    assert 0 < len(positions_in(HdfsFiles(tree.name))) < len(sent)
    set_quota(tree, -1)
    archive(directory, tree)
    assert positions_in(HdfsFiles(tree.name)) == places(sent)


def set_quota(tree: WritableHdfsFiles, size: int) -> None:
    """So many bytes may lie in a tree; -1: any number."""
    tree._fs.setQuota(tree._path(""), (1 << 63) - 1, size)


def test_a_disk_is_full(connection: WritableHdfsFiles, source: tuple[Path, list[Sent]], tmp_path: Path) -> None:
    """And takes data again when there is room."""
    directory, sent = source
    with Cluster(tmp_path, datanodes=1, disk_bytes=48 << 20) as hdfs:
        tree = beside(connection, hdfs)
        tree.write("other", bytes(30 << 20))
        with pytest.raises((StorageFull, StorageFailed), match="make room in HDFS"):  # the latter: in mid-block
            archive(directory, tree)
        check_nothing_is_half_visible(tree.name, sent)
        tree.remove("other")
        while len(positions_in(HdfsFiles(tree.name))) < len(sent):  # the DataNode takes its time to remove it
            with archiving(StorageFull, StorageFailed):
                archive(directory, tree)
        assert positions_in(HdfsFiles(tree.name)) == places(sent)


@contextmanager
def archiving(*kinds: type[StorageError]) -> Iterator[None]:
    """A run that may end with such an error."""
    try:
        yield
    except kinds as error:
        print(error)


_ARCHIVER = """
import json, sys, time
from pathlib import Path
from qmq.archive.write import archive_to
print("ready", flush=True)
archive_to(
    Path(sys.argv[1]), sys.argv[2], lambda: time.time_ns() // 1_000, settings=json.loads(sys.argv[3]),
    progress=lambda done, total: print(done, flush=True),
)
"""


def test_the_archiver_is_killed(
    hdfs: Cluster, connection: WritableHdfsFiles, source: tuple[Path, list[Sent]], tmp_path: Path
) -> None:
    """kill -9, at the first piece or later, and again: the last run finds what all have done. There are ten pieces, and
    the last one is begun when the first segment is in place.
    """
    directory, sent = source
    place, killed, copied = f"{hdfs.address}/{tmp_path.name}", 0, set[int]()
    command: list[Any] = [sys.executable, "-c", _ARCHIVER, directory, place, json.dumps(hdfs.settings)]
    for pieces in (1, 10):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(1 + pieces)]
            process.kill()
            killed += bool(lines[-1])
        check_nothing_is_half_visible(place, sent)
        copied.add(len(positions_in(HdfsFiles(place))))
    print(f"killed {killed} times; by then were there {sorted(copied)} of {len(sent)} batches")
    assert killed == 2
    assert len(copied) > 1
    archive(directory, at(connection, tmp_path.name), this_process())
    assert positions_in(HdfsFiles(place)) == places(sent)
    assert not [name for name in files_in(HdfsFiles(place)) if name.rpartition("/")[2].startswith("_")]


_SLOW_ARCHIVER = """
import json, sys, time
from pathlib import Path
from qmq.archive.write import archive_to

def wait(done, total):
    if not asked:
        asked.append(print("copying", flush=True))
        sys.stdin.readline()

asked = []
settings = json.loads(sys.argv[3])
archive_to(Path(sys.argv[1]), sys.argv[2], lambda: time.time_ns() // 1_000, settings=settings, progress=wait)
"""


def test_of_two_archivers_one_is_refused(
    hdfs: Cluster, connection: WritableHdfsFiles, source: tuple[Path, list[Sent]], tmp_path: Path
) -> None:
    """Two processes: the second ends, and says who is at it; the first goes on as if nothing had been."""
    directory, sent = source
    tree = at(connection, f"two-{tmp_path.name}")
    command: list[Any] = [sys.executable, "-c", _SLOW_ARCHIVER, directory, tree.name, json.dumps(hdfs.settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "copying\n"
        for _ in range(2):
            with (
                pytest.raises(DirectoryInUse, match=f"is held by process {first.pid} on "),
                ArchiveLock(tree, lambda: time.time_ns() // 1_000, this_process()),
            ):
                raise AssertionError("there are two now")
        first.communicate("go on\n", timeout=TIMEOUT_S)
    assert first.returncode == 0
    assert positions_in(HdfsFiles(tree.name)) == places(sent)
    assert archive(directory, tree, this_process()).kept == 4
