"""The pull log: what consumers pulled, acked, nacked and released, record after record. One log for a broker.

It lies in ``pulls/``, in files named by the position of their first byte (16 hex digits and ``.pulls``):

    header (64): magic 8s | version u16 | reserved u16 | store_id 6s | reserved 6s | base u64 | created_at_us u64 |
                 generation u32 | cut u64 | reserved 8s | crc32c u32 (of the 60 bytes before)
    record:      size u32 (of all of it) | crc32c u32 | kind u8 | reserved u8 | reserved u16 | payload
    ...          zeros up to the size that the file was made with

A record's checksum covers the rest of it and begins with a fold of the store's secret and the record's position, so no
bytes from another position, and none that a client chose, pass for a record. The broker defines the payloads.

Everything before a checkpoint's position is in the checkpoint; a start reads what follows, and writes on in a new file.
After a power loss some records may be there although earlier ones are lost: they do not count, since they build on what
is lost. The file that such a start begins says so: ``cut`` is where they begin, and equals the file's own base when all
records before it count.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile
from qmq.format.layout import (
    OLDEST_PULL_LOG_VERSION,
    PULL_FILE_HEADER,
    PULL_FILE_HEADER_SIZE,
    PULL_LOG_MAGIC,
    PULL_LOG_VERSION,
    PULL_RECORD_HEADER,
    PULL_RECORD_HEADER_SIZE,
    PULL_RECORD_KINDS,
)
from qmq.format.versions import check_version
from qmq.storage.disk.disk import Buffer, Disk, failure, read_around, read_fully, write_fully
from qmq.storage.types import Hole

PULL_LOG_NAME: Final = "pulls"
SUFFIX: Final = ".pulls"
#: No record is longer: longer ones are split.
MAX_RECORD_BYTES: Final = 1 << 20

_SEED: Final = struct.Struct("<16sQ")
#: The bytes that a record's checksum covers behind the secret and before the payload: position u64, then the header
#: without its checksum.
SEALED: Final = struct.Struct("<QIB3x")
_CHECKED: Final = PULL_FILE_HEADER_SIZE - 4
_CRC_OFFSET: Final = 4


class PullRecord(NamedTuple):
    """One record that was read: position, kind and payload; and whether it counts."""

    position: int
    kind: int
    payload: memoryview
    counts: bool = True

    @property
    def size(self) -> int:
        """The bytes of the whole record."""
        return PULL_RECORD_HEADER_SIZE + len(self.payload)

    @property
    def end(self) -> int:
        """The position behind the record."""
        return self.position + self.size


class PullLogContent(NamedTuple):
    """The part of the pull log that a start reads: the records behind the claim, bad bytes, and where to go on."""

    records: list[PullRecord]
    holes: list[Hole]
    #: Other problems of files: the base of each, and the problem.
    problems: list[tuple[int, str]]
    end: int
    #: The highest generation of its files, 0 where no header has one.
    generation: int = 0
    #: Bytes behind the last record that are no record: they were being written, or are rotten.
    torn: int = 0

    def cut(self, start: int, end: int) -> None:
        """Drop what is in [start, end): its records do not count, and its holes are forgotten."""
        self.records[:] = [one._replace(counts=False) if start <= one.position < end else one for one in self.records]
        self.holes[:] = [hole for hole in self.holes if not start <= hole.start < end]


def pull_file_path(directory: Path, base: int) -> Path:
    """Return the path of the file whose first byte is at position *base*."""
    return directory / f"{base:016x}{SUFFIX}"


def list_pull_files(disk: Disk, directory: Path, suffix: str = SUFFIX) -> list[int]:
    """Return the bases of all files, ascending; with the suffix of kept.py those of the kept ones. Raises
    StorageFailed.
    """
    try:
        names = disk.listdir(directory) if disk.exists(directory) else []
    except OSError as error:
        raise failure(error, "list", directory) from error
    found = []
    for name in names:
        stem = name.removesuffix(suffix)
        if name.endswith(suffix) and len(stem) == 16:
            with suppress(ValueError):
                found.append(int(stem, 16))
    return sorted(found)


def read_pull_log(disk: Disk, directory: Path, store_id: bytes, secret: bytes, claimed: int) -> PullLogContent:
    """Read everything from position *claimed* on.

    Bad bytes between records are holes, also those that the disk cannot read; bytes behind the last record are no
    fault, since they were being written. Raises StorageFailed, ForeignFile for a newer version.
    """
    found = PullLogContent([], [], [], claimed)
    bases = list_pull_files(disk, directory)
    end, generation, torn = claimed, 0, 0
    for base, following in zip_longest(bases, bases[1:]):
        if following is not None and following <= claimed:
            continue
        path = pull_file_path(directory, base)
        try:
            data = _read_file(disk, path, base, found)[: None if following is None else following - base]
        except OSError as error:
            raise failure(error, "read", path) from error
        before, problem = len(found.records), None
        if base > end:
            found.holes.append(Hole(end, base))
        try:
            in_header, cut = _check_header(bytes(data[:PULL_FILE_HEADER_SIZE]), path, store_id, base)
            generation = max(generation, in_header)
            found.cut(cut, base)
        except BadBytes as error:  # every record has a checksum of its own
            problem = str(error)
        last = _read_records(found, data, base, max(claimed, base + PULL_FILE_HEADER_SIZE), secret)
        _check_kinds(found.records[before:], path, base)
        if problem is not None:
            if following is None and base == end and len(found.records) == before:
                break  # it was being made, and is made again
            found.problems.append((base, problem))
        end = last
        torn = len(bytes(data[end - base :]).rstrip(b"\0"))
    return found._replace(end=max(end, claimed), generation=generation, torn=torn)


def check_pull_file(disk: Disk, path: Path, base: int, end: int | None, store_id: bytes, secret: bytes) -> list[str]:
    """Return the problems of one file by itself, which ends at position *end* (None: where its bytes end). Raises
    OSError, ForeignFile.
    """
    found = PullLogContent([], [], [], base)
    data = _read_file(disk, path, base, found)[: None if end is None else end - base]
    problems = [problem for _, problem in found.problems]
    try:
        _check_header(bytes(data[:PULL_FILE_HEADER_SIZE]), path, store_id, base)
    except BadBytes as error:
        problems.append(str(error))
    last = _read_records(found, data, base, base + PULL_FILE_HEADER_SIZE, secret)
    _check_kinds(found.records, path, base)
    bad = sum(hole.end - hole.start for hole in found.holes) + len(bytes(data[last - base :]).rstrip(b"\0"))
    return problems + [f"{bad} bytes are no record"] * bool(bad)


def pull_file_generation(disk: Disk, directory: Path, store_id: bytes, base: int) -> int | None:
    """Return the generation in which a file was begun; None when its header is bad. Raises StorageFailed."""
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
        return _check_header(bytes(header), path, store_id, base)[0]
    except BadBytes:
        return None


def _read_file(disk: Disk, path: Path, base: int, found: PullLogContent) -> memoryview:
    """Return the bytes of a file, zeros where the disk cannot read them. Raises OSError."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        data, lost = read_around(disk, fd, disk.size(fd), 0)
    finally:
        disk.close(fd)
    if lost:
        found.problems.append((base, f"{lost} bytes of {path} cannot be read"))
    return memoryview(data)


