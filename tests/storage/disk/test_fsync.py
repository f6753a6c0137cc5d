"""After a failed sync, the next sync that works brings the file to disk, also if the power fails then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qmq.storage.disk.disk import (
    read_whole,
    write_fully,
)
from qmq.storage.disk.fsync import SureSync
from tests.sim.disk import SimulatedDisk


@pytest.mark.parametrize("failures", [["fdatasync"], ["fdatasync", "pwritev"], ["fdatasync", "fdatasync", "pwritev"]])
@pytest.mark.parametrize("seed", range(5))
def test_the_next_sync_brings_what_a_failed_one_did_not(seed: int, failures: list[str]) -> None:
    disk = SimulatedDisk(seed)
    path = Path("/file")
    fd = disk.open(path, os.O_RDWR | os.O_CREAT)
    disk.fsync_directory(path.parent)
    content = bytes(range(256)) * 20
    write_fully(disk, fd, [content[:3_000]], 0)
    sync = SureSync(disk)
    for operation in failures:  # the write that follows a failed sync
        disk.fail(operation)
    with pytest.raises(OSError, match="Input"):
        sync(fd)
    write_fully(disk, fd, [content[3_000:]], 3_000)
    while True:
        try:
            sync(fd)
            break
        except OSError:
            continue
    disk.stop(power=True)
    assert read_whole(disk, path) == content
