"""A segment closed on request: what is there stays, and what comes goes on behind it, whatever stops the process."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from qmq.errors import StorageFull
from qmq.storage.disk.disk import Disk
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, checkpoint, close_cleanly, kill, open_store, segment_files, verified


def positions(sender: Sender) -> list[int]:
    return [header.position for _, header in sender.store.headers_since([])]


@pytest.mark.parametrize("partitions", [1, 2])
def test_what_was_written_is_closed_and_nothing_more_than_that(tmp_path: Path, partitions: int) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), partitions=partitions))
    store = sender.store
    assert [store.partitions[partition].seal() for partition in range(partitions)] == [
        store.partitions[n].message_log.end - 64 for n in range(partitions)
    ]
    assert not store.partitions[0].message_log.sealed, "there is nothing to close"
    sender.send("a", b"1")
    before = store.partitions[0].message_log.end
    end = store.partitions[0].seal()
    assert end == before == store.partitions[0].message_log.sealed[-1].end
    assert store.partitions[0].seal() == end, "there is nothing more"
    assert not store.partitions[0].is_settled(end)
    checkpoint(store)
    assert store.partitions[0].is_settled(end)
    size = store.partitions[0].message_log.sealed[-1].end - store.partitions[0].message_log.sealed[-1].base
    assert segment_files(tmp_path)[0].stat().st_size == size, "it is as long as what is in it"
    sent = sender.send("a", b"2")
    assert sent.runs == (("a", 1, 1),)
    assert sent.position == end + 64
    close_cleanly(store)
    verified(tmp_path)


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_start_after_a_kill_finds_it_closed(tmp_path: Path, checkpoints: int, goes_on: bool) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    sender.send("a", b"1")
    end = sender.store.partitions[0].seal()
    for _ in range(checkpoints):
        checkpoint(sender.store)
    if goes_on:
        sender.send("b", b"2")
    before = positions(sender)
    kill(sender.store)
    sender.store = open_store(tmp_path, FakeDisk())
    assert positions(sender) == before
    assert [(part.damaged, part.holes) for part in sender.store.recovery.partitions] == [([], [])]
    assert sender.store.partitions[0].seal() == (
        sender.store.partitions[0].message_log.sealed[-1].end if goes_on else end
    )
    sender.send("a", b"3")
    close_cleanly(sender.store)
    verified(tmp_path)


def test_a_full_disk_leaves_it_open(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path, disk))
    sender.send("a", b"1")
    disk.fail_always("open", errno.ENOSPC, "log-0")
    with pytest.raises(StorageFull):
        sender.store.partitions[0].seal()
    assert not sender.store.partitions[0].message_log.sealed
    disk.heal()
    sender.send("a", b"2")
    assert sender.store.partitions[0].seal() == sender.store.partitions[0].message_log.sealed[-1].end
    close_cleanly(sender.store)
    verified(tmp_path)


def test_the_reserve_is_renewed_for_it(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, Disk(), reserve_bytes=256 << 10, max_frame_bytes=32 << 10))
    for _ in range(5_000):
        sender.send("a", b"1")
        sender.store.partitions[0].seal()
        if len(sender.store.partitions[0].message_log.sealed) >= 40:
            break
    kill(sender.store)
    store = open_store(tmp_path, Disk())
    assert len(store.partitions[0].message_log.sealed) == 40
    close_cleanly(store)
    verified(tmp_path)
