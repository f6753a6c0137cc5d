"""The files of groups in a data directory: claimed, checked, repaired, kept while a checkpoint knows them; and errors
of the system.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from qmq.errors import StorageError, StorageFailed, SyncFailed
from qmq.format.layout import RETRY_SIZE, SCHEDULE_HEADER_SIZE
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log import item_file, sorted_runs, timer_queue
from qmq.storage.error_log.item_file import ItemLog, ItemLogClaim
from qmq.storage.error_log.items import RETRY_ITEMS, Items
from qmq.storage.error_log.timer_queue import Schedule, ScheduleClaim
from qmq.storage.meta.identity import read_copies
from qmq.storage.store import Store
from qmq.storage.verify.groups import SET_ASIDE
from qmq.storage.verify.repair import Outcome, repair
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk
from tests.sim.disk import SimulatedDisk
from tests.storage.stores import NOW_US, checkpoint, close_cleanly, kill, open_store, verified

#: These tests are long, and other tests cover the same lines: without coverage they run several times as fast.
pytestmark = pytest.mark.no_cover

GROUP: Final = 5
ITEMS: Final = 50
RETRIES: Final = f"groups/{GROUP:x}/retries/00000000"
DEAD: Final = f"groups/{GROUP:x}/dead/00000000"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_queue, "MEMORY_ITEMS", 40)
    monkeypatch.setattr(timer_queue, "MOST_BLOCKS", 1 << 40)
    monkeypatch.setattr(sorted_runs, "BLOCK_ITEMS", 7)
    monkeypatch.setattr(item_file, "MEMORY_ITEMS", 40)


def items_of(count: int, start: int = 1) -> Items:
    items = np.zeros(count, RETRY_ITEMS)
    items["number"] = items["due_us"] = np.arange(start, start + count)
    items["reason"] = [b"order %d is not there; " % (number % 12) * 5 for number in range(start, start + count)]
    return items


class Kept:
    """A store with one group, and the claims of its checkpoints."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path = path
        self.open(disk)
        self.retries.push(items_of(ITEMS))
        self.dead.add(items_of(ITEMS))
        assert len(self.retries.runs()) == len(self.dead.runs()) == 1
        self.say(1)

    def open(self, disk: Disk | None = None) -> list[bytes]:
        """Open the store as a broker does after a checkpoint; return the records behind that."""
        self.store: Store = open_store(self.path, disk if disk is not None else FakeDisk())
        self.retries: Schedule = self.store.groups.retries(GROUP)
        self.dead: ItemLog = self.store.groups.dead(GROUP)
        return [bytes(record.payload) for record in self.store.groups.take_records()]

    def say(self, *numbers: int) -> None:
        for number in numbers:
            self.store.groups.stage(1, b"record %d" % number)
        self.store.groups.write()

    def claims(self) -> tuple[ScheduleClaim, ItemLogClaim]:
        return self.retries.claim(), self.dead.claim()

    def reopened(self, claims: tuple[ScheduleClaim, ItemLogClaim], disk: Disk | None = None) -> None:
        self.open(disk)
        self.retries.restore(claims[0])
        self.dead.restore(claims[1])

    def numbers(self) -> tuple[list[int], list[int]]:
        """Return the numbers of retries and of dead letters."""
        due = self.retries.pop(1 << 60, 1_000)["number"].tolist()
        return due, [number for items in self.dead.after(0) for number in items["number"].tolist()]


def spoil(path: Path, *bits: int) -> None:
    data = bytearray(path.read_bytes())
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def places(path: Path) -> set[tuple[str, int | None]]:
    found = verify(path, Disk()).findings
    return {(str(one.file.relative_to(path)), one.position) for one in found if one.severity == "fault"}


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Kept, tuple[ScheduleClaim, ItemLogClaim]]:
    made = Kept(tmp_path / "data")
    claims = made.claims()
    close_cleanly(made.store)
    verified(made.path)
    return made, claims


