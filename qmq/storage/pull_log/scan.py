"""Reading the pull log beside the loop, for traces: file after file, also those that are kept.

The records of a file are found at once, as columns: every record looks like one by its header, and few other bytes do.
Who uses a record checks it by its checksum.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.format.layout import PULL_FILE_HEADER_SIZE, PULL_RECORD_HEADER_SIZE, PULL_RECORD_KINDS
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure, read_around
from qmq.storage.pull_log.kept import KEPT_SUFFIX, kept_file_path
from qmq.storage.pull_log.records import (
    MAX_RECORD_BYTES,
    PullRecord,
    list_pull_files,
    pull_file_path,
    pull_file_times,
    record_at,
)

#: A message's records are written after it was stored. The wall clock, by which files and records go, may be set back
#: meanwhile, by up to this time.
CLOCK_SLACK_US: Final = 600_000_000

#: Bytes behind those of a file.
PADDING: Final = 1_024
#: Bytes that are searched for records at once.
_CHUNK_BYTES: Final = 256 << 10

#: Where in a record its kind stands.
KIND_OFFSET: Final = 8

Offsets = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint64]


class PullPiece(NamedTuple):
    """The bytes of one file, and where records may begin in it, by kind of record: u8[n] beside i64[n]. It counts until
    the next file is read, into the same memory.
    """

    data: memoryview
    #: The same, with PADDING bytes behind the end: fields of bytes that are no record may seem to lie there.
    octets: npt.NDArray[np.uint8]
    base: int
    offsets: Offsets
    kinds: npt.NDArray[np.uint8]
    secret: bytes

    def field(self, dtype: np.dtype[np.void], name: str, offsets: Offsets, skip: int = 0) -> Numbers:
        """Return a field of the payloads of the records at *offsets*; *skip* bytes of each come before the *dtype*. It
        may be of the bytes behind a record that is shorter.
        """
        assert dtype.fields is not None
        kind, at, *_ = dtype.fields[name]
        octets = self.octets
        every: npt.NDArray[Any] = np.ndarray((len(octets) - kind.itemsize + 1,), kind, octets.data, 0, (1,))
        return every[offsets + (PULL_RECORD_HEADER_SIZE + skip + at)].astype(np.uint64)

    def record(self, offset: int) -> PullRecord | None:
        """Return the record at *offset*; None where these bytes are none."""
        return record_at(self.data, offset, self.base, self.secret)


class PullLogScan:
    """The files of the pull log from about a time on, the oldest first."""

    def __init__(self, disk: Disk, directory: Path, store_id: bytes, secret: bytes, end: int, since_us: int) -> None:
        """*end* is the position behind the last record to read; records from before *since_us* need not be read."""
        self._disk = disk
        self._directory = directory
        self._store_id = store_id
        self._secret = secret
        self._end = end
        self._since_us = since_us
        self._bases: list[int] | None = None  # from here on, the first file is the next to read
        self._buffer = bytearray()
        #: The oldest records that are kept are younger than ``since_us``.
        self.is_partial = False

    def upcoming(self) -> tuple[int, bool] | None:
        """[thread] Return the base of the next file, and whether its bytes stay as they are; None behind the last.
        Raises StorageFailed.
        """
        if self._bases is None:
            self._bases = self._wanted()
        return (self._bases[0], len(self._bases) > 1) if self._bases else None

    def skip(self) -> None:
        """[thread] Pass the next file."""
        assert self._bases
        del self._bases[0]

    def next(self, offsets: Offsets | None = None) -> PullPiece | None:
        """[thread] Return the next file, or only its records at *offsets*; None where it has no records, or is gone.
        Raises StorageFailed.
        """
        assert self._bases
        base, *self._bases = self._bases
        end = min(self._bases[0] if self._bases else self._end, self._end)
        data = self._read_file(base, max(end - base, 0))
        if len(data) <= PULL_FILE_HEADER_SIZE:
            return None
        if offsets is None:
            offsets = _likely_records(data)
        octets = np.frombuffer(self._buffer, np.uint8, len(data) + PADDING)
        offsets = offsets[offsets + PULL_RECORD_HEADER_SIZE <= len(data)]
        return PullPiece(data, octets, base, offsets, octets.take(offsets + KIND_OFFSET), self._secret)

    def _read_file(self, base: int, size: int) -> memoryview:
        """As ``_read``, into the buffer. New memory for each file would take longer than the reading."""
        if len(self._buffer) < size + PADDING:
            self._buffer = bytearray(size + PADDING)
        whole = memoryview(self._buffer)
        done = 0
        for path in (pull_file_path(self._directory, base), kept_file_path(self._directory, base)):
            try:
                fd = self._disk.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise failure(error, "read", path) from error
            try:
                while done < size and (count := self._disk.preadv(fd, [whole[done:size]], done)) > 0:
                    done += count
            except OSError as error:
                if error.errno not in BAD_SECTOR:
                    raise failure(error, "read", path) from error
                found = self._read(base, size)  # around what the disk cannot read
                whole[: len(found)], done = found, len(found)
            finally:
                self._disk.close(fd)
            break
        whole[done : done + PADDING] = bytes(PADDING)
        return whole[:done]

    def _wanted(self) -> list[int]:
        """Return the bases of the files to read, ascending: not those that end before the time."""
        found = {
            *list_pull_files(self._disk, self._directory, KEPT_SUFFIX),
            *list_pull_files(self._disk, self._directory),
        }
        bases = sorted(base for base in found if base < self._end)
        first, latest_us = 0, 0
        for number, base in enumerate(bases):
            begun_us = pull_file_times(self._read(base, PULL_FILE_HEADER_SIZE), self._directory, self._store_id, base)
            latest_us = max(latest_us, begun_us)
            if latest_us + CLOCK_SLACK_US < self._since_us:
                first = number  # the files before it have no later record
            if not number:
                self.is_partial = begun_us > self._since_us
        return bases[first:]

    def _read(self, base: int, size: int) -> bytes:
        """Return the first *size* bytes of a file, fewer where it has fewer or is removed meanwhile."""
        paths = pull_file_path(self._directory, base), kept_file_path(self._directory, base)
        for path in paths:  # a checkpoint may rename it: never back
            try:
                fd = self._disk.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise failure(error, "read", path) from error
            try:
                data, _ = read_around(self._disk, fd, min(size, self._disk.size(fd)), 0)
            except OSError as error:
                raise failure(error, "read", path) from error
            finally:
                self._disk.close(fd)
            return bytes(data)
        return b""


def _likely_records(data: memoryview) -> Offsets:
    """Return the offsets of all records, and of few other bytes."""
    octets = np.frombuffer(data, np.uint8)
    found, last = list[Offsets](), len(data) - PULL_RECORD_HEADER_SIZE + 1
    for start in range(PULL_FILE_HEADER_SIZE, last, _CHUNK_BYTES):  # which fit the processor's cache
        stop = min(start + _CHUNK_BYTES, last)
        zero = octets[start : stop + PULL_RECORD_HEADER_SIZE - 1] == 0
        # The size of a record is below 2^20, its reserved fields are 0, and its kind is one that there is.
        count = stop - start
        likely = zero[3 : count + 3] & zero[9 : count + 9]
        likely &= zero[10 : count + 10]
        likely &= zero[11 : count + 11]
        likely &= octets[start + KIND_OFFSET : stop + KIND_OFFSET] - np.uint8(1) < PULL_RECORD_KINDS
        found.append(np.flatnonzero(likely) + start)
    offsets = np.concatenate(found) if found else np.empty(0, np.int64)
    sizes = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))[offsets].astype(np.int64)
    ends = offsets + sizes
    fits = (sizes > PULL_RECORD_HEADER_SIZE) & (sizes <= MAX_RECORD_BYTES) & (ends <= len(data))
    records: Offsets = offsets[fits]
    ends = ends[fits]
    for _ in range(2):  # what begins where such bytes end is known by the second time
        free = _not_within_others(records, ends)
        records, ends = records[free], ends[free]
    return records


def _not_within_others(offsets: Offsets, ends: Offsets) -> npt.NDArray[np.bool_]:
    """Return which offsets do not lie within a record that begins where another one ends, or the file's header:
    records lie back to back, and bytes within them may look like some. Behind a hole all are kept.
    """
    is_end = np.zeros(int(ends.max(initial=PULL_FILE_HEADER_SIZE)) + 1, np.bool_)
    is_end[PULL_FILE_HEADER_SIZE] = True
    is_end[ends] = True
    follows = is_end[offsets]
    behind = np.maximum.accumulate(np.where(follows, ends, 0))
    free: npt.NDArray[np.bool_] = follows | (offsets >= behind)
    return free
