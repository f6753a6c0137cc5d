"""The pull log: what consumers pulled, acknowledged and handed back, record after record. One for all of a broker.

It lies in ``pulls/``, in files named by the position of their first byte (16 hex digits and ``.pulls``):

    header (64): magic 8s | version u16 | reserved u16 | store_id 6s | reserved 6s | base u64 | created_at_us u64 |
                 generation u32 | reserved 16s | crc32c u32 (of the 60 bytes before)
    record:      size u32 (of all of it) | crc32c u32 | kind u8 | reserved u8 | reserved u16 | payload
    ...          zeros up to the size that the file was made with

A record's checksum covers the rest of it and begins with a fold of the store's secret and the record's position, so no
bytes of another place, and none that a client chose, pass for a record. What a record says is the broker's business.

Everything before a checkpoint's position is in the checkpoint; a start reads what follows, and writes on in a new file.
"""

from __future__ import annotations

import errno
import os
import struct
from contextlib import suppress
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile, StorageFull, SyncFailed
from qmq.format.layout import (
    PULL_FILE_HEADER,
    PULL_FILE_HEADER_SIZE,
    PULL_LOG_MAGIC,
    PULL_LOG_VERSION,
    PULL_RECORD_HEADER,
    PULL_RECORD_HEADER_SIZE,
)
from qmq.storage.checkpoint import Hole
from qmq.storage.disk import Buffer, Disk, failure, read_around, read_fully, write_fully

PULL_LOG_NAME: Final = "pulls"
SUFFIX: Final = ".pulls"
#: No record is longer: what would be is written as several.
MAX_RECORD_BYTES: Final = 1 << 20
FILE_BYTES: Final = 4 << 20

_SEED: Final = struct.Struct("<16sQ")
_CHECKED: Final = PULL_FILE_HEADER_SIZE - 4
_CRC_OFFSET: Final = 4


class PullRecord(NamedTuple):
    """One record as found: where, of which kind, and what it says."""

    position: int
    kind: int
    payload: memoryview


class PullLogFound(NamedTuple):
    """What a start reads of the pull log: the records behind the claim, in order, what is bad, where to go on."""

    records: list[PullRecord]
    holes: list[Hole]
    #: What is wrong with files beside that: the base of each, and what.
    problems: list[tuple[int, str]]
    end: int
    #: The highest of its files, 0 where none says.
    generation: int = 0
    #: Behind the last record is something else: it was being written, or is rotten.
    torn: bool = False


def pull_file_path(directory: Path, base: int) -> Path:
    """Where the file lies whose first byte is at position *base*."""
    return directory / f"{base:016x}{SUFFIX}"


def list_pull_files(disk: Disk, directory: Path) -> list[int]:
    """The bases of all files, ascending. Raises StorageFailed."""
    try:
        names = disk.listdir(directory) if disk.exists(directory) else []
    except OSError as error:
        raise failure(error, "list", directory) from error
    found = []
    for name in names:
        stem = name.removesuffix(SUFFIX)
        if name.endswith(SUFFIX) and len(stem) == 16:
            with suppress(ValueError):
                found.append(int(stem, 16))
    return sorted(found)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_pull_log(disk: Disk, directory: Path, store_id: bytes, secret: bytes, claimed: int) -> PullLogFound:
    """Everything from position *claimed* on.

    Bad bytes between records are holes, also those that the disk does not give; what follows the last record is no
    fault: it was being written. Raises StorageFailed, ForeignFile for a newer version.
    """
    found = PullLogFound([], [], [], claimed)
    bases = list_pull_files(disk, directory)
    end, generation, torn = claimed, 0, False
    for base, following in zip_longest(bases, bases[1:]):
        if following is not None and following <= claimed:
            continue
        path = pull_file_path(directory, base)
        try:
            data = _read_file(disk, path, base, found)[: None if following is None else following - base]
        except OSError as error:
            raise failure(error, "read", path) from error
        before, problem = len(found.records), None
        try:
            said = _check_header(bytes(data[:PULL_FILE_HEADER_SIZE]), path, store_id, base)
            generation = max(generation, said)
        except BadBytes as error:  # every record is checked for itself
            problem = str(error)
        if base > end:
            found.holes.append(Hole(end, base))
        last = _read_records(found, data, base, max(claimed, base + PULL_FILE_HEADER_SIZE), secret)
        if problem is not None:
            if following is None and base == end and len(found.records) == before:
                break  # it was being made: it is made again
            found.problems.append((base, problem))
        end = last
        torn = bytes(data[end - base :]).strip(b"\0") != b""
    return found._replace(end=max(end, claimed), generation=generation, torn=torn)


