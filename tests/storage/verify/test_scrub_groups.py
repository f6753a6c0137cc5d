"""The scrub of files of groups names rot by file and position."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from qmq.errors import BadBytes, StorageFailed
from qmq.format.layout import PULL_FILE_HEADER_SIZE, RETRY_SIZE, SCHEDULE_HEADER_SIZE
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log import item_file, sorted_runs, timer_queue
from qmq.storage.store import Store
from qmq.storage.verify import scrub
from qmq.storage.verify.scrub import GroupReader, PullReader, group_readers
from tests.fake_disk import FakeDisk
from tests.storage.error_log.test_group_files import DEAD, GROUP, ITEMS, RETRIES, items_of
from tests.storage.stores import checkpoint, open_store

RECORD_BYTES: Final = 2_412


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_queue, "MEMORY_ITEMS", 40)
    monkeypatch.setattr(timer_queue, "MOST_BLOCKS", 1 << 40)
    monkeypatch.setattr(sorted_runs, "BLOCK_ITEMS", 7)
    monkeypatch.setattr(item_file, "MEMORY_ITEMS", 40)
    monkeypatch.setattr(scrub, "READ_BYTES", 1_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with a run of each kind and a full file of the pull log."""
    made = filled(tmp_path)
    yield made
    made.close(clean=False)


def filled(path: Path, disk: Disk | None = None) -> Store:
    store = open_store(path, disk if disk is not None else FakeDisk())
    store.groups.take_records()
    store.groups.retries(GROUP).push(items_of(ITEMS))
    store.groups.dead(GROUP).add(items_of(ITEMS))
    while not store.groups.pull_log.full:
        store.groups.stage(1, b"a record" * 300)  # RECORD_BYTES with its header
        store.groups.write()
    return store


def read(reader: GroupReader) -> list[BadBytes]:
    """Return all that is bad in a file."""
    while not (step := reader.step()).is_last:
        assert not step.found
    reader.close()
    return list(step.found)


def scrubbed(store: Store) -> list[str]:
    """Run one round; return what it reports."""
    readers = [reader for make in group_readers(store.groups) if (reader := make()) is not None]
    return [str(bad) for reader in readers for bad in read(reader)]


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def pull_file(store: Store, path: Path) -> Path:
    ((base, _),) = store.groups.pull_log.full
    return path / "pulls" / f"{base:016x}.pulls"


def test_nothing_is_reported_about_good_files(store: Store) -> None:
    assert len(group_readers(store.groups)) == 3
    assert scrubbed(store) == []


@pytest.mark.parametrize("run", [RETRIES, DEAD])
@pytest.mark.parametrize("copy", ["a", "b"])
def test_an_item_that_is_rotten_in_one_copy(store: Store, tmp_path: Path, run: str, copy: str) -> None:
    path = tmp_path / f"{run}.{copy}"
    for item in (7, 8, ITEMS - 1):
        flip(path, SCHEDULE_HEADER_SIZE + item * RETRY_SIZE + 5)
    first, second = scrubbed(store)
    start = SCHEDULE_HEADER_SIZE + 7 * RETRY_SIZE
    assert first.startswith(f"{path} is rotten at bytes {start} to {start + 2 * RETRY_SIZE}; ")
    assert second.startswith(f"{path} is rotten at bytes {SCHEDULE_HEADER_SIZE + (ITEMS - 1) * RETRY_SIZE} to ")


@pytest.mark.parametrize("run", [RETRIES, DEAD])
def test_an_item_that_is_rotten_in_both_copies_is_reported_as_its_readers_do(
    store: Store, tmp_path: Path, run: str
) -> None:
    place = SCHEDULE_HEADER_SIZE + 20 * RETRY_SIZE
    for copy in "ab":
        flip(tmp_path / f"{run}.{copy}", place + 5)
    (told,) = scrubbed(store)
    assert f"{run}.a and " in told
    assert f"both rotten at byte {place}" in told
    owner = store.groups._owners[(tmp_path / run).parent]
    items = owner.pop(ITEMS, ITEMS) if isinstance(owner, timer_queue.Schedule) else list(owner.after(0))
    assert len(items)
    assert told in [str(error) for error in store.groups.take_damaged()]


def test_a_rotten_header_and_a_file_that_is_gone_or_cut(store: Store, tmp_path: Path) -> None:
    flip(tmp_path / f"{RETRIES}.b", 20)
    (tmp_path / f"{DEAD}.a").unlink()
    gone, header = sorted(scrubbed(store), key=lambda told: "is gone" not in told)
    assert f"the header of {tmp_path / RETRIES}.b is not what was written" in header
    assert gone.startswith(f"{tmp_path / DEAD}.a is gone; ")
    slots = ((tmp_path / f"{DEAD}.b").stat().st_size - SCHEDULE_HEADER_SIZE) // RETRY_SIZE
    assert slots > ITEMS, "some are of reasons"
    os.truncate(tmp_path / f"{DEAD}.b", SCHEDULE_HEADER_SIZE + 10 * RETRY_SIZE)
    assert sum(f"{DEAD}.a and " in told for told in scrubbed(store)) == slots - 10


def test_a_run_that_is_merged_or_forgotten_meanwhile_is_none(store: Store, tmp_path: Path) -> None:
    makers = group_readers(store.groups)
    readers = [reader for make in makers if (reader := make()) is not None]
    for name in (RETRIES, DEAD):
        for copy in "ab":
            (tmp_path / f"{name}.{copy}").unlink()
    pull_file(store, tmp_path).unlink()
    store.groups.forget(GROUP)
    assert [bad for reader in readers for bad in read(reader)] == []
    assert [make() is None for make in makers] == [True, True, False]


def test_the_first_bad_byte_of_the_pull_log_is_reported_until_checkpoints_pass_it(store: Store, tmp_path: Path) -> None:
    path = pull_file(store, tmp_path)
    for record in (3, 2):
        flip(path, PULL_FILE_HEADER_SIZE + record * RECORD_BYTES + 50)
        (told,) = scrubbed(store)
        assert told.startswith(f"{path} is rotten at byte {PULL_FILE_HEADER_SIZE + record * RECORD_BYTES}, ")
    for _ in range(4):
        store.groups.stage(1, b"one more")
        store.groups.write()
        checkpoint(store)
    assert store.groups.pull_log.full == []
    assert not path.exists()


def test_a_record_that_is_longer_than_one_read(tmp_path: Path) -> None:
    store = open_store(tmp_path, FakeDisk())
    store.groups.take_records()
    while not store.groups.pull_log.full:
        store.groups.stage(2, os.urandom(9_000))
        store.groups.write()
    assert scrubbed(store) == []
    store.close(clean=False)


def test_errors_of_the_system_are_no_rot(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    store = filled(tmp_path, disk)
    ((base, end),) = store.groups.pull_log.full
    reader = PullReader(disk, tmp_path / "pulls", base, end, store.secret)
    disk.strike(24, 0, lasting=True)  # EMFILE
    with pytest.raises(StorageFailed, match=r"pulls"):
        reader.step()
    disk.heal()
    reader.close()
    store.close(clean=False)
