"""Opening a data directory: a new one, after a clean stop, and what may stand in the way."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from qmq.errors import DirectoryInUse, InvalidOption, StorageError, StorageFailed, StorageFull
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.identity import COPY_NAMES
from qmq.storage.store import Store
from tests.fake_disk import REBOOTED, FakeDisk
from tests.storage.stops import fill, killed
from tests.storage.stores import (
    NOW_US,
    Sender,
    check_stored,
    checkpoint,
    close_cleanly,
    kill,
    open_store,
    options,
    verified,
)

# --- a new directory -------------------------------------------------------------------------------------------------


def test_a_new_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where" / "data"
    store = open_store(path, store_id=b"\x7f\0\0\1\x51\x91")
    assert store.recovery.created
    assert store.store_id == b"\x7f\0\0\1\x51\x91"
    assert store.state == {}
    assert store.last_stored_at_us == 0
    assert store.subjects.count == 0
    close_cleanly(store)
    assert {*COPY_NAMES, "lock", "subjects", "checkpoint-1", "log-0", "consumer-log", "pulls"} == {
        file.name for file in path.iterdir()
    }
    verified(path)


@pytest.mark.parametrize("missing", COPY_NAMES)
@pytest.mark.parametrize("left", ["none", "an older one", "a rotten one"])
def test_a_start_without_a_reboot_makes_both_copies_of_the_identity_whole(
    tmp_path: Path, missing: str, left: str
) -> None:
    """As a kill between the two writes leaves them: the copy that is behind may be the only one that lasts."""
    disk = FakeDisk()
    store = open_store(tmp_path, disk, reserve_bytes=1 << 20)
    older = (tmp_path / missing).read_bytes()
    sender = Sender(store)
    fill(sender, 300, size=4_000)  # the reserve is renewed on the way
    kill(store)
    assert (tmp_path / missing).read_bytes() != older
    (tmp_path / missing).unlink()
    if left != "none":
        (tmp_path / missing).write_bytes(older if left == "an older one" else older[:-1])
    store = open_store(tmp_path, disk, reserve_bytes=1 << 20)
    copies = [(tmp_path / name).read_bytes() for name in COPY_NAMES]
    assert copies[0] == copies[1]
    sender.store = store
    check_stored(store, sender.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_positions_of_two_new_directories_differ(tmp_path: Path) -> None:
    ends = []
    for name in "ab":
        store = open_store(tmp_path / name, FakeDisk())
        ends.append(store.partitions[0].message_log.end)
        kill(store)
    assert ends[0] != ends[1]


def test_a_crash_at_any_operation_while_a_directory_is_made_leaves_one_that_opens(tmp_path: Path) -> None:
    counting = FakeDisk("boot-1")
    kill(open_store(tmp_path / "whole", counting))
    for operation in (
        "open",
        "pwritev",
        "fsync",
        "fdatasync",
        "rename",
        "ftruncate",
        "map",
        "mkdir",
        "fsync_directory",
    ):
        assert counting.calls[operation]
        for nth in range(1, counting.calls[operation] + 1):
            path = tmp_path / f"{operation}-{nth}"
            disk = FakeDisk("boot-1")
            disk.fail(operation, nth)
            try:
                store = open_store(path, disk)
            except StorageError:
                store = open_store(path, FakeDisk())
            Sender(store).send("a", b"b")
            close_cleanly(store)
            verified(path)


# --- clean stops -----------------------------------------------------------------------------------------------------


def test_after_a_clean_stop_nothing_is_read_again(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    fill(sender, 60)
    checkpoint(sender.store, {"broker": b"state"})
    sender.store.state = {"broker": b"state"}
    close_cleanly(sender.store)
    store = open_store(tmp_path, FakeDisk(REBOOTED))
    assert store.recovery.clean
    assert not store.recovery.power_loss
    assert store.recovery.raised_by == 0
    (report,) = store.recovery.partitions
    assert (report.replayed_batches, report.rebuilt_bytes, report.rewritten_bytes, report.cut_bytes) == (0, 0, 0, 0)
    assert store.state == {"broker": b"state"}
    check_stored(store, sender.sent)
    kill(store)


def test_closing_without_a_checkpoint_is_not_clean(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk()))
    fill(sender, 3)
    sender.store.close(clean=True)
    store = open_store(tmp_path, FakeDisk())
    assert not store.recovery.clean
    check_stored(store, sender.sent)
    kill(store)


# --- what stands in the way ------------------------------------------------------------------------------------------


def test_a_second_one_is_told_who_has_the_directory(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(DirectoryInUse, match=r"in use by process \d+ on "):
        open_store(tmp_path)
    kill(store)
    kill(open_store(tmp_path))


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFailed, match="choose another directory"):
        open_store(tmp_path / "file")
    with pytest.raises(StorageFailed, match="choose another directory"):
        open_store(tmp_path / "file" / "data")


@pytest.mark.parametrize("operation", ["open", "mkdir", "listdir", "pwritev"])
@pytest.mark.parametrize(("code", "advice"), [(13, "give the user"), (30, "mount the file system for writing")])
def test_missing_rights_are_named(tmp_path: Path, operation: str, code: int, advice: str) -> None:
    disk = FakeDisk("boot-1")
    disk.fail_always(operation, code)
    with pytest.raises(StorageFailed, match=advice):
        open_store(tmp_path / "data", disk)


def test_a_tail_that_cannot_be_written_again_is_not_served(tmp_path: Path) -> None:
    sender = killed(tmp_path)
    disk = FakeDisk()
    disk.fail_always("pwritev", errno.EIO, "messages")
    with pytest.raises(StorageFailed, match="write again"):
        open_store(tmp_path, disk)
    disk.heal()
    store = open_store(tmp_path, disk)
    check_stored(store, sender.sent)
    kill(store)


def test_a_full_disk_after_kill_is_served_and_takes_sends_again_when_there_is_room(tmp_path: Path) -> None:
    sender = killed(tmp_path, 600, 50)
    kill(open_store(tmp_path, FakeDisk()))
    for index in tmp_path.glob("log-0/*.index"):
        index.unlink()
    disk = FakeDisk()
    disk.full = True
    store = open_store(tmp_path, disk)
    check_stored(store, sender.sent)
    again = Sender(store)
    with pytest.raises(StorageFull):
        again.send("a.0", b"x" * 20_000)
    again.take_back()
    with pytest.raises(StorageFull):
        checkpoint(store)
    disk.full = False
    again.send("a.0", b"x")
    check_stored(store, sender.sent + again.sent)
    close_cleanly(store)
    verified(tmp_path)


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="raise it to"):
        Store.open(tmp_path, replace(options(), max_frame_bytes=1 << 20), Disk(), NOW_US)
