"""Runs: files of items in an order, written once and then read, of timer_queue.py and item_file.py.

A run is written twice (``.a`` and ``.b``): an item that is rotten in one file is read from the other. Only a block of
each run is in memory.

    header (64): magic 8s | version u16 | slot size u16 | store_id 6s | reserved 6s | number u64 | slots u64 |
                 reserved 20s | crc32c u32 (of the 60 bytes before)
    slots:       the items, then their reasons (items.py)

The checkpoint has what was taken of each run, and the items that are in no run.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from qmq.errors import BadBytes, StorageError
from qmq.format.layout import SCHEDULE_HEADER, SCHEDULE_HEADER_SIZE, SCHEDULE_MAGIC, SCHEDULE_VERSION
from qmq.format.versions import check_version
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure, read_around, write_fully
from qmq.storage.disk.fsync import SureSync
from qmq.storage.error_log.items import (
    CRC_SIZE,
    LOST_REASON,
    Form,
    Items,
    in_memory,
    reason_in,
    slots_of_reason,
    sound,
    to_slots,
    with_reasons,
)
from qmq.storage.meta.identity import COPY_NAMES

#: The suffixes of the two files of a run.
SUFFIXES: Final = (".a", ".b")
#: Items of a run that are in memory at once.
BLOCK_ITEMS: Final = 128
#: Bytes behind a block that the system reads ahead.
_AHEAD_BYTES: Final = 64 << 10
_CHECKED: Final = SCHEDULE_HEADER_SIZE - 4
#: Directory levels from an owner's up to the store's.
_MOST_LEVELS: Final = 3


class RunClaim(NamedTuple):
    """The state of a run in a checkpoint."""

    number: int
    items: int
    taken: int
    #: Those of the items, and of their reasons.
    slots: int


def run_paths(directory: Path, number: int) -> tuple[Path, Path]:
    """Return the two files of run *number*."""
    first, second = SUFFIXES
    return directory / f"{number:08x}{first}", directory / f"{number:08x}{second}"


def run_number(name: str) -> int | None:
    """Return the run number in a file name; None when it is not the name of a run."""
    stem, _, copy = name.partition(".")
    if copy in ("a", "b") and len(stem) == 8 and all(digit in "0123456789abcdef" for digit in stem):
        return int(stem, 16)
    return None


def both_rotten(first: Path, second: Path, offset: int) -> str:
    """Return the text about an item that is rotten in both files of a run."""
    return (
        f"{first} and {second.name} are both rotten at byte {offset}: which messages were to be handed out again, or "
        "were dead, or why they were, is lost there; stop the broker, run qmq repair, and check the disk"
    )


def write_run(disk: Disk, directory: Path, store_id: bytes, number: int, items: Items, form: Form) -> int:
    """Write a run, twice; nothing is synced. Return how many slots it has. Raises StorageFull or StorageFailed; no file
    is left then.
    """
    _make_directory(disk, directory)
    data = to_slots(items, form)
    slots = len(data) // form.itemsize
    for path in run_paths(directory, number):
        fd = -1
        try:
            fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            write_fully(disk, fd, [pack_run_header(store_id, form.itemsize, number, slots), data], 0)
        except OSError as error:
            _remove(disk, directory, number)
            raise failure(error, "write", path) from error
        finally:
            if fd >= 0:
                disk.close(fd)
    return slots


def _make_directory(disk: Disk, path: Path) -> None:
    missing = []
    while not disk.exists(path):
        missing.append(path)
        path = path.parent
    try:
        for made in reversed(missing):
            disk.mkdir(made)
    except OSError as error:
        raise failure(error, "make a directory below", path) from error


def pack_run_header(store_id: bytes, slot_size: int, number: int, slots: int) -> bytes:
    """Return the header of a run."""
    draft = SCHEDULE_HEADER.pack(
        SCHEDULE_MAGIC, SCHEDULE_VERSION, slot_size, store_id, bytes(6), number, slots, bytes(20), 0
    )
    return draft[:_CHECKED] + crc32c(draft[:_CHECKED]).to_bytes(4, "little")


def check_run_header(data: bytes, path: Path, store_id: bytes, slot_size: int, number: int) -> int:
    """Return how many slots the file has. Raises BadBytes, or ForeignFile for a newer version."""
    if len(data) < SCHEDULE_HEADER_SIZE:
        raise BadBytes(f"{path} is shorter than its header")
    magic, version, size, found_id, _, found, slots, _, crc = SCHEDULE_HEADER.unpack(data)
    if magic != SCHEDULE_MAGIC or crc32c(data[:_CHECKED]) != crc:
        raise BadBytes(f"the header of {path} is not what was written")
    check_version(path, version, SCHEDULE_VERSION)
    if (size, found_id, found) != (slot_size, store_id, number):
        raise BadBytes(f"{path} was written as another file (store {found_id.hex()}, number {found})")
    return int(slots)


def _remove(disk: Disk, directory: Path, number: int) -> None:
    for path in run_paths(directory, number):
        with suppress(OSError):
            disk.unlink(path)


class SortedRun:
    """A run that is read: items [0, items), the first ``taken`` of which are taken out."""

    def __init__(self, disk: Disk, directory: Path, form: Form, claim: RunClaim, damaged: list[StorageError]) -> None:
        """*form* is that of the items on disk. Rot that is found is added to *damaged*."""
        self._disk = disk
        self._directory = directory
        self._form = form
        self.number, self.items, self.taken, self.slots = claim
        self._block: Items = np.empty(0, in_memory(form))
        self._start = 0  # the number of the block's first item
        #: How often ``head`` has read a block.
        self.blocks_read = 0
        self._damaged = damaged

    def head(self) -> Items | None:
        """Return the next item, as an array of one; None when none is left. Raises StorageFailed."""
        while self.taken < self.items:
            at = self.taken - self._start
            if not 0 <= at < len(self._block):
                self.blocks_read += 1
                self._block, self._start, at = self.read(self.taken), self.taken, 0
            if int(self._block["number"][at]):
                return self._block[at : at + 1]
            self.taken += 1  # neither file has it
        return None

    def read(self, start: int) -> Items:
        """Return the items from number *start* on, a block at most; rotten ones have the number 0.

        Raises StorageFailed when the system refuses to read items that may be good.
        """
        rows, _ = self._read_slots(start, min(BLOCK_ITEMS, self.items - start))
        if "reason" not in (self._form.names or ()):
            return rows
        numbers = rows["reason"].tolist()
        known = dict.fromkeys(numbers, LOST_REASON) | {0: b""}
        named = [number for number in known if self.items <= number < self.slots]
        if named:
            first = min(named)
            end = min(max(named) + slots_of_reason(self._form.itemsize - CRC_SIZE), self.slots)
            slots, lost = self._read_slots(first, end - first)
            known |= {number: reason_in(slots, number - first, lost) for number in named}
        return with_reasons(rows, [known[number] for number in numbers])

    def _read_slots(self, start: int, count: int) -> tuple[Items, set[int]]:
        """Return *count* slots, in the form of items, and which of them are rotten in both files: these are zeros.

        Raises StorageFailed when the system refuses to read slots that may be good.
        """
        first, second = run_paths(self._directory, self.number)
        rows, refused = self._read_file(first, start, count)
        bad = np.flatnonzero(~sound(rows))
        if not len(bad):
            return rows, set()
        other, refused_too = self._read_file(second, start, count)
        rows[bad] = other[bad]
        lost = np.flatnonzero(~sound(rows))
        refused = refused or refused_too
        if len(lost) and refused is not None:
            raise refused
        self._report(first, second, (lost + start).tolist(), len(bad) - len(lost))
        rows[lost] = np.zeros(1, self._form)
        return rows, set(lost.tolist())

    def _read_file(self, path: Path, start: int, count: int) -> tuple[Items, StorageError | None]:
        """Return the slots that the file has, and the error that refused them, if it may pass."""
        size = self._form.itemsize
        data, refused = b"", None
        try:
            fd = self._disk.open(path, os.O_RDONLY)
            try:
                offset = SCHEDULE_HEADER_SIZE + start * size
                data, _ = read_around(self._disk, fd, count * size, offset)
                with suppress(OSError):
                    self._disk.will_need(fd, offset + count * size, _AHEAD_BYTES)
            finally:
                self._disk.close(fd)
        except OSError as error:
            if error.errno != errno.ENOENT and error.errno not in BAD_SECTOR:
                refused = failure(error, "read", path)
        rows = np.zeros(count, self._form)
        whole = len(data) // size
        rows[:whole] = np.frombuffer(data[: whole * size], self._form)
        rows["crc"][whole:] = 1  # no checksum of zeros
        return rows, refused

    def _report(self, first: Path, second: Path, lost: list[int], helped: int) -> None:
        size = self._form.itemsize
        for number in lost:
            self._damaged.append(BadBytes(both_rotten(first, second, SCHEDULE_HEADER_SIZE + number * size)))
        if helped:
            self._damaged.append(
                BadBytes(
                    f"{helped} items of {first} are rotten or gone; they were read from {second.name}; nothing is "
                    "lost, but check the disk; qmq repair mends the file"
                )
            )


#: The syncs of both copies of a run.
RunSyncs = tuple[SureSync, SureSync]


class RunOwner(ABC):
    """A collection of items with runs. All of it but ``RunSync.run`` belongs to one thread."""

    def __init__(self, disk: Disk, directory: Path, store_id: bytes, form: Form, damaged: list[StorageError]) -> None:
        """*form* is that of the items on disk: it begins with due_us and number and ends with crc. Nothing is read or
        written yet. Later rot, and errors of the system, are added to *damaged*.
        """
        self._disk = disk
        self._directory = directory
        self._store_id = store_id
        self._form = form
        self._memory_form = in_memory(form)
        self._damaged = damaged
        self._next_run = 0
        #: Called when it may have files from now on.
        self.gets_files: Callable[[], object] = bool
        #: The syncs of both copies of the runs that no checkpoint claims yet.
        self._unsynced: dict[int, RunSyncs] = {}

    @abstractmethod
    def _all_runs(self) -> Iterable[SortedRun]:
        """Return the runs that have items left."""

    def _add_run(self, items: Items) -> SortedRun:
        """Make a run of items. Raises StorageFull or StorageFailed; no file is left then."""
        number = self._next_run
        # Before its files exist, since another thread calls ``unclaimed``.
        self._unsynced[number] = SureSync(self._disk), SureSync(self._disk)
        self.gets_files()
        try:
            slots = write_run(self._disk, self._directory, self._store_id, number, items, self._form)
        except BaseException:
            del self._unsynced[number]
            raise
        self._next_run += 1
        return self._run(RunClaim(number, len(items), 0, slots))

    def _run(self, claim: RunClaim) -> SortedRun:
        self.gets_files()
        return SortedRun(self._disk, self._directory, self._form, claim, self._damaged)

    @property
    def slot_size(self) -> int:
        """The bytes of a slot."""
        return int(self._form.itemsize)

    def runs(self) -> dict[int, int]:
        """Return how many slots each run has, by number."""
        return {run.number: run.slots for run in self._all_runs()}

    @property
    def has_files(self) -> bool:
        """Whether there are runs, or a run has to be synced."""
        return bool(self._unsynced) or any(True for _ in self._all_runs())

    def unclaimed(self) -> set[int]:
        """[any thread] Return the runs made since the last checkpoint began: no checkpoint may claim them yet."""
        return set(self._unsynced)

    def begin_sync(self) -> RunSync:
        """Return the sync of what a checkpoint is going to claim."""
        unsynced, self._unsynced = self._unsynced, {}
        return RunSync(self._disk, self._directory, unsynced)

    def sync_failed(self, sync: RunSync) -> None:
        """Have the next checkpoint sync the same runs again: none was claimed."""
        self._unsynced |= sync.runs
        self.gets_files()


class RunSync:
    """The sync of runs that a checkpoint is going to claim."""

    def __init__(self, disk: Disk, directory: Path, runs: dict[int, RunSyncs]) -> None:
        self._disk = disk
        self._directory = directory
        self.runs = runs

    def run(self) -> None:
        """[thread] Sync the runs. Raises StorageFull or StorageFailed."""
        path = self._directory
        try:
            for number, syncs in self.runs.items():
                for path, sync in zip(run_paths(self._directory, number), syncs, strict=True):
                    fd = self._disk.open(path, os.O_RDWR)
                    try:
                        sync(fd)
                    finally:
                        self._disk.close(fd)
            for path in self._above() if self.runs else ():
                self._disk.fsync_directory(path)
        except OSError as error:
            raise failure(error, "sync", path) from error

    def _above(self) -> Iterator[Path]:
        """Yield the directory and its parents, up to the store's."""
        for path in (self._directory, *self._directory.parents[:_MOST_LEVELS]):
            yield path
            if self._disk.exists(path / COPY_NAMES[0]):
                return


def sweep(disk: Disk, directory: Path, claimed: set[int], unclaimed: Callable[[], set[int]]) -> None:
    """[thread] Remove the runs that are neither in *claimed*, by checkpoints, nor made since: *unclaimed* is called
    after the files are listed, since more may be made meanwhile. Raises StorageFailed.
    """
    try:
        names = disk.listdir(directory)
        kept = claimed | unclaimed()
        for name in names:
            number = run_number(name.removesuffix(".tmp"))
            if number is not None and number not in kept:
                disk.unlink(directory / name)
    except OSError as error:
        raise failure(error, "remove old runs in", directory) from error
