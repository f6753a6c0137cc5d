"""One run at a time has the lock, and a dead one does not keep others out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qmq.archive.files import LocalFiles
from qmq.archive.lock import LOCK_EXPIRY_US, RENEW_US, ArchiveLock, LockOwner, started_of, this_process
from qmq.errors import DirectoryInUse
from tests.archive.archives import GONE

ELSEWHERE = LockOwner("elsewhere", 7, "yesterday")


class Clock:
    now_us = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now_us


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lock(place: Path, clock: Clock, owner: LockOwner) -> ArchiveLock:
    return ArchiveLock(LocalFiles(place), clock, owner)


def test_two_at_once_are_refused(tmp_path: Path, clock: Clock) -> None:
    with lock(tmp_path, clock, this_process()), pytest.raises(DirectoryInUse, match=f"by {this_process()}"):
        lock(tmp_path, clock, ELSEWHERE).__enter__()
    assert list(tmp_path.iterdir()) == []
    with lock(tmp_path, clock, ELSEWHERE):
        assert [path.name for path in tmp_path.iterdir()] == ["_lock"]


def test_a_dead_one_of_this_host_loses_it_at_once(tmp_path: Path, clock: Clock) -> None:
    lock(tmp_path, clock, GONE).__enter__()
    with lock(tmp_path, clock, this_process()) as held:
        held.confirm()


def test_one_of_another_host_loses_it_when_it_is_silent(tmp_path: Path, clock: Clock) -> None:
    silent = lock(tmp_path, clock, ELSEWHERE)
    silent.__enter__()
    clock.now_us += RENEW_US
    silent.renew()
    clock.now_us += LOCK_EXPIRY_US - 1
    with pytest.raises(DirectoryInUse, match="elsewhere"):
        lock(tmp_path, clock, this_process()).__enter__()
    clock.now_us += 1
    with lock(tmp_path, clock, this_process()) as held:
        with pytest.raises(DirectoryInUse, match="was taken by"):
            silent.renew()
        silent.__exit__(None, None, None)
        held.confirm()


def test_a_lock_that_is_none_is_taken(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "_lock").write_bytes(b"{}")
    with lock(tmp_path, clock, this_process()) as held:
        held.confirm()


def test_processes_are_told_apart() -> None:
    assert not this_process().is_gone()
    assert replace(this_process(), started="before").is_gone()
    assert not replace(ELSEWHERE, process=this_process().process).is_gone()
    assert started_of(2**30) == ""
