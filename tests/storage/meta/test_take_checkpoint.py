"""A checkpoint in the making: nothing is claimed before it is on disk."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from qmq.errors import StorageError
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.segment import SegmentOwner
from qmq.storage.message_log.sparse_index import is_sealed_index
from qmq.storage.meta.checkpoint import list_checkpoints, read_checkpoint
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, check_stored, checkpoint, kill, open_store, segment_files, verified


def fill(sender: Sender, count: int = 40) -> None:
    for number in range(count):
        sender.stage((f"s.{number % 7}", [b"x" * 4_000]), partition=number % len(sender.store.partitions))
    sender.write()


def test_all_that_it_claims_survives_loss_of_power(tmp_path: Path) -> None:
    path, lost = tmp_path / "a", tmp_path / "b"
    disk = FakeDisk("boot-1")
    disk.track(path)
    sender = Sender(open_store(path, disk, partitions=2))
    for _ in range(3):
        fill(sender)
        checkpoint(sender.store, {"state": b"kept"})
    kept = list(sender.sent)
    fill(sender)
    disk.without_power(path, lost)
    kill(sender.store)
    verified(lost)  # as the loss of power left it: everything that the checkpoint claims is good
    store = open_store(lost, FakeDisk("boot-2"), partitions=2)
    assert store.state == {"state": b"kept"}
    assert all(part.rebuilt_bytes == 0 for part in store.recovery.partitions)
    check_stored(store, kept)
    kill(store)


def test_loss_of_power_before_any_step_of_it_leaves_the_one_before(tmp_path: Path) -> None:
    counting = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path / "counting", counting))
    fill(sender, 5)
    checkpoint(sender.store)
    fill(sender)
    made = sender.store.begin_checkpoint({})
    before = counting.calls.copy()
    made.write()
    kill(sender.store)
    for operation in ("fdatasync", "fsync", "fsync_directory", "rename", "pwritev"):
        for nth in range(1, counting.calls[operation] - before[operation] + 1):
            path, lost = tmp_path / f"{operation}-{nth}", tmp_path / f"{operation}-{nth}-lost"
            disk = FakeDisk("boot-1")
            disk.track(path)
            sender = Sender(open_store(path, disk))
            fill(sender, 5)
            checkpoint(sender.store)
            fill(sender)
            made = sender.store.begin_checkpoint({})
            disk.fail(operation, nth)
            with pytest.raises(StorageError):
                made.write()
            disk.without_power(path, lost)
            kill(sender.store)
            verified(lost)
            store = open_store(lost, FakeDisk("boot-2"))
            assert {sent.position for sent in sender.sent[:5]} <= {h.position for _, h in store.headers_since([])}
            kill(store)


def test_indexes_of_sealed_segments_are_sealed_with_it(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path, disk))
    fill(sender)
    owner = SegmentOwner(sender.store.store_id, 0)
    bases = [int(file.stem, 16) for file in segment_files(tmp_path)]
    made = sender.store.begin_checkpoint({})
    fill(sender)  # these come with the next one
    disk.fail("fsync", 1)
    with pytest.raises(StorageError):
        made.write()
    checkpoint(sender.store)
    for base, end in pairwise(bases):
        assert is_sealed_index(disk, tmp_path / "log-0", owner, base, end)
    kill(sender.store)


def test_it_claims_only_what_was_there_when_it_began(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk("boot-1")))
    fill(sender, 10)
    end = sender.store.partitions[0].message_log.end
    made = sender.store.begin_checkpoint({})
    fill(sender, 60)
    made.write()
    sender.store.finish_checkpoint(made)
    claims = read_checkpoint(Disk(), tmp_path, list_checkpoints(Disk(), tmp_path)[0]).claims
    assert claims is not None
    assert claims.partitions[0].position == end == claims.partitions[0].segments[-1].end
    assert sender.store.partitions[0].message_log.synced == end
    kill(sender.store)
    verified(tmp_path)
