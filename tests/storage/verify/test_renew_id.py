"""A directory that gets another store id keeps all else, whenever that is interrupted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from qmq.errors import BadBytes, DirectoryInUse, InvalidOption
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.renew_id import is_renewal_unfinished, renew_id
from qmq.storage.verify.repair import repair
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk, Killed
from tests.storage.stores import NOW_US, Sender, check_counts, close_cleanly, kill, open_store, verified


def filled(data: Path, *, is_clean: bool = True) -> Sender:
    """Return the sender of a closed store of two partitions, with sealed segments, a delay log and a checkpoint that
    does not know all.
    """
    sender = Sender(open_store(data, partitions=2))
    for number in range(60):
        sender.stage(("shop.order", [b"%d" % number * 300] * 3), partition=number % 2)
    sender.write()
    log = sender.store.open_delay_log(NOW_US)
    delayed = Sender(log)
    delayed.stage(("shop.later", [b"later"] * 5))
    delayed.write()
    close_cleanly(sender.store) if is_clean else kill(sender.store)
    return sender


def contents(data: Path, sender: Sender) -> list[bytes]:
    """Return the bytes of all sent batches behind their headers and tables, as a start finds them."""
    store = open_store(data, partitions=2)
    check_counts(store, sender.sent)
    found = [
        bytes(store.partitions[sent.partition].message_log.view(sent.position + 96, len(sent.data) - 96))
        for sent in sender.sent
    ]
    delay_log = store.delay_log
    assert delay_log is not None
    assert delay_log.store_id == store.store_id
    assert len(list(delay_log.headers_since([0]))) == 1
    close_cleanly(store)
    return found


@pytest.mark.parametrize("is_clean", [True, False])
def test_all_files_get_the_new_id_and_keep_the_rest(tmp_path: Path, is_clean: bool) -> None:
    sender = filled(tmp_path, is_clean=is_clean)
    former = sender.store.store_id
    before = contents(tmp_path, sender)
    entries = {path: path.read_bytes()[64:] for path in tmp_path.rglob("*.entries")}
    renewed = renew_id(tmp_path, Disk(), NOW_US)
    assert renewed.former == former != renewed.store_id
    verified(tmp_path)
    assert {path: path.read_bytes()[64:] for path in tmp_path.rglob("*.entries")} == entries, "nothing is made again"
    store = open_store(tmp_path, partitions=2)
    assert (store.store_id, store.store_ids) == (renewed.store_id, {renewed.store_id, former})
    assert {header.store_id for _, header in store.headers_since([0, 0])} == {renewed.store_id}
    close_cleanly(store)
    assert contents(tmp_path, sender) == before
    again = renew_id(tmp_path, Disk(), NOW_US)
    assert again.former == renewed.store_id
    assert contents(tmp_path, sender) == before
    verified(tmp_path)


def test_one_that_is_interrupted_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    sender = filled(tmp_path / "data")
    before = contents(tmp_path / "data", sender)
    refused = 0
    for step in range(1, 10_000, 7):
        copy = tmp_path / f"copy-{step}"
        shutil.copytree(tmp_path / "data", copy)
        disk = FakeDisk().kill_at(step)
        try:
            renew_id(copy, disk, NOW_US)
        except Killed:
            for fd in tuple(disk._paths):
                os.close(fd)  # as the system does, which ends the lock
        else:
            break
        if is_renewal_unfinished(copy, Disk()):
            refused += 1
            with pytest.raises(BadBytes, match="run qmq repair --new-id"):
                open_store(copy, partitions=2)
            with pytest.raises(BadBytes, match="run qmq repair --new-id"):
                repair(copy, Disk(), NOW_US)
            assert [finding.what for finding in verify(copy, Disk()).findings if "--new-id" in finding.what]
        renewed = renew_id(copy, Disk(), NOW_US)
        verified(copy)
        store = open_store(copy, partitions=2)
        assert store.store_id == renewed.store_id != sender.store.store_id
        close_cleanly(store)
        assert contents(copy, sender) == before
        shutil.rmtree(copy)
    assert refused > 10


def test_a_directory_in_use_or_none_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="no data directory"):
        renew_id(tmp_path, Disk(), NOW_US)
    store = open_store(tmp_path)
    close_cleanly(store)
    lock = DirectoryLock.acquire(Disk(), tmp_path, NOW_US)
    with pytest.raises(DirectoryInUse):
        renew_id(tmp_path, Disk(), NOW_US)
    lock.release()
    again = open_store(tmp_path)
    assert again.store_id == store.store_id
    close_cleanly(again)