def rewrite_pull_log(disk: Disk, directory: Path, found: PullLogContent) -> None:
    """Write headers and the records that were read again in place, and sync them and their names: what a failed sync
    has left in memory, or a start that was killed, reads well without being on disk. Raises StorageFull or
    StorageFailed.
    """
    bases = list_pull_files(disk, directory)
    for base, following in zip_longest(bases, bases[1:]):
        mine = [
            one for one in found.records if base <= one.position and (following is None or one.position < following)
        ]
        path = pull_file_path(directory, base)
        try:
            fd = disk.open(path, os.O_RDWR)
            try:
                there = min(disk.size(fd), PULL_FILE_HEADER_SIZE)
                parts = [(0, there)] if there else []
                parts += [(one.position - base, PULL_RECORD_HEADER_SIZE + len(one.payload)) for one in mine]
                for offset, size in parts:
                    write_fully(disk, fd, [read_fully(disk, fd, size, offset)], offset)
                disk.fdatasync(fd)
            finally:
                disk.close(fd)
        except OSError as error:
            raise failure(error, "write", path) from error
    if bases:
        try:
            disk.fsync_directory(directory)
        except OSError as error:
            raise failure(error, "sync", directory) from error


def _read_records(found: PullLogContent, data: memoryview, base: int, start: int, secret: bytes) -> int:
    """Read the records of one file from position *start* on; return where the last one ends."""
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


