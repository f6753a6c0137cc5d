"""The scrub: reading files again while a broker runs. Also rereads a batch that a client could not verify.

[thread] All reads use ``preadv`` through descriptors of their own, where a bad sector is an error and a page fault
stalls nothing else; they read a little at a time, and leave the page cache as they found it.

Segments are read batch by batch; bad bytes are returned as ranges that are served no more: see qmq/format/salvage.py.
Files of groups are runs of error logs, of dead letters and of delayed messages, and full files of the pull log. Rot in
a run is reported at its end, when it is known whether the other copy is good. Readers of a run's items need no report:
they check each checksum themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBatch, BadBytes, ForeignFile
from qmq.format.batch import Header, header_crc_of, mark_of, parse_header, validate_stored
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    PULL_FILE_HEADER_SIZE,
    PULL_RECORD_HEADER_SIZE,
    SCHEDULE_HEADER_SIZE,
    SEGMENT_HEADER_SIZE,
)
from qmq.format.salvage import Marks, marks_of, undecodable_in
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure
from qmq.storage.error_log.group_files import GroupFiles
from qmq.storage.error_log.sorted_runs import both_rotten, check_run_header, run_paths
from qmq.storage.message_log.reader import candidates
from qmq.storage.message_log.segment import SegmentOwner, check_header, segment_path
from qmq.storage.pull_log.records import MAX_RECORD_BYTES, pull_file_path, record_at, record_size
from qmq.storage.types import Hole, SegmentSpan
from qmq.storage.verify.groups import good_slots

#: Bytes read at once. Checking them takes the interpreter for 0.1 ms where batches are large, for 2 ms where each has
#: one small message. Of a run they are 512 items, 0.2 ms.
READ_BYTES: Final = 64 << 10
#: The magic and the position of a batch are within this many bytes.
_SEARCH_OVERLAP: Final = 31
#: The bytes skipped where a sector cannot be read.
_SECTOR: Final = 4_096
_SHORTER: Final = "the file is shorter than it was"


class PartitionDamage(NamedTuple):
    """Bytes of a partition that are not what was written, or cannot be read: positions [start, end).

    ``marks`` are the parts that are to be served no more, as (position, size).
    """

    partition: int
    start: int
    end: int
    reason: str
    marks: tuple[tuple[int, int], ...]


class Pace:
    """Limits the rate of reads. Microseconds."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_us = 0

    def next_us(self, size: int, now_us: int) -> int:
        """Return when the next read may be, after *size* bytes read by *now_us*. Unused time is not saved up."""
        self._free_us = max(self._free_us, now_us) + size * 1_000_000 // self._bytes_per_s
        return self._free_us


class ScrubStep(NamedTuple):
    """The result of one read; ``is_last``: the segment is done."""

    size: int
    found: tuple[PartitionDamage, ...]
    is_last: bool


