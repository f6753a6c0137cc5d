"""The door while the disk fails: nothing half stored, and on it goes when it can."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from qmq.errors import (
    StorageError,
    StorageFailed,
    StorageFull,
    SyncFailed,
)
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.checkpoint import list_checkpoints, read_checkpoint
from qmq.storage.meta.identity import read_copies
from tests.fake_disk import FakeDisk
from tests.storage.stops import fill, open_again
from tests.storage.stores import (
    Sender,
    check_stored,
    checkpoint,
    close_cleanly,
    kill,
    open_store,
    segment_files,
    verified,
)

# --- a disk that takes no writes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull), (errno.EIO, StorageFailed)]
)
def test_a_write_that_fails_stores_nothing_and_the_next_one_works(
    tmp_path: Path, code: int, kind: type[StorageError]
) -> None:
    disk = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path, disk))
    sender.send("a", b"before")
    end = sender.store.partitions[0].message_log.end
    sender.stage(("a", [b"x" * 500]))
    sender.stage(("b", [b"y" * 500]))
    disk.fail("pwritev", 1, code)
    with pytest.raises(kind, match=rf"{segment_files(tmp_path)[-1].name} at position {end}: ") as caught:
        sender.write()
    assert caught.value.retryable
    sender.take_back()
    assert sender.store.partitions[0].message_log.end == end
    assert sender.send("a", b"after").position == end
    check_stored(sender.store, sender.sent)
    kill(sender.store)
    check_stored(open_again(tmp_path), sender.sent)


def test_what_a_failed_write_left_behind_does_not_come_back(tmp_path: Path) -> None:
    disk = FakeDisk()
    sender = Sender(open_store(tmp_path, disk))
    refused = [sender.stage((subject, [b"x" * 200])) for subject in ("refused.1", "refused.2", "refused.3")]
    disk.full, disk.fits = True, sum(len(sent.data) for sent in refused[:2])
    with pytest.raises(StorageFull):
        sender.write()
    disk.full = False
    sender.take_back()
    sender.send("a", b"short")
    kill(sender.store)
    store = open_again(tmp_path)
    check_stored(store, sender.sent)
    assert store.recovery.partitions[0].holes == []


def test_a_roll_that_fails_takes_back_what_is_staged_and_can_be_tried_again(tmp_path: Path) -> None:
    counting = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path / "counting", counting))
    before = counting.calls.copy()
    while len(segment_files(tmp_path / "counting")) < 2:
        sender.stage(("a", [b"x" * 3_000]))
    sender.write()
    kill(sender.store)
    for operation in ("open", "pwritev", "ftruncate", "map"):
        for nth in range(1, counting.calls[operation] - before[operation] + 1):
            path = tmp_path / f"{operation}-{nth}"
            disk = FakeDisk("boot-1")
            sender = Sender(open_store(path, disk))
            sender.send("a", b"before")
            disk.fail(operation, nth, errno.ENOSPC)
            try:
                for _ in range(30):
                    sender.stage(("a", [b"x" * 3_000]))
                sender.write()
            except StorageFull:
                sender.take_back()
            disk.heal()
            for _ in range(30):
                sender.stage(("a", [b"y" * 3_000]))
            sender.write()
            check_stored(sender.store, sender.sent)
            kill(sender.store)
            check_stored(open_again(path), sender.sent)


def test_a_new_segment_that_cannot_be_taken_away_again_stops_the_partition(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path, disk))
    kept = sender.send("a", b"kept")
    while len(segment_files(tmp_path)) < 2:
        sender.stage(("a", [b"x" * 3_000]))
    disk.fail("pwritev", 1, errno.EIO)
    disk.fail_always("unlink", errno.EACCES)
    with pytest.raises(SyncFailed, match="Remove the file and restart"):
        sender.write()
    sender.take_back()
    with pytest.raises(SyncFailed, match="Remove the file and restart"):
        sender.send("a", b"x")
    assert bytes(sender.store.partitions[0].message_log.view(kept.position, len(kept.data))) == kept.data
    kill(sender.store)


def test_rows_that_cannot_be_written_do_not_fill_memory(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path, disk, segment_bytes=64 << 20, max_frame_bytes=16 << 20))
    disk.fail_always("pwritev", errno.ENOSPC, ".entries")
    subjects = [(f"s{number}", [b""]) for number in range(4_000)]

    def send_many() -> None:
        for _ in range(20):
            sender.stage(*subjects)
            sender.write()

    with pytest.raises(StorageFull, match=r"\.entries"):
        send_many()
    sender.take_back()
    assert 65_536 <= sum(len(sent.runs) for sent in sender.sent) <= 65_536 + 8_000
    disk.heal()
    sender.stage(*subjects)
    sender.write()
    check_stored(sender.store, sender.sent)
    kill(sender.store)


# --- syncing ---------------------------------------------------------------------------------------------------------


def test_synced_says_what_is_on_disk(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    path, lost = tmp_path / "a", tmp_path / "b"
    disk.track(path)
    sender = Sender(open_store(path, disk))
    store = sender.store
    start = store.partitions[0].message_log.synced
    for _ in range(30):  # over several segments
        sender.send("a", b"x" * 5_000)
    assert store.partitions[0].message_log.synced == start
    end = store.partitions[0].message_log.end
    store.partitions[0].sync()
    sender.send("a", b"not synced")
    store.partitions[0].message_log.mark_synced(end)
    assert store.partitions[0].message_log.synced == end
    disk.without_power(path, lost)
    after = open_store(lost, FakeDisk("boot-2"))
    check_stored(after, sender.sent[:-1])
    kill(store)
    kill(after)


def test_descriptors_of_synced_segments_are_closed(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path, disk))
    store = sender.store
    for _ in range(60):
        sender.send("a", b"x" * 5_000)
        store.partitions[0].sync()
        store.partitions[0].message_log.mark_synced(store.partitions[0].message_log.end)
    for _ in range(3):  # the consumer log lets go one after the other
        checkpoint(store)
    store.partitions[0].sync()
    assert len(segment_files(tmp_path)) > 4
    assert len([name for name in disk.still_open() if ".messages" in name]) == 1
    assert len(disk.still_open()) < 8
    kill(store)
    assert disk.still_open() == []


def test_after_a_failed_sync_the_partition_takes_nothing_and_still_reads(tmp_path: Path) -> None:
    disk = FakeDisk()
    sender = Sender(open_store(tmp_path, disk, partitions=2))
    store = sender.store
    sender.send("a", b"1")
    checkpoint(store)
    sender.send("a", b"2")
    sender.send("b", b"3", partition=1)
    disk.fail("fdatasync", 1)
    with pytest.raises(SyncFailed, match=r"log-0.*\.messages.*until the broker has been restarted"):
        store.partitions[0].sync()
    with pytest.raises(SyncFailed):
        store.partitions[0].sync()
    sender.stage(("a", [b"4"]))
    with pytest.raises(SyncFailed):
        sender.store.partitions[0].write()
    sender.take_back()
    with pytest.raises(SyncFailed):
        store.partitions[0].position_for(100)
    check_stored(store, sender.sent)
    sender.send("b", b"5", partition=1)
    with pytest.raises(SyncFailed):
        checkpoint(store)
    store.partitions[0].give_up()
    checkpoint(store)  # of the other partition; this one stays where its last checkpoint left it
    claims = read_checkpoint(Disk(), tmp_path, list_checkpoints(Disk(), tmp_path)[0]).claims
    assert claims is not None
    assert claims.partitions[0].position == sender.sent[1].position
    assert claims.partitions[1].position == store.partitions[1].message_log.end
    store.close(clean=True)
    store = open_store(tmp_path, FakeDisk(), partitions=2)
    assert not store.recovery.clean
    assert store.recovery.partitions[0].rewritten_bytes == len(sender.sent[1].data)
    check_stored(store, sender.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_what_broke_before_the_first_checkpoint_is_claimed_as_before_the_start(
    tmp_path: Path,
) -> None:
    """What lies behind has been read and synced by the start, but not what is derived from it."""
    path, lost = tmp_path / "a", tmp_path / "b"
    disk = FakeDisk("boot-1")
    disk.track(path)
    sender = Sender(open_store(path, disk, partitions=2))
    fill(sender, 60, size=4_000)
    sender.store.partitions[0].sync()
    kill(sender.store)
    store = sender.store = open_store(path, disk, partitions=2)
    assert len(segment_files(path)) > 3
    sender.send("a", b"not synced")
    disk.fail("fdatasync", 1)
    with pytest.raises(SyncFailed):
        store.partitions[0].sync()
    store.partitions[0].give_up()
    sender.send("b", b"elsewhere", partition=1)
    checkpoint(store)
    for directory in (path / "log-0", path / "consumer-log" / "0"):
        disk.fsync_directory(directory)  # the system may bring names to the disk at any time
    disk.without_power(path, lost)
    kill(store)
    verified(lost)
    store = open_store(lost, FakeDisk("boot-2"), partitions=2)
    assert not any(part.holes or part.damaged for part in store.recovery.partitions)
    kept = [sent for sent in sender.sent if b"not synced" not in sent.data]
    check_stored(store, kept)
    close_cleanly(store)
    verified(lost)


def test_checkpoints_go_on_without_the_disk_of_a_broken_partition(tmp_path: Path) -> None:
    disk = FakeDisk()
    sender = Sender(open_store(tmp_path, disk, partitions=2))
    store = sender.store
    fill(sender, 60, size=4_000)
    assert len(list((tmp_path / "log-0").glob("*.messages"))) > 2
    disk.fail_always("fdatasync", errno.EIO, "log-0")
    with pytest.raises(SyncFailed):
        store.partitions[0].sync()
    store.partitions[0].give_up()
    sent = sender.send("b", b"elsewhere", partition=1)
    checkpoint(store)
    claims = read_checkpoint(Disk(), tmp_path, list_checkpoints(Disk(), tmp_path)[0]).claims
    assert claims is not None
    assert claims.partitions[1].position == sent.position + len(sent.data)
    store.close()
    assert disk.still_open() == []
    store = open_again(tmp_path, partitions=2)
    check_stored(store, sender.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_a_sync_that_fails_while_another_waits_fails_both(tmp_path: Path) -> None:
    """The system tells of the failure once; who waits behind must not believe the success that comes after it."""
    disk = FakeDisk()
    sender = Sender(open_store(tmp_path, disk))
    sender.send("a", b"1")
    entered = disk.stall("fdatasync")
    disk.fail("fdatasync")
    outcomes: list[BaseException | None] = []

    def sync() -> None:
        try:
            sender.store.partitions[0].sync()
        except SyncFailed as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    threads = [threading.Thread(target=sync) for _ in range(2)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    disk.go_on()
    for thread in threads:
        thread.join(10)
    assert [type(outcome) for outcome in outcomes] == [SyncFailed, SyncFailed]
    kill(sender.store)


# --- reserves --------------------------------------------------------------------------------------------------------


def test_positions_stay_below_the_reserve_that_is_on_disk(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), reserve_bytes=256 << 10))
    for _ in range(100):
        sender.send("a", b"x" * 9_000)
        for copy in read_copies(Disk(), tmp_path):
            assert copy.identity is not None
            assert sender.store.partitions[0].message_log.end <= copy.identity.partitions[0].reserve
    kill(sender.store)


def test_a_reserve_that_cannot_be_renewed_refuses_sends_until_it_can(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    sender = Sender(open_store(tmp_path, disk, reserve_bytes=256 << 10))
    disk.fail_always("pwritev", errno.ENOSPC, "store-a")

    def send_many() -> None:
        for _ in range(100):
            sender.send("a", b"x" * 9_000)

    with pytest.raises(StorageFull, match="store-a"):
        send_many()
    assert len(sender.sent) > 20
    disk.heal()
    sender.send("a", b"x" * 9_000)
    check_stored(sender.store, sender.sent)
    kill(sender.store)