def _check_kinds(records: list[PullRecord], path: Path, base: int) -> None:
    """Raise ForeignFile if a record is of a kind that this program does not know."""
    for record in records:
        if not 1 <= record.kind <= PULL_RECORD_KINDS:
            raise ForeignFile(
                f"{path} has a record of kind {record.kind} at offset {record.position - base}; this QMQ reads kinds 1 "
                f"to {PULL_RECORD_KINDS}: use a newer one"
            )


def record_at(data: memoryview, offset: int, base: int, secret: bytes) -> PullRecord | None:
    """Return the record that begins at *offset*; None when none does."""
    if offset + PULL_RECORD_HEADER_SIZE > len(data):
        return None
    size, crc, kind = PULL_RECORD_HEADER.unpack_from(data, offset)
    if not PULL_RECORD_HEADER_SIZE <= size <= MAX_RECORD_BYTES or offset + size > len(data):
        return None
    payload = data[offset + PULL_RECORD_HEADER_SIZE : offset + size]
    head = bytes(data[offset : offset + PULL_RECORD_HEADER_SIZE])
    if record_crc(head, payload, base + offset, secret) != crc:
        return None
    return PullRecord(base + offset, kind, payload)


def record_size(data: memoryview) -> int:
    """Return the size in the header of the record that begins *data*."""
    return int(PULL_RECORD_HEADER.unpack_from(data)[0])


def _next_record(data: memoryview, offset: int, base: int, secret: bytes) -> int:
    """Return where the next record begins, at or behind *offset*; the end of the data when there is none."""
    last = len(data) - PULL_RECORD_HEADER_SIZE + 1
    if offset >= last:
        return len(data)
    octets = np.frombuffer(data, np.uint8)
    # The size of a record is below 2^20 and its reserved fields are 0: few offsets look like one.
    likely = (octets[offset + 3 : last + 3] == 0) & (octets[offset + 9 : last + 9] == 0)
    likely &= (octets[offset + 10 : last + 10] == 0) & (octets[offset + 11 : last + 11] == 0)
    likely &= (octets[offset:last] != 0) | (octets[offset + 1 : last + 1] != 0) | (octets[offset + 2 : last + 2] != 0)
    for candidate in (np.flatnonzero(likely) + offset).tolist():
        if record_at(data, candidate, base, secret) is not None:
            return int(candidate)
    return len(data)


def record_crc(head: bytes, payload: Buffer, position: int, secret: bytes) -> int:
    """Return the checksum of a record at that position; *head* is its header, with any crc."""
    seed = crc32c(_SEED.pack(secret, position))
    return crc32c(payload, crc32c(head[_CRC_OFFSET + 4 :], crc32c(head[:_CRC_OFFSET], seed)))


def _check_header(data: bytes, path: Path, store_id: bytes, base: int) -> tuple[int, int]:
    """Return generation and cut of a file's header. Raises BadBytes and ForeignFile."""
    if len(data) < PULL_FILE_HEADER_SIZE:
        raise BadBytes(f"{path} is shorter than its header")
    magic, version, _, found_id, _, found_base, _, generation, cut, _, crc = PULL_FILE_HEADER.unpack(data)
    if magic != PULL_LOG_MAGIC or crc32c(data[:_CHECKED]) != crc:
        raise BadBytes(f"the header of {path} is not what was written")
    check_version(path, version, PULL_LOG_VERSION, OLDEST_PULL_LOG_VERSION)
    if found_id != store_id or found_base != base:
        raise BadBytes(f"{path} was written as another file (store {found_id.hex()}, position {found_base:#x})")
    return int(generation), int(cut)


def pack_pull_header(store_id: bytes, base: int, now_us: int, generation: int, cut: int) -> bytes:
    """Return the header of a file."""
    draft = PULL_FILE_HEADER.pack(
        PULL_LOG_MAGIC, PULL_LOG_VERSION, 0, store_id, bytes(6), base, now_us, generation, cut, bytes(8), 0
    )
    return draft[:_CHECKED] + crc32c(draft[:_CHECKED]).to_bytes(4, "little")


def pull_file_times(header: bytes, path: Path, store_id: bytes, base: int) -> int:
    """Return when the file with that header was begun, by the wall clock; 0 where the header is bad."""
    try:
        _check_header(bytes(header), path, store_id, base)
    except BadBytes:
        return 0
    return int(PULL_FILE_HEADER.unpack(header)[6])
