"""A broker on an older copy of its directory gives no id and no sequence twice, once it has skipped ahead."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from qmq.errors import DirectoryInUse, InvalidOption
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.skip_ahead import MAX_SKIP_BYTES, skip_ahead
from tests.fake_disk import FakeDisk, Killed
from tests.storage.stores import NOW_US, Sender, check_counts, close_cleanly, kill, open_store, verified

SKIP = 1 << 40


def send(sender: Sender, subject: str, count: int) -> None:
    for number in range(count):
        sender.stage((subject, [b"%d" % number] * 3), partition=number % len(sender.store.partitions))
    sender.write()


def given(sender: Sender) -> tuple[set[tuple[int, int]], set[tuple[str, int]]]:
    """Return the positions and the sequences of the messages that were sent."""
    counts = [(one, sum(count for _, _, count in one.runs)) for one in sender.sent]
    positions = {(one.partition, one.position + at) for one, count in counts for at in range(count)}
    sequences = {(name, first + at) for one in sender.sent for name, first, count in one.runs for at in range(count)}
    return positions, sequences


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("is_clean", [True, False])
def test_no_position_and_no_sequence_is_given_twice(tmp_path: Path, partitions: int, is_clean: bool) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    sender = Sender(open_store(data, partitions=partitions))
    send(sender, "shop.order", 20)
    close_cleanly(sender.store) if is_clean else kill(sender.store)
    shutil.copytree(data, copy)
    lost = Sender(open_store(data, partitions=partitions))
    send(lost, "shop.order", 500)
    send(lost, "shop.new", 30)
    kill(lost.store)
    skipped = skip_ahead(copy, Disk(), NOW_US, SKIP)
    verified(copy)
    assert skipped.raised_by >= SKIP * partitions
    again = Sender(open_store(copy, partitions=partitions))
    ends = [part.message_log.end for part in again.store.partitions]
    assert all(end >= position for end, position in zip(ends, skipped.positions, strict=True))
    send(again, "shop.order", 20)
    send(again, "shop.new", 20)
    send(again, "shop.other", 20)
    for before, after in zip(given(lost), given(again), strict=True):
        assert before.isdisjoint(after)
    check_counts(again.store, [*sender.sent, *again.sent])
    close_cleanly(again.store)
    verified(copy)


def test_a_second_skip_goes_further(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path))
    send(sender, "a", 5)
    close_cleanly(sender.store)
    first = skip_ahead(tmp_path, Disk(), NOW_US, SKIP)
    second = skip_ahead(tmp_path, Disk(), NOW_US, SKIP)
    assert second.positions[0] >= first.positions[0] + SKIP
    verified(tmp_path)


@pytest.mark.parametrize("size", [0, -1, MAX_SKIP_BYTES + 1])
def test_a_bad_size_changes_nothing(tmp_path: Path, size: int) -> None:
    close_cleanly(open_store(tmp_path))
    before = (tmp_path / "store-a").read_bytes()
    with pytest.raises(InvalidOption, match="bytes to skip"):
        skip_ahead(tmp_path, Disk(), NOW_US, size)
    assert (tmp_path / "store-a").read_bytes() == before


def test_a_directory_in_use_or_none_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="no data directory"):
        skip_ahead(tmp_path, Disk(), NOW_US, SKIP)
    close_cleanly(open_store(tmp_path))
    lock = DirectoryLock.acquire(Disk(), tmp_path, NOW_US)
    with pytest.raises(DirectoryInUse):
        skip_ahead(tmp_path, Disk(), NOW_US, SKIP)
    lock.release()


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """After a kill a broker is started, or the call is made again."""
    sender = Sender(open_store(tmp_path / "data"))
    send(sender, "a", 20)
    close_cleanly(sender.store)
    for step in range(1, 10_000, 5):
        data = tmp_path / f"data-{step}"
        shutil.copytree(tmp_path / "data", data)
        disk = FakeDisk().kill_at(step)
        try:
            skip_ahead(data, disk, NOW_US, SKIP)
        except Killed:
            is_killed = True
            for fd in tuple(disk._paths):
                os.close(fd)  # as the system does, which ends the lock
        else:
            is_killed = False
        store = open_store(data)
        check_counts(store, sender.sent)
        kill(store)
        skip_ahead(data, Disk(), NOW_US, SKIP)
        verified(data)
        shutil.rmtree(data)
        if not is_killed:
            assert step > 10
            break