@pytest.mark.parametrize("name", [f"{RETRIES}.a", f"{RETRIES}.b", f"{DEAD}.a", f"{DEAD}.b"])
def test_a_flipped_bit_in_one_copy_is_found_and_mended(
    kept: tuple[Kept, tuple[ScheduleClaim, ItemLogClaim]], name: str
) -> None:
    made, claims = kept
    file = made.path / name
    whole, tried = file.read_bytes(), 0
    for bit in range(0, 8 * len(whole), 4001):
        spoil(file, bit)
        item = (bit // 8 - SCHEDULE_HEADER_SIZE) // RETRY_SIZE
        position = 0 if item < 0 else SCHEDULE_HEADER_SIZE + item * RETRY_SIZE
        assert places(made.path) == {(name, position)}, bit
        assert repair(made.path, FakeDisk(), NOW_US).is_whole
        assert file.read_bytes() == whole
        tried += 1
    assert tried > 10
    verified(made.path)
    made.reopened(claims)
    assert made.numbers() == (list(range(1, ITEMS + 1)),) * 2
    kill(made.store)


@pytest.mark.parametrize("spoiled", [lambda path: path.unlink(), lambda path: os.truncate(path, 700)])
@pytest.mark.parametrize("name", [f"{RETRIES}.a", f"{DEAD}.b"])
def test_a_copy_that_is_cut_or_gone_is_made_again(
    kept: tuple[Kept, tuple[ScheduleClaim, ItemLogClaim]], name: str, spoiled: Callable[[Path], object]
) -> None:
    made, _ = kept
    whole = (made.path / name).read_bytes()
    spoiled(made.path / name)
    assert {file for file, _ in places(made.path)} == {name}
    assert repair(made.path, FakeDisk(), NOW_US).is_whole
    assert (made.path / name).read_bytes() == whole
    verified(made.path)


def test_items_that_are_rotten_in_both_copies_are_set_aside_and_reported(
    kept: tuple[Kept, tuple[ScheduleClaim, ItemLogClaim]],
) -> None:
    made, claims = kept
    position = SCHEDULE_HEADER_SIZE + 9 * RETRY_SIZE
    for name in (RETRIES, DEAD):
        for copy in "ab":
            spoil(made.path / f"{name}.{copy}", 8 * (position + 30))
    spoil(made.path / f"{RETRIES}.a", 8 * (position + RETRY_SIZE))  # the next one, which the other copy has
    done = repair(made.path, FakeDisk(), NOW_US)
    assert not done.is_whole
    lost = {one.finding.position for one in done.treated if one.outcome is Outcome.GIVEN_UP}
    assert lost == {position}
    verified(made.path)
    aside = sorted(str(path.relative_to(made.path)) for path in made.path.rglob(f"*{SET_ASIDE}"))
    assert aside == sorted(f"{name}.{copy}{SET_ASIDE}" for name in (RETRIES, DEAD) for copy in "ab")
    made.reopened(claims)
    left = [number for number in range(1, ITEMS + 1) if number != 10]
    assert made.numbers() == (left, left)
    kill(made.store)


def test_a_running_broker_reports_items_that_are_rotten_in_both_copies(
    kept: tuple[Kept, tuple[ScheduleClaim, ItemLogClaim]],
) -> None:
    made, claims = kept
    for copy in "ab":
        spoil(made.path / f"{RETRIES}.{copy}", 8 * (SCHEDULE_HEADER_SIZE + 9 * RETRY_SIZE + 3))
    made.reopened(claims)
    assert made.numbers()[0] == [number for number in range(1, ITEMS + 1) if number != 10]
    (told,) = made.store.groups.take_damaged()
    assert f"{made.path / RETRIES}.a" in str(told)
    assert f"at byte {SCHEDULE_HEADER_SIZE + 9 * RETRY_SIZE}" in str(told)
    assert made.store.groups.take_damaged() == []
    kill(made.store)


def test_a_repair_leaves_records_to_the_broker(tmp_path: Path) -> None:
    made = Kept(tmp_path / "data")
    checkpoint(made.store)
    made.say(2, 3)
    kill(made.store)
    spoil(made.path / f"{RETRIES}.a", 8 * 100)
    assert repair(made.path, FakeDisk(), NOW_US).is_whole
    assert made.open() == [b"record 2", b"record 3"]
    kill(made.store)


def test_runs_that_the_checkpoint_before_knows_are_kept_over_a_start(tmp_path: Path) -> None:
    made = Kept(tmp_path / "data")
    claims = made.claims()
    checkpoint(made.store)
    kill(made.store)
    made.reopened(claims)
    made.retries.clear()
    checkpoint(made.store)
    assert (made.path / f"{RETRIES}.a").exists(), "should the last checkpoint rot, the one before needs it"
    checkpoint(made.store)
    assert not (made.path / f"{RETRIES}.a").exists()
    close_cleanly(made.store)
    verified(made.path)


def test_pull_files_are_kept_for_the_checkpoint_before(tmp_path: Path) -> None:
    made = Kept(tmp_path / "data")
    checkpoint(made.store)
    made.say(2, 3)
    checkpoint(made.store)
    kill(made.store)
    max(made.path.glob("checkpoint-*")).unlink()
    assert made.open() == [b"record 2", b"record 3"]
    kill(made.store)


# --- the system refuses ----------------------------------------------------------------------------------------------


def test_after_a_failed_sync_nothing_is_confirmed_and_checkpoints_go_on(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    made = Kept(tmp_path / "data", disk)
    checkpoint(made.store)
    made.say(2)
    disk.fail_always("fdatasync", errno.EIO, "pulls")
    begun = made.store.begin_checkpoint({})
    with pytest.raises(SyncFailed, match=r"pulls.*restarted"):
        begun.write()
    made.store.fail_checkpoint(begun, SyncFailed("it has failed"))
    disk.heal()
    assert made.store.groups.broken
    with pytest.raises(SyncFailed):
        made.say(3)
    checkpoint(made.store)  # it has all that the records say, so it may be taken
    kill(made.store)
    assert made.open() == []
    kill(made.store)


def fail_to_take_a_checkpoint(store: Store) -> StorageError:
    begun = store.begin_checkpoint({})
    with pytest.raises(StorageError) as caught:
        begun.write()
    store.fail_checkpoint(begun, caught.value)
    return caught.value


@pytest.mark.parametrize("seed", range(4))
def test_the_next_start_takes_it_that_records_of_a_failed_sync_may_be_gone(seed: int) -> None:
    """They read well until they leave memory, and an acknowledgement that was confirmed may be among them."""
    disk = SimulatedDisk(seed)
    made = Kept(Path("/data"), disk)
    checkpoint(made.store)
    generation = made.store.groups.generation
    made.say(2)
    disk.fail_always("fdatasync", errno.EIO, "pulls")
    assert "pulls" in str(fail_to_take_a_checkpoint(made.store))
    disk.heal()
    disk.stop(power=False, evict=True)
    assert made.open(disk) in ([], [b"record 2"])
    assert made.store.groups.generation > generation


def test_the_next_checkpoint_notes_what_could_not_be_noted_when_a_sync_failed() -> None:
    disk = SimulatedDisk(1)
    made = Kept(Path("/data"), disk)
    checkpoint(made.store)
    made.say(2)
    disk.fail_always("fdatasync", errno.EIO, "pulls")
    disk.fail_always("rename", errno.EIO, "store-a")
    fail_to_take_a_checkpoint(made.store)
    disk.heal()
    checkpoint(made.store)
    assert [copy.identity.boot_id for copy in read_copies(disk, made.path) if copy.identity is not None] == ["", ""]


@pytest.mark.parametrize("seed", range(4))
def test_runs_whose_syncs_have_failed_are_on_disk_when_a_checkpoint_claims_them(seed: int) -> None:
    """The next sync of a file succeeds, and brings nothing of what the one before left in memory."""
    disk = SimulatedDisk(seed)
    made = Kept(Path("/data"), disk)
    for copy in (".a", ".b"):
        disk.fail_always("fdatasync", errno.EIO, copy)
        assert f"00000000{copy}" in str(fail_to_take_a_checkpoint(made.store))
        disk.heal()
    checkpoint(made.store)
    claims = made.claims()
    disk.stop(power=True)
    report = verify(made.path, disk)
    assert report.is_good, "\n".join(map(str, report.findings))
    made.reopened(claims, disk)
    assert made.numbers() == (list(range(1, ITEMS + 1)),) * 2


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_items_that_cannot_be_read_now_are_read_later(tmp_path: Path, code: int) -> None:
    disk = FakeDisk("boot-1")
    made = Kept(tmp_path / "data", disk)
    made.retries.pop(5, 100)
    disk.fail_always("open", code, "groups")
    first = made.retries.pop(100, 100)["number"].tolist()
    assert len(first) < ITEMS - 5
    assert made.store.groups.take_damaged()
    with pytest.raises(StorageFailed):
        list(made.dead.after(0))
    disk.heal()
    assert first + made.retries.pop(10_000_000, 100)["number"].tolist() == list(range(6, ITEMS + 1))
    kill(made.store)


@pytest.mark.parametrize("operation", ["open", "pwritev", "mkdir"])
def test_items_stay_in_memory_when_no_run_can_be_made(tmp_path: Path, operation: str) -> None:
    disk = FakeDisk("boot-1")
    store = open_store(tmp_path / "data", disk)
    disk.fail_always(operation, errno.ENOSPC, "groups")
    retries, dead = store.groups.retries(GROUP), store.groups.dead(GROUP)
    for start in range(1, 100, 3):
        retries.push(items_of(3, start))
        dead.add(items_of(3, start))
    assert store.groups.take_damaged()
    assert not [path for path in (tmp_path / "data" / "groups").rglob("*") if path.is_file()]
    disk.heal()
    retries.push(items_of(20, 100))
    dead.add(items_of(20, 100))
    assert retries.runs()
    assert dead.runs()
    assert retries.pop(1 << 60, 1_000)["number"].tolist() == list(range(1, 120))
    assert [number for items in dead.after(0) for number in items["number"].tolist()] == list(range(1, 120))
    kill(store)


@pytest.mark.parametrize("log", ["retries", "dead"])
@pytest.mark.parametrize("made", ["beside the first", "beside a later one"])
def test_a_run_that_is_made_while_a_checkpoint_is_written_stays(tmp_path: Path, log: str, made: str) -> None:
    """A checkpoint removes old runs while a new one is made that it does not know."""
    kept = Kept(tmp_path / "data")
    if made == "beside a later one":
        checkpoint(kept.store)
        checkpoint(kept.store)
    under_way = kept.store.begin_checkpoint({})
    if log == "dead":
        kept.dead.add(items_of(ITEMS))
    else:
        kept.retries.push(items_of(ITEMS, ITEMS + 1))
    under_way.write()
    kept.store.finish_checkpoint(under_way)
    checkpoint(kept.store)
    expected = list(range(1, 2 * ITEMS + 1))
    due, dead = kept.numbers()
    assert (dead if log == "dead" else due) == expected
    assert kept.store.groups.take_damaged() == []
    close_cleanly(kept.store)
    verified(kept.path)


def test_runs_of_a_life_before_that_no_checkpoint_knows_are_removed(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "data")
    checkpoint(kept.store)
    claims = kept.claims()
    kept.dead.add(items_of(3 * ITEMS))
    kill(kept.store)
    assert len(list((kept.path / DEAD).parent.iterdir())) == 4
    kept.reopened(claims)
    checkpoint(kept.store)
    assert len(list((kept.path / DEAD).parent.iterdir())) == 2
    close_cleanly(kept.store)
    verified(kept.path)