class SegmentReader:
    """Reads one segment. The first read opens its descriptor, which stays open until ``close``."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        span: SegmentSpan,
        owner: SegmentOwner,
        secret: bytes,
        holes: Sequence[Hole] = (),
    ) -> None:
        """*holes* were reported before, and are skipped."""
        self.path = segment_path(directory, span.base)
        self._disk = disk
        self._base, self._end = span
        self._limit = self._end  # where the file ends, if it is shorter
        self._owner = owner
        self._secret = secret
        self._holes = {hole.start: hole.end for hole in holes}
        self._fd = -1
        self._walk = self._walked()

    def step(self) -> ScrubStep:
        """Read a little further, from the segment's beginning to its end.

        Raises StorageFailed when the system refuses to read, for another reason than the state of the disk.
        """
        found = list[PartitionDamage]()
        for item in self._walk:
            if isinstance(item, int):
                return ScrubStep(item, tuple(found), False)
            found.append(item)
        return ScrubStep(0, tuple(found), True)

    def read_batch(
        self, position: int, size: int, first: int = 0, messages: int = 0
    ) -> tuple[memoryview, PartitionDamage | None]:
        """Return the *size* bytes of the batch that begins at *position*, and what is bad in them. Raises as ``step``.

        Of *messages* messages from ordinal *first* on (0: all) the headers are unpacked too: one that cannot be decoded
        is bad, even if its bytes are those that the sender made.
        """
        try:
            view = self._read(position, size)
        except OSError as error:
            return memoryview(b""), self._bad(position, position + size, str(failure(error, "read", self.path)))
        try:
            header = validate_stored(view, position, self._secret, self._owner.store_id)
        except BadBatch as error:
            if len(view) < size or not self._is_right(view, position):
                return view, self._bad(position, position + size, str(error))
            return view, self._examined(view, position, str(error))
        found = undecodable_in(view, header, first, messages or header.messages)
        if found is None:
            return view, None
        marks, reason = found
        return view, self._marked(view, position, marks, reason)

    def close(self) -> None:
        """Close the file."""
        self._walk.close()
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    # --- a whole segment ---------------------------------------------------------------------------------------------

    def _walked(self) -> Generator[int | PartitionDamage]:
        """Yield the numbers of bytes that were read, and what is bad in those before."""
        if not self._disk.exists(self.path):
            yield self._unmarked(f"{self.path} is missing; put it back, or restart the broker")
            return
        yield from self._check_file()
        position = self._base + SEGMENT_HEADER_SIZE
        while position < self._end:
            if position in self._holes:
                position = self._holes[position]
                continue
            try:
                view = self._read(position, READ_BYTES)
            except OSError:
                view = memoryview(b"")
            yield len(view)
            sound = self._sound_size(view, position)
            position = position + sound if sound else (yield from self._one_batch(position))

    def _check_file(self) -> Iterator[int | PartitionDamage]:
        """Check the header of the file. What follows can be served without it, so nothing is marked."""
        reason = f"the header of {self.path} is not what was written"
        try:
            view = self._read(self._base, SEGMENT_HEADER_SIZE)
            yield len(view)
            if check_header(bytes(view), self.path, self._owner, self._base) is not None:
                return
        except OSError as error:
            reason = str(failure(error, "read", self.path))
        except ForeignFile as error:
            reason = str(error)
        yield self._unmarked(reason)

    def _sound_size(self, view: memoryview, position: int) -> int:
        """Return how many bytes from the start of *view* are good whole batches."""
        offset = 0
        try:
            while offset < len(view):
                rest = view[offset:]
                offset += validate_stored(rest, position + offset, self._secret, self._owner.store_id).size
        except BadBatch:
            pass  # it is bad, or longer than the view: ``_one_batch`` checks it
        return offset

    def _one_batch(self, position: int) -> Generator[int | PartitionDamage, None, int]:
        """Check what begins at *position*, a batch of any size or bad bytes; return where the next batch begins."""
        reason = "no batch begins here"
        try:
            header = yield from self._right_header(position)
            if header is not None:
                crc = yield from self._crc(position + header.data_start, position + header.size)
                if crc == header.data_crc:
                    return position + header.size
                view = self._read(position, header.size)
                yield len(view)
                yield self._examined(view, position, "the checksum of the data is wrong")
                return position + header.size
        except OSError as error:
            reason = str(failure(error, "read", self.path))
        if self._limit < self._end:
            reason = _SHORTER
        following = yield from self._next_position(position + 1)
        if following == self._limit:
            following = self._end
        yield self._bad(position, following, reason)
        return following

    def _right_header(self, position: int) -> Generator[int, None, Header | None]:
        """Return the header at *position* when it, its runs, table and mark are right. Raises OSError."""
        view = self._read(position, BATCH_HEADER_SIZE)
        header = self._likely_header(view, position)
        if header is None:
            return None
        view = self._read(position, header.data_start)
        yield len(view)
        return header if self._is_right(view, position) else None

    def _likely_header(self, view: memoryview, position: int) -> Header | None:
        """Return the header that begins *view*, if its position and sizes are possible."""
        if len(view) < BATCH_HEADER_SIZE:
            return None
        header = parse_header(view)
        fits = header.data_start <= header.size <= self._limit - position and header.runs > 0
        is_ours = header.position == position and header.store_id == self._owner.store_id
        is_known = header.magic == BATCH_MAGIC and header.version == BATCH_VERSION
        return header if fits and is_ours and is_known else None

    def _is_right(self, view: memoryview, position: int) -> bool:
        header = self._likely_header(view, position)
        if header is None or header.data_start > len(view):
            return False
        crc = header_crc_of(view, header.data_start)
        return crc == header.header_crc and mark_of(self._secret, position, crc) == header.mark

    def _crc(self, start: int, end: int) -> Generator[int, None, int]:
        """Return the crc32c of positions [start, end), read READ_BYTES at a time. Raises OSError."""
        crc = 0
        while start < end:
            view = self._read(start, min(READ_BYTES, end - start))
            yield len(view)
            if not view:
                break
            crc = crc32c(view, crc)
            start += len(view)
        return crc

    def _next_position(self, position: int) -> Generator[int, None, int]:
        """Return the first position from *position* on that has a right header; the file's end when there is none."""
        while position + BATCH_HEADER_SIZE <= self._limit:
            try:
                view = self._read(position, READ_BYTES)
                yield len(view)
                for candidate in candidates(view, position):
                    if (yield from self._right_header(candidate)) is not None:
                        return candidate
            except OSError:
                position += _SECTOR - (position - self._base) % _SECTOR
                yield 0
                continue
            if len(view) <= _SEARCH_OVERLAP:
                break
            position += len(view) - _SEARCH_OVERLAP
        return self._limit

    # --- findings ----------------------------------------------------------------------------------------------------

    def _bad(self, start: int, end: int, reason: str) -> PartitionDamage:
        return PartitionDamage(self._owner.partition, start, end, reason, ((start, end - start),))

    def _unmarked(self, reason: str) -> PartitionDamage:
        """Return damage of the file that does not affect what is in it."""
        return PartitionDamage(self._owner.partition, self._base, self._base + SEGMENT_HEADER_SIZE, reason, ())

    def _examined(self, view: memoryview, position: int, reason: str) -> PartitionDamage:
        """Return which messages are bad in a batch with a right header whose data does not fit its checksum."""
        header = parse_header(view)
        if len(view) < header.size:
            return self._bad(position, position + header.size, _SHORTER)
        return self._marked(view, position, marks_of(view, header), reason)

    def _marked(self, view: memoryview, position: int, marks: Marks, reason: str) -> PartitionDamage:
        ranges = tuple((position + low, high - low) for low, high in marks)
        return PartitionDamage(self._owner.partition, position, position + parse_header(view).size, reason, ranges)

    def _read(self, position: int, size: int) -> memoryview:
        """Return *size* bytes from *position* on, fewer where the segment ends.

        Raises OSError where the disk cannot read them, StorageFailed where the system refuses for another reason.
        """
        buffer, done = memoryview(bytearray(max(0, min(size, self._end - position)))), 0
        try:
            if self._fd < 0:
                self._fd = self._disk.open_uncached(self.path)
                self._limit = min(self._end, self._base + self._disk.size(self._fd))
            while done < len(buffer):
                read = self._disk.preadv_uncached(self._fd, buffer[done:], position - self._base + done)
                if read <= 0:
                    break
                done += read
        except OSError as error:
            if error.errno in BAD_SECTOR:
                raise
            raise failure(error, "read", self.path, position) from error
        if done < len(buffer):  # the file may be cut while it is read
            self._limit = min(self._limit, position + done)
        return buffer[:done]


