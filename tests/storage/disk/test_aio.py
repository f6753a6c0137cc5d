"""fdatasyncs that the system does without a thread."""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

import pytest

from qmq.errors import SyncFailed
from qmq.storage.disk.aio import AioSyncs
from qmq.storage.disk.disk import Disk
from tests.broker.harness import Driven
from tests.fake_disk import FakeDisk

TIMEOUT_MS = 60_000


def done(aside: AioSyncs, count: int) -> dict[int, OSError | None]:
    found: dict[int, OSError | None] = {}
    watch = select.poll()
    watch.register(aside.descriptor, select.POLLIN)
    while len(found) < count:
        assert watch.poll(TIMEOUT_MS)
        found |= dict(aside.finished())
    return found


def test_files_are_synced_and_reported_by_number(tmp_path: Path) -> None:
    aside = AioSyncs()
    fds = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(5)]
    for number, fd in enumerate(fds):
        os.write(fd, b"x" * 10_000)
        aside.begin(fd, 0x8000 + number)
    assert done(aside, 5) == {0x8000 + number: None for number in range(5)}
    assert aside.finished() == []
    for fd in fds:
        os.close(fd)
    aside.close()


def test_a_failed_sync_is_an_error(tmp_path: Path) -> None:
    aside = AioSyncs()
    with pytest.raises(OSError, match="descriptor"):
        aside.begin(1_000_000, 1)
    read, write = os.pipe()
    failed: OSError | None = None
    try:
        aside.begin(write, 2)  # some systems refuse at once
        failed = done(aside, 1)[2]
    except OSError as error:
        failed = error
    assert failed is not None
    assert failed.errno == errno.EINVAL
    os.close(read)
    os.close(write)
    aside.close()


def test_a_disk_with_a_sync_of_its_own_has_no_asynchronous_one() -> None:
    assert FakeDisk("boot-1").aside() is None
    aside = Disk().aside()
    assert aside is not None
    aside.close()


def test_a_partition_is_synced_by_one_at_a_time_and_a_failure_is_for_good(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    store = driven.store
    store.partitions[0].sync()
    descriptor = store.partitions[0].message_log.begin_sync()
    assert descriptor is not None
    os.fdatasync(descriptor)
    assert store.partitions[0].message_log.begin_sync() is None, "one is under way"
    store.partitions[0].message_log.end_sync(None)
    assert store.partitions[0].broken() is None
    assert store.partitions[0].message_log.begin_sync() == descriptor
    store.partitions[0].message_log.end_sync(OSError(errno.EIO, "rotten"))
    assert store.partitions[0].message_log.begin_sync() is None
    with pytest.raises(SyncFailed, match="rotten"):
        store.partitions[0].sync()
    assert store.partitions[0].broken() is not None
    store.close(clean=False)


def test_more_than_one_file_is_for_a_thread(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False, segment_bytes=4_096, max_frame_bytes=2_048)
    for _ in range(8):
        driven.do(driven.send_command({"a": [b"x" * 1_000]}))
    assert driven.store.partitions[0].message_log.begin_sync() is None
    driven.store.partitions[0].sync()
    assert driven.store.partitions[0].message_log.begin_sync() is None, "nobody has said up to where that was"
    while driven.wanted:
        driven.sync()
    driven.store.partitions[0].sync()  # which closes the files that are no longer needed
    assert driven.store.partitions[0].message_log.begin_sync() is not None
    driven.store.partitions[0].message_log.end_sync(None)
    driven.close()


def test_a_failed_sync_names_its_file_also_when_nothing_is_unsynced_any_more(tmp_path: Path) -> None:
    """Batches synced by then are noted between begin and end, when the current file may no longer be needed."""
    driven = Driven(tmp_path, auto_sync=False, segment_bytes=4_096, max_frame_bytes=2_048)
    log = driven.store.partitions[0].message_log
    log.sync()
    assert log.begin_sync() is not None
    begun = log.current.path
    while log.current.path == begun:
        driven.do(driven.send_command({"a": [b"x" * 1_000]}))
    log.mark_synced(log.end)
    log.end_sync(OSError(errno.EIO, "rotten"))
    with pytest.raises(SyncFailed, match=begun.name):
        log.check()
    driven.store.close(clean=False)