def pull_file_generation(disk: Disk, directory: Path, store_id: bytes, base: int) -> int | None:
    """The generation in which a file was begun; None when its header does not tell. Raises StorageFailed."""
    path = pull_file_path(directory, base)
    try:
        fd = disk.open(path, os.O_RDONLY)
        try:
            header, _ = read_around(disk, fd, PULL_FILE_HEADER_SIZE, 0)
        finally:
            disk.close(fd)
    except OSError as error:
        raise failure(error, "read", path) from error
    try:
        return _check_header(bytes(header), path, store_id, base)
    except BadBytes:
        return None


def _read_file(disk: Disk, path: Path, base: int, found: PullLogFound) -> memoryview:
    """What the disk gives of a file; zeros elsewhere. Raises OSError."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        data, lost = read_around(disk, fd, disk.size(fd), 0)
    finally:
        disk.close(fd)
    if lost:
        found.problems.append((base, f"{lost} bytes of {path} cannot be read"))
    return memoryview(data)


def rewrite_pull_log(disk: Disk, directory: Path, found: PullLogFound) -> None:
    """Write the records that were found again in place, and sync them: what a failed sync has left in memory reads
    well, and is not on disk. Raises StorageFull or StorageFailed.
    """
    bases = list_pull_files(disk, directory)
    for base, following in zip_longest(bases, bases[1:]):
        mine = [
            one for one in found.records if base <= one.position and (following is None or one.position < following)
        ]
        if not mine:
            continue
        path = pull_file_path(directory, base)
        try:
            fd = disk.open(path, os.O_RDWR)
            try:
                for one in mine:
                    size = PULL_RECORD_HEADER_SIZE + len(one.payload)
                    offset = one.position - base
                    write_fully(disk, fd, [read_fully(disk, fd, size, offset)], offset)
                disk.fdatasync(fd)
            finally:
                disk.close(fd)
        except OSError as error:
            raise failure(error, "write", path) from error


def _read_records(found: PullLogFound, data: memoryview, base: int, start: int, secret: bytes) -> int:
    """The records of one file from position *start* on; returns where the last one ends."""
    offset = end = start - base
    while offset < len(data):
        record = record_at(data, offset, base, secret)
        if record is None:
            offset = _next_record(data, offset + 1, base, secret)
            continue
        if offset > end:
            found.holes.append(Hole(base + end, base + offset))
        found.records.append(record)
        offset = end = offset + PULL_RECORD_HEADER_SIZE + len(record.payload)
    return base + end


def record_at(data: memoryview, offset: int, base: int, secret: bytes) -> PullRecord | None:
    """The record that begins there, None when none does."""
    if offset + PULL_RECORD_HEADER_SIZE > len(data):
        return None
    size, crc, kind, _, _ = PULL_RECORD_HEADER.unpack_from(data, offset)
    if not PULL_RECORD_HEADER_SIZE <= size <= MAX_RECORD_BYTES or offset + size > len(data):
        return None
    payload = data[offset + PULL_RECORD_HEADER_SIZE : offset + size]
    head = bytes(data[offset : offset + PULL_RECORD_HEADER_SIZE])
    if _crc(head, payload, base + offset, secret) != crc:
        return None
    return PullRecord(base + offset, kind, payload)


def _next_record(data: memoryview, offset: int, base: int, secret: bytes) -> int:
    """Where the next record begins, at or behind *offset*; the end of the data when there is none."""
    last = len(data) - PULL_RECORD_HEADER_SIZE + 1
    if offset >= last:
        return len(data)
    octets = np.frombuffer(data, np.uint8)
    # The size of a record is below 2^20 and what is reserved is 0: few places look like one.
    likely = (octets[offset + 3 : last + 3] == 0) & (octets[offset + 9 : last + 9] == 0)
    likely &= (octets[offset + 10 : last + 10] == 0) & (octets[offset + 11 : last + 11] == 0)
    likely &= (octets[offset:last] != 0) | (octets[offset + 1 : last + 1] != 0) | (octets[offset + 2 : last + 2] != 0)
    for place in (np.flatnonzero(likely) + offset).tolist():
        if record_at(data, place, base, secret) is not None:
            return int(place)
    return len(data)


def _crc(head: bytes, payload: Buffer, position: int, secret: bytes) -> int:
    seed = crc32c(_SEED.pack(secret, position))
    return crc32c(payload, crc32c(head[_CRC_OFFSET + 4 :], crc32c(head[:_CRC_OFFSET], seed)))


def _check_header(data: bytes, path: Path, store_id: bytes, base: int) -> int:
    """The generation that a file says. Raises BadBytes and ForeignFile."""
    if len(data) < PULL_FILE_HEADER_SIZE:
        raise BadBytes(f"{path} is shorter than its header")
    magic, version, _, found_id, _, found_base, _, generation, _, crc = PULL_FILE_HEADER.unpack(data)
    if magic != PULL_LOG_MAGIC or crc32c(data[:_CHECKED]) != crc:
        raise BadBytes(f"the header of {path} is not what was written")
    if version > PULL_LOG_VERSION:
        raise ForeignFile(f"{path} has format version {version}; this QMQ reads {PULL_LOG_VERSION}: use a newer one")
    if found_id != store_id or found_base != base:
        raise BadBytes(f"{path} was written as another file (store {found_id.hex()}, position {found_base:#x})")
    return int(generation)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class PullSync:
    """What is to be on disk before a checkpoint may claim the log up to ``position``."""

    def __init__(self, disk: Disk, directory: Path, position: int, files: list[tuple[int, Path]]) -> None:
        self._disk = disk
        self._directory = directory
        self.files = files
        self.position = position
        self.failed = False

    def run(self) -> None:
        """[thread] Raises StorageFailed, or SyncFailed: what was written since the last sync may be lost then."""
        at = self._directory
        try:
            for fd, at in self.files:  # noqa: B007
                self._disk.fdatasync(fd)
            if self.files:
                at = self._directory
                self._disk.fsync_directory(at)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the directory was not even opened
                raise failure(error, "sync", at) from error
            self.failed = True
            raise SyncFailed(
                f"{failure(error, 'sync', at)}; no pull or acknowledgement is confirmed until the broker has "
                "been restarted and has read it again"
            ) from error


class PullLog:
    """The file that is written, and those before it. Records are staged, then written together; all belongs to one
    thread, but for ``PullSync.run``.
    """

    def __init__(
        self, disk: Disk, directory: Path, store_id: bytes, secret: bytes, base: int, now_us: int, file_bytes: int,
        generation: int = 1,
    ) -> None:  # fmt: skip
        """Go on at position *base*, in a new file; where the disk has no room for it now, in the rest of the last one,
        or else with the first write that finds some. Raises StorageFailed.
        """
        self._disk = disk
        self._directory = directory
        self._store_id = store_id
        self._secret = secret
        self._now_us = now_us
        self._generation = generation
        self._file_bytes = file_bytes
        self._staged: list[tuple[int, bytes]] = []
        #: Files that are full: closed once a sync has covered them.
        self._full: list[tuple[int, Path]] = []
        #: Why nothing may be confirmed any more: a sync has failed.
        self.broken: str | None = None
        #: Syncs beside those of checkpoints.
        self._lent: list[PullSync] = []
        self._fd, self._path, self._base, self._limit = -1, pull_file_path(directory, base), base, base
        #: Behind the last record that is written.
        self.end = base
        #: Behind the last that is known to be on disk.
        self.synced_end = base
        try:
            self._begin_file(base, 0)
        except StorageFull:
            self._go_on()

    def _go_on(self) -> None:
        """Write on in the last file, which was made with room for more: nothing behind its end passes for a record."""
        base = max((base for base in list_pull_files(self._disk, self._directory) if base < self.end), default=None)
        if base is None:
            return
        path = pull_file_path(self._directory, base)
        try:
            fd = self._disk.open(path, os.O_RDWR)
            limit = base + self._disk.size(fd)
        except OSError as error:
            raise failure(error, "open", path) from error
        if limit <= self.end:
            self._disk.close(fd)
            return
        self._fd, self._path, self._base, self._limit = fd, path, base, limit

    def _begin_file(self, base: int, needed: int) -> None:
        """Make a file with room for *needed* bytes of records at least."""
        path = pull_file_path(self._directory, base)
        size = max(self._file_bytes, PULL_FILE_HEADER_SIZE + needed)
        header = _pack_header(self._store_id, base, self._now_us, self._generation)
        fd = -1
        try:
            self._disk.mkdir(self._directory)
            fd = self._disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            self._disk.allocate(fd, size)
            write_fully(self._disk, fd, [header], 0)
        except OSError as error:
            if fd >= 0:
                self._disk.close(fd)
                with suppress(OSError):
                    self._disk.unlink(path)
            raise failure(error, "create", path) from error
        self._fd, self._path, self._base, self._limit = fd, path, base, base + size
        self.end = base + PULL_FILE_HEADER_SIZE

    def stage(self, kind: int, payload: bytes) -> None:
        """Have a record written by the next ``write``."""
        assert PULL_RECORD_HEADER_SIZE + len(payload) <= MAX_RECORD_BYTES
        self._staged.append((kind, payload))

    @property
    def staged(self) -> int:
        """How many records are not written yet."""
        return len(self._staged)

    def settle(self) -> None:
        """A checkpoint begins. Whoever calls has written what is staged; where nothing can be written any more, that is
        dropped: it was confirmed to nobody, and is in the checkpoint.
        """
        if self.broken is not None:
            self._staged.clear()
        assert not self._staged

    def write(self) -> None:
        """Write all that is staged, with one call to the system if one file takes it.

        Raises StorageFull, StorageFailed or SyncFailed; what is not written stays staged, and the next write may work.
        """
        if self.broken is not None:
            raise SyncFailed(self.broken)
        while self._staged:
            count, buffers, size = self._sealed()
            if not count:
                self._roll()
                continue
            try:
                write_fully(self._disk, self._fd, [b"".join(buffers)], self.end - self._base)
            except OSError as error:
                raise failure(error, "write", self._path, self.end) from error
            self.end += size
            del self._staged[:count]

    def _sealed(self) -> tuple[int, list[bytes], int]:
        """As many records as the file has room for, with the checksums of their places."""
        buffers, size, count = list[bytes](), 0, 0
        room = self._limit - self.end
        for kind, payload in self._staged:
            record = PULL_RECORD_HEADER_SIZE + len(payload)
            if size + record > room:
                break
            head = PULL_RECORD_HEADER.pack(record, 0, kind, 0, 0)
            crc = _crc(head, payload, self.end + size, self._secret)
            buffers += (PULL_RECORD_HEADER.pack(record, crc, kind, 0, 0), payload)
            size, count = size + record, count + 1
        return count, buffers, size

    def _roll(self) -> None:
        """Go on in another file, that has room for the next record."""
        full = self._fd, self._path
        self._begin_file(self.end, PULL_RECORD_HEADER_SIZE + len(self._staged[0][1]))
        if full[0] >= 0:
            self._full.append(full)

    def _files(self) -> list[tuple[int, Path]]:
        return [*self._full, (self._fd, self._path)] if self._fd >= 0 else []

    def begin_sync(self) -> PullSync:
        """What has been written is to be on disk. After a sync that failed there is none: another one would succeed,
        and prove nothing.
        """
        return PullSync(self._disk, self._directory, self.end, [] if self.broken is not None else self._files())

    def synced(self, sync: PullSync) -> None:
        """It is: close what is full and covered."""
        if self.broken is None:
            self.synced_end = max(self.synced_end, sync.position)
        while self._full and self._full[0] in sync.files and not any(self._full[0] in one.files for one in self._lent):
            self._disk.close(self._full.pop(0)[0])

    def lend_sync(self) -> PullSync:
        """As ``begin_sync``, beside a checkpoint: its files stay open until ``take_back``."""
        sync = self.begin_sync()
        self._lent.append(sync)
        return sync

    def take_back(self, sync: PullSync) -> None:
        """It has been run."""
        self._lent.remove(sync)

    def close(self) -> None:
        """Close all files; nothing is synced."""
        for fd, _ in self._files():
            self._disk.close(fd)


def _pack_header(store_id: bytes, base: int, now_us: int, generation: int) -> bytes:
    draft = PULL_FILE_HEADER.pack(
        PULL_LOG_MAGIC, PULL_LOG_VERSION, 0, store_id, bytes(6), base, now_us, generation, bytes(16), 0
    )
    return draft[:_CHECKED] + crc32c(draft[:_CHECKED]).to_bytes(4, "little")


def remove_pull_files(disk: Disk, directory: Path, before: int) -> None:
    """[thread] Remove the files that end at or before position *before*: no start reads them again.

    Raises StorageFailed.
    """
    bases = list_pull_files(disk, directory)
    for base, following in pairwise(bases):
        if following > before:
            return
        path = pull_file_path(directory, base)
        try:
            disk.unlink(path)
        except OSError as error:
            raise failure(error, "remove", path) from error
