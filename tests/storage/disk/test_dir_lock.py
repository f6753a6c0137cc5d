"""One broker per directory, and its name in the lock file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qmq.errors import DirectoryInUse, StorageFailed
from qmq.storage.disk.dir_lock import DirectoryLock, holder_of
from qmq.storage.disk.disk import Disk
from tests.fake_disk import FakeDisk

NOW_US = 1_700_000_000_000_000
HOLDER = f"process {os.getpid()} on {socket.gethostname()}, since 2023-11-14T22:13:20Z"

HOLD = """
import sys
from pathlib import Path
from tests.fake_disk import FakeDisk
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.dir_lock import DirectoryLock
from tests.fake_disk import FakeDisk
lock = DirectoryLock.acquire(Disk(), Path(sys.argv[1]), 0)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_broker_gets_the_name_of_the_holder(tmp_path: Path) -> None:
    assert holder_of(Disk(), tmp_path) is None
    lock = DirectoryLock.acquire(Disk(), tmp_path, NOW_US)
    assert holder_of(Disk(), tmp_path) == HOLDER
    with pytest.raises(DirectoryInUse) as caught:
        DirectoryLock.acquire(Disk(), tmp_path, NOW_US)
    assert str(caught.value) == f"{tmp_path} is in use by {HOLDER}; stop it or choose another directory"
    lock.release()
    lock.release()
    assert holder_of(Disk(), tmp_path) is None
    DirectoryLock.acquire(Disk(), tmp_path, NOW_US).release()


def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert (holder_of(Disk(), tmp_path) or "").startswith(f"process {holder.pid} on ")
    with pytest.raises(DirectoryInUse, match=rf"process {holder.pid} "):
        DirectoryLock.acquire(Disk(), tmp_path, NOW_US)
    holder.kill()
    holder.communicate()
    DirectoryLock.acquire(Disk(), tmp_path, NOW_US).release()


def test_a_holder_that_has_not_said_its_name_yet(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    disk.fail_always("pwritev")  # a full disk does not prevent reads
    lock = DirectoryLock.acquire(disk, tmp_path, NOW_US)
    with pytest.raises(DirectoryInUse, match="another process that has just started"):
        DirectoryLock.acquire(Disk(), tmp_path, NOW_US)
    lock.release()


def test_a_directory_that_cannot_be_locked(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    disk.fail("open", 1, 13)
    with pytest.raises(StorageFailed, match=r"cannot open .*lock: .*access"):
        DirectoryLock.acquire(disk, tmp_path, NOW_US)
    disk.fail("open", 1, 13)
    with pytest.raises(StorageFailed):
        holder_of(disk, tmp_path)
    with pytest.raises(StorageFailed):
        DirectoryLock.acquire(disk, tmp_path / "missing", NOW_US)
    assert disk.still_open() == []