_CRC_SIZE: Final = 4


class GroupStep(NamedTuple):
    """The result of one read; ``is_last``: all of the run or file is done, and ``found`` is all that is bad in it."""

    size: int
    found: tuple[BadBytes, ...]
    is_last: bool


class GroupReader(Protocol):
    """Reads one file, or the two of a run."""

    #: The file, or the run's first.
    path: Path

    def step(self) -> GroupStep:
        """Read a little further. Raises StorageFailed when the system refuses, for another reason than the state of the
        disk.
        """

    def close(self) -> None:
        """Close the file."""


class _Reader:
    """A file that is read in steps; the first opens its descriptor."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self.path = path
        self._disk = disk
        self._fd = -1
        self._reading = path
        self._found = list[BadBytes]()
        self._walk = self._walked()

    def _walked(self) -> Generator[int]:
        """Yield the numbers of bytes that were read."""
        raise NotImplementedError

    def step(self) -> GroupStep:
        """Read a little further."""
        size = next(self._walk, None)
        return GroupStep(0, tuple(self._found), True) if size is None else GroupStep(size, (), False)

    def close(self) -> None:
        """Close the file."""
        self._walk.close()
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _open(self, path: Path) -> bool:
        """Open a file; return whether it can be read."""
        self._close()
        self._reading = path
        try:
            self._fd = self._disk.open_uncached(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in BAD_SECTOR:
                return False
            raise failure(error, "open", path) from error
        return True

    def _read(self, offset: int, size: int) -> bytes:
        """Return the first of these bytes, up to one that the disk cannot read."""
        buffer, done = memoryview(bytearray(size)), 0
        try:
            while done < size:
                read = self._disk.preadv_uncached(self._fd, buffer[done:], offset + done)
                if read <= 0:
                    break
                done += read
        except OSError as error:
            if error.errno not in BAD_SECTOR:
                raise failure(error, "read", self._reading, offset) from error
        return bytes(buffer[:done])


class RunReader(_Reader):
    """Reads both files of a run with *slots* slots of *slot_size* bytes: items, and their reasons."""

    def __init__(self, disk: Disk, directory: Path, store_id: bytes, number: int, slot_size: int, slots: int) -> None:
        self._store_id = store_id
        self._number = number
        self._slot_size = slot_size
        self._slots = slots
        self._paths = run_paths(directory, number)
        super().__init__(disk, self._paths[0])

    def _walked(self) -> Generator[int]:
        bad = [np.zeros(self._slots, np.bool_) for _ in self._paths]
        there = []
        for path, mine in zip(self._paths, bad, strict=True):
            there.append(self._open(path))
            if there[-1]:
                yield from self._look_at(path, mine)
            else:
                mine[:] = True
        if not any(there):
            return  # the run was merged with another meanwhile
        both = bad[0] & bad[1]
        for path, other, mine, is_there in zip(self._paths, reversed(self._paths), bad, there, strict=True):
            if not is_there:
                self._add(f"{path} is gone; {other.name} has its items, and qmq repair makes it again")
            for start, end in _ranges(mine & ~both) if is_there else ():
                self._add(
                    f"{path} is rotten at bytes {self._offset(start)} to {self._offset(end)}; {other.name} has "
                    "these items, and qmq repair mends the file; check the disk"
                )
        for item in np.flatnonzero(both).tolist():
            self._add(both_rotten(*self._paths, self._offset(item)))

    def _look_at(self, path: Path, bad: npt.NDArray[np.bool_]) -> Generator[int]:
        header = self._read(0, SCHEDULE_HEADER_SIZE)
        try:
            check_run_header(header, path, self._store_id, self._slot_size, self._number)
        except (BadBytes, ForeignFile) as error:
            self._add(f"{error}; the items behind it are read all the same, and qmq repair mends it")
        yield len(header)
        step = READ_BYTES // self._slot_size
        for start in range(0, self._slots, step):
            count = min(step, self._slots - start)
            data = self._read(self._offset(start), count * self._slot_size)
            bad[start : start + count] = ~good_slots(data, self._slot_size, count)
            yield len(data)

    def _offset(self, item: int) -> int:
        return SCHEDULE_HEADER_SIZE + item * self._slot_size

    def _add(self, text: str) -> None:
        self._found.append(BadBytes(text))


class PullReader(_Reader):
    """Reads a file of the pull log that ends at position *end*, where the next begins, up to the first bad record."""

    def __init__(self, disk: Disk, directory: Path, base: int, end: int, secret: bytes) -> None:
        self._base = base
        self._end = end
        self._secret = secret
        super().__init__(disk, pull_file_path(directory, base))

    def _walked(self) -> Generator[int]:
        if not self._open(self.path):
            return  # no checkpoint needs it any more
        position = self._base + PULL_FILE_HEADER_SIZE
        while position < self._end:
            view = self._view(position, READ_BYTES)
            yield len(view)
            sound = self._sound_size(view, position)
            if not sound and len(view) >= PULL_RECORD_HEADER_SIZE:  # longer than the view, or bad
                view = self._view(position, min(record_size(view), MAX_RECORD_BYTES))
                yield len(view)
                sound = self._sound_size(view, position)
            if not sound:
                self._found.append(
                    BadBytes(
                        f"{self.path} is rotten at byte {position - self._base}, where a record was written; the next "
                        "checkpoint replaces it; if the broker is killed before, groups get again what this record "
                        "was about; check the disk"
                    )
                )
                return
            position += sound

    def _view(self, position: int, size: int) -> memoryview:
        return memoryview(self._read(position - self._base, min(size, self._end - position)))

    def _sound_size(self, view: memoryview, position: int) -> int:
        """Return how many bytes from the start of *view* are whole records."""
        offset = 0
        while (record := record_at(view, offset, position, self._secret)) is not None:
            offset += PULL_RECORD_HEADER_SIZE + len(record.payload)
        return offset


def group_readers(files: GroupFiles) -> list[Callable[[], GroupReader | None]]:
    """Return, for each file of groups that can be scrubbed, a function that makes its reader. That function returns
    None once nothing needs the file any more.
    """
    runs = [partial(_run_reader, files, path, number) for path, number in files.run_names()]
    return [*runs, *(partial(_pull_reader, files, *span) for span in files.full_pull_files())]


def _run_reader(files: GroupFiles, path: Path, number: int) -> GroupReader | None:
    size = files.run_size(path, number)
    return None if size is None else RunReader(files.disk, path, files.store_id, number, *size)


def _pull_reader(files: GroupFiles, base: int, end: int) -> GroupReader | None:
    if (base, end) not in files.full_pull_files():
        return None
    return PullReader(files.disk, files.pulls, base, end, files.secret)


def _ranges(chosen: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the ranges [start, end) that are True."""
    edges = np.flatnonzero(np.diff(chosen, prepend=np.False_, append=np.False_)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
