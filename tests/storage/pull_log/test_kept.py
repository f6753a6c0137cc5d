"""Files of the pull log that no start reads are kept for a time and up to a size, and are seen by traces alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from qmq.errors import StorageFailed
from qmq.storage.disk.disk import Disk
from qmq.storage.pull_log.kept import KEPT_SUFFIX, KeptPullFiles, PullLogKeep, kept_file_path
from qmq.storage.pull_log.log import PullLog
from qmq.storage.pull_log.records import check_pull_file, list_pull_files, pull_file_path, read_pull_log
from tests.fake_disk import FakeDisk

STORE, SECRET, FILE_BYTES = b"store!", b"s" * 16, 4_096
HOUR_US = 3_600_000_000


class Written:
    """A pull log of ten full files, one begun each hour, and the one that is being written."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.now_us = 0
        self.disk = disk or Disk()
        self.directory = path / "pulls"
        self.log = PullLog(self.disk, self.directory, STORE, SECRET, 5_000, 0, FILE_BYTES)
        self.log.clock = lambda: self.now_us
        while len(self.bases) < 11:
            self.log.stage(1, b"x" * 1_000)
            before = len(self.bases)
            self.now_us += HOUR_US
            self.log.write()
            if len(self.bases) == before:
                self.now_us -= HOUR_US

    @property
    def bases(self) -> list[int]:
        return list_pull_files(self.disk, self.directory)

    @property
    def kept(self) -> list[int]:
        return list_pull_files(self.disk, self.directory, KEPT_SUFFIX)

    def files(self, keep: PullLogKeep) -> KeptPullFiles:
        return KeptPullFiles(self.disk, self.directory, STORE, keep)


@pytest.mark.parametrize("keep", [PullLogKeep(), PullLogKeep(HOUR_US, 0), PullLogKeep(0, 1 << 30)])
def test_without_a_bound_above_0_files_are_removed(tmp_path: Path, keep: PullLogKeep) -> None:
    written = Written(tmp_path)
    bases = written.bases
    written.files(keep).retire(bases[2] + 5, written.now_us)
    assert (written.bases, written.kept) == (bases[2:], [])
    written.files(keep).retire(written.log.end, written.now_us)
    assert os.listdir(written.directory) == [pull_file_path(tmp_path, bases[-1]).name]


def test_kept_files_are_those_that_no_start_reads_with_the_bytes_that_they_had(tmp_path: Path) -> None:
    written = Written(tmp_path)
    bases = written.bases
    before = [pull_file_path(written.directory, base).read_bytes() for base in bases]
    files = written.files(PullLogKeep(100 * HOUR_US, 1 << 30))
    files.retire(bases[3], written.now_us)
    assert (written.kept, written.bases) == (bases[:3], bases[3:])
    files.retire(bases[4] - 1, written.now_us)  # the fourth file is read on
    assert written.kept == bases[:3]
    files.retire(written.log.end, written.now_us)
    assert (written.kept, written.bases) == (bases[:-1], bases[-1:])
    for base, content in zip(bases[:-1], before, strict=False):
        assert kept_file_path(written.directory, base).read_bytes() == content
    read = read_pull_log(Disk(), written.directory, STORE, SECRET, bases[-1])
    assert (len(read.records), read.holes, read.problems) == (1, [], []), "a start sees none of them"


def test_a_kept_file_goes_once_its_last_record_is_too_old(tmp_path: Path) -> None:
    written = Written(tmp_path)
    bases = written.bases
    files = written.files(PullLogKeep(3 * HOUR_US, 1 << 30))
    files.retire(written.log.end, written.now_us)
    assert written.kept == bases[7:-1], "the file before the last three hours ended when the next was begun"
    files.retire(written.log.end, written.now_us + HOUR_US - 1)
    assert written.kept == bases[7:-1]
    files.retire(written.log.end, written.now_us + HOUR_US)
    assert written.kept == bases[8:-1]
    written.files(PullLogKeep(3 * HOUR_US, 1 << 30)).retire(0, written.now_us + 4 * HOUR_US)  # after a restart
    assert written.kept == []


def test_the_oldest_kept_files_go_beyond_the_bound_of_bytes(tmp_path: Path) -> None:
    written = Written(tmp_path)
    bases = written.bases
    written.files(PullLogKeep(100 * HOUR_US, 2 * FILE_BYTES)).retire(written.log.end, written.now_us)
    assert written.kept == bases[8:-1]
    written.files(PullLogKeep(100 * HOUR_US, FILE_BYTES)).retire(written.log.end, written.now_us)
    assert written.kept == bases[9:-1]
    written.files(PullLogKeep()).retire(written.log.end, written.now_us)
    assert written.kept == [], "none stays when a broker is told to keep none"


def test_a_disk_that_refuses_is_an_error_and_the_next_checkpoint_goes_on(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    written = Written(tmp_path, disk)
    bases, files = written.bases, written.files(PullLogKeep(100 * HOUR_US, 1 << 30))
    disk.fail_always("rename", errno.EIO)
    with pytest.raises(StorageFailed, match="remove"):
        files.retire(written.log.end, written.now_us)
    assert (written.kept, written.bases) == ([], bases)
    disk.heal()
    files.retire(written.log.end, written.now_us)
    assert (written.kept, written.bases) == (bases[:-1], bases[-1:])


def test_a_file_is_checked_by_itself(tmp_path: Path) -> None:
    written = Written(tmp_path)
    first, second = written.bases[:2]
    path = pull_file_path(written.directory, first)
    assert check_pull_file(Disk(), path, first, second, STORE, SECRET) == []
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    data[300] ^= 1
    path.write_bytes(data)
    problems = check_pull_file(Disk(), path, first, second, STORE, SECRET)
    assert len(problems) == 2
    assert "header" in problems[0]
    assert "no record" in problems[1]
