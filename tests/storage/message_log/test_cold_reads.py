"""A part of a segment, read in a thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import BadBytes, StorageFailed
from qmq.storage.message_log.cold_reads import Fetch
from tests.fake_disk import FakeDisk


def test_reads_a_part_of_a_file(tmp_path: Path) -> None:
    disk, path = FakeDisk("boot-1"), tmp_path / "file"
    path.write_bytes(b"0123456789")
    for offset, size, expected in ((2, 3, b"234"), (8, 5, b"89"), (20, 5, b"")):
        fetch = Fetch(disk, 0, path, offset, size, 1_000 + offset)
        fetch.run()
        assert fetch.data == expected
    assert disk.still_open() == []


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    disk, path = FakeDisk("boot-1"), tmp_path / "file"
    with pytest.raises(BadBytes, match="was removed"):
        Fetch(disk, 0, path, 0, 5, 1_000).run()
    path.write_bytes(b"0123456789")
    disk.fail("pread")
    with pytest.raises(StorageFailed, match="1000"):
        Fetch(disk, 0, path, 0, 5, 1_000).run()
    assert disk.still_open() == []
