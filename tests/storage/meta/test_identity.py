"""Who a directory is: two copies, of which one is enough."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from qmq.errors import BadBytes, StorageFailed, StorageFull
from qmq.format.layout import MAX_POSITION_BASE
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.envelope import FileState
from qmq.storage.meta.identity import (
    COPY_NAMES,
    Identity,
    IdentityCopy,
    IdentityFile,
    PartitionIdentity,
    add_partitions,
    latest,
    new_identity,
    read_copies,
)
from tests.fake_disk import FakeDisk


def make(partitions: int = 1) -> Identity:
    return new_identity(
        Disk(),
        store_id=b"\x7f\0\0\1Qp",
        directories=[f"log-{number}" for number in range(partitions)],
        reserve_bytes=1_000,
        now_us=77,
        boot_id="boot",
    )


def copies(path: Path) -> list[Identity | None]:
    return [copy.identity for copy in read_copies(Disk(), path)]


def test_a_new_identity_begins_at_random_places() -> None:
    one, other = make(2), make(2)
    places = [part.floor for identity in (one, other) for part in identity.partitions]
    assert len(set(places)) == 4
    assert all(0 <= place < MAX_POSITION_BASE and place % 4_096 == 0 for place in places)
    assert all(part.reserve == part.floor + 1_000 for part in one.partitions)
    assert one.secret != other.secret
    assert len(one.secret) == 16
    assert (one.store_id, one.created_at_us, one.boot_id, one.clean) == (b"\x7f\0\0\1Qp", 77, "boot", False)


def test_added_partitions_come_behind(tmp_path: Path) -> None:
    one = make()
    two = add_partitions(Disk(), one, ["/elsewhere"], 50)
    assert two.partitions[0] == one.partitions[0]
    assert (two.partitions[1].directory, two.partitions[1].reserve) == ("/elsewhere", two.partitions[1].floor + 50)


def test_what_is_changed_is_in_both_copies(tmp_path: Path) -> None:
    file = IdentityFile(FakeDisk(), tmp_path, make())
    changed = file.change(lambda identity: replace(identity, sequence_base=2**63, clean=True))
    assert changed.generation == 1
    assert copies(tmp_path) == [changed, changed] == [file.current] * 2
    file.mark_clean()
    assert file.current.generation == 2


def test_the_later_of_two_copies_counts(tmp_path: Path) -> None:
    older = make()
    newer = replace(older, generation=5)
    good = [IdentityCopy(FileState.GOOD, identity, "") for identity in (older, newer)]
    bad = IdentityCopy(FileState.ROTTEN, None, "rotten")
    assert latest(good[0], good[1]) == latest(good[1], good[0]) == newer
    assert latest(good[0], bad) == latest(bad, good[0]) == older
    with pytest.raises(BadBytes, match="rotten; rotten"):
        latest(bad, bad)


@pytest.mark.parametrize("change", [{"store_id": b"other!"}, {"secret": bytes(16)}])
def test_copies_of_two_stores_are_refused(change: dict[str, bytes]) -> None:
    one = make()
    pair = [IdentityCopy(FileState.GOOD, identity, "") for identity in (one, replace(one, **change))]  # type: ignore[arg-type]
    with pytest.raises(BadBytes, match="different stores"):
        latest(*pair)


@pytest.mark.parametrize("operation", ["open", "pwritev", "fsync", "rename", "fsync_directory"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_change_that_fails_is_not_current_and_a_copy_stays_good(tmp_path: Path, operation: str, nth: int) -> None:
    disk = FakeDisk("boot-1")
    file = IdentityFile(disk, tmp_path, make())
    before = file.change(lambda identity: identity)
    disk.fail(operation, nth)
    with pytest.raises(StorageFailed):
        file.change(lambda identity: replace(identity, sequence_base=9))
    assert file.current == before
    found = [identity for identity in copies(tmp_path) if identity is not None]
    assert len(found) == 2
    assert {identity.generation for identity in found} <= {1, 2}
    assert file.change(lambda identity: replace(identity, sequence_base=9)).sequence_base == 9
    assert len(set(map(repr, copies(tmp_path)))) == 1


def test_a_full_disk_has_room_where_the_copies_stand(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    file = IdentityFile(disk, tmp_path, make())
    disk.fail_always("pwritev", path_part=".tmp")
    with pytest.raises(StorageFull):
        file.change(lambda identity: identity)  # there are no copies yet
    disk.heal()
    file.change(lambda identity: replace(identity, boot_id="a long one" * 20))
    disk.fail_always("pwritev", path_part=".tmp")
    file.mark_clean()
    file.forget_boot()
    a, b = read_copies(disk, tmp_path)
    assert a.identity == b.identity == file.current
    assert (file.current.boot_id, file.current.clean) == ("", True)
    for nth in (1, 2):  # torn where it stands: the other copy is enough
        disk.heal()
        disk.fail_always("open", path_part=".tmp")
        disk.fail("ftruncate", nth)
        before = file.current
        with pytest.raises(StorageFailed):
            file.change(lambda identity: replace(identity, boot_id="another"))
        assert file.current == before
        found = latest(*read_copies(disk, tmp_path))
        assert found.store_id == before.store_id
    disk.heal()
    assert disk.still_open() == []


@pytest.mark.parametrize("bad", COPY_NAMES)
@pytest.mark.parametrize("is_started_again", [False, True])
def test_a_torn_copy_is_written_before_the_good_one(tmp_path: Path, bad: str, is_started_again: bool) -> None:
    disk = FakeDisk("boot-1")
    file = IdentityFile(disk, tmp_path, make())
    before = file.change(lambda identity: replace(identity, boot_id="a long one" * 20))
    disk.fail_always("pwritev", path_part=".tmp")  # the disk is full
    for failing, shorter in ((bad, "short" * 9), ("store-", "short" * 5), ("store-", "short")):
        disk.fail_always("ftruncate", errno.EIO, failing)  # torn where it stands, with the end of the longer one
        with pytest.raises(StorageFailed):
            file.change(lambda identity, boot_id=shorter: replace(identity, boot_id=boot_id))  # type: ignore[misc]
        assert [copy is None for copy in copies(tmp_path)] == [name == bad for name in COPY_NAMES]
        if is_started_again:
            file = IdentityFile(disk, tmp_path, latest(*read_copies(disk, tmp_path)), bad)
    assert latest(*read_copies(disk, tmp_path)).store_id == before.store_id
    disk.heal()
    made = file.change(lambda identity: replace(identity, boot_id="short"))
    assert copies(tmp_path) == [made, made]


def test_a_copy_that_lacks_a_field_is_rotten(tmp_path: Path) -> None:
    IdentityFile(FakeDisk(), tmp_path, make()).change(lambda identity: replace(identity, partitions=()))
    assert [copy.state for copy in read_copies(Disk(), tmp_path)] == [FileState.ROTTEN] * 2
    assert "lacks a field" in read_copies(Disk(), tmp_path)[0].reason


def test_reserves_are_renewed_when_half_is_used_and_never_go_back(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    file = IdentityFile(disk, tmp_path, make(2))
    floors = [part.floor for part in file.current.partitions]
    assert file.renew([floors[0] + 499, floors[1]], 1_000).generation == 0
    assert disk.calls["rename"] == 0
    renewed = file.renew([floors[0] + 500, floors[1] + 3], 1_000)
    assert [part.reserve for part in renewed.partitions] == [floors[0] + 1_500, floors[1] + 1_003]
    assert copies(tmp_path) == [renewed, renewed]
    again = file.renew([floors[0], floors[1] + 600], 1_000)
    assert [part.reserve for part in again.partitions] == [floors[0] + 1_500, floors[1] + 1_600]


def test_changes_from_two_threads_are_one_after_the_other(tmp_path: Path) -> None:
    file = IdentityFile(FakeDisk(), tmp_path, make())

    def add() -> None:
        for _ in range(20):
            file.change(lambda identity: replace(identity, sequence_base=identity.sequence_base + 1))

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.current.sequence_base == file.current.generation == 40
    assert copies(tmp_path) == [file.current] * 2


def test_the_files_are_where_the_layout_says(tmp_path: Path) -> None:
    IdentityFile(FakeDisk(), tmp_path, make()).change(lambda identity: identity)
    assert sorted(file.name for file in tmp_path.iterdir()) == list(COPY_NAMES)
    assert PartitionIdentity._fields == ("floor", "reserve", "directory")
