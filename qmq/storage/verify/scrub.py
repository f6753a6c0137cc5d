"""Reading segments again while a broker runs: the scrub, and the batch that a client could not verify.

[thread] Everything here reads by ``preadv`` through a descriptor of its own, where a bad sector is an error and a page
fault stalls nobody, a little at a time, and leaves in the page cache what it found there and no more.

What is found is given as bytes to serve no more: see qmq/format/salvage.py.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from qmq.errors import BadBatch, ForeignFile
from qmq.format.batch import Header, header_crc_of, mark_of, parse_header, validate_stored
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    SEGMENT_HEADER_SIZE,
)
from qmq.format.salvage import Marks, marks_of, undecodable_in
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure
from qmq.storage.message_log.reader import candidates
from qmq.storage.message_log.segment import SegmentOwner, check_header, segment_path
from qmq.storage.meta.checkpoint import Hole, SegmentSpan

#: Read at once. Checking so much takes the interpreter for 0.1 ms where batches are large, for 2 ms where each has one
#: small message.
READ_BYTES: Final = 64 << 10
#: The header of a batch has its magic and its position in so many bytes.
_SEARCH_OVERLAP: Final = 31
#: A sector that cannot be read is passed over.
_SECTOR: Final = 4_096
_SHORTER: Final = "the file is shorter than it was"


class PartitionDamage(NamedTuple):
    """Bytes of a partition that are not what was written, or cannot be read: positions [start, end).

    ``marks`` are what of it is to be served no more, as (position, size).
    """

    partition: int
    start: int
    end: int
    reason: str
    marks: tuple[tuple[int, int], ...]


class Pace:
    """How fast to read: told what was read and when, says when to go on. Microseconds."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_us = 0

    def next_us(self, size: int, now_us: int) -> int:
        """*size* bytes have been read by *now_us*: when the next may be. Time that was not used is not saved up."""
        self._free_us = max(self._free_us, now_us) + size * 1_000_000 // self._bytes_per_s
        return self._free_us


class ScrubStep(NamedTuple):
    """What one read brought; ``is_last``: the segment is through."""

    size: int
    found: tuple[PartitionDamage, ...]
    is_last: bool


class SegmentReader:
    """Reads one segment. Its descriptor is opened by the first read, and stays open until ``close``."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        span: SegmentSpan,
        owner: SegmentOwner,
        secret: bytes,
        holes: Sequence[Hole] = (),
    ) -> None:
        """*holes* were reported before, and are passed over."""
        self.path = segment_path(directory, span.base)
        self._disk = disk
        self._base, self._end = span
        self._limit = self._end  # where the file ends, if that is before
        self._owner = owner
        self._secret = secret
        self._holes = {hole.start: hole.end for hole in holes}
        self._fd = -1
        self._walk = self._walked()

    def step(self) -> ScrubStep:
        """Read on a little, from the segment's beginning to its end.

        Raises StorageFailed when the system refuses to read, for another reason than what is on the disk.
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
        """The *size* bytes of the batch that begins at *position*, and what is bad in them. Raises as ``step``.

        Of so many messages from ordinal *first* on (0: all) the headers are unpacked as well: what nobody can decode is
        bad too, though its bytes are those that its sender made.
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
        """Let go of the file."""
        self._walk.close()
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    # --- a whole segment ---------------------------------------------------------------------------------------------

    def _walked(self) -> Generator[int | PartitionDamage]:
        """Numbers of bytes that were read, and what is bad in those before."""
        if not self._disk.exists(self.path):
            yield self._unmarked(f"{self.path} is not there any more; put it back, or restart the broker")
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
        """The file's own header. What it says is not needed to serve what follows, so nothing is marked."""
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
        """How many bytes of *view* are whole batches that hold, from its beginning on."""
        offset = 0
        try:
            while offset < len(view):
                rest = view[offset:]
                offset += validate_stored(rest, position + offset, self._secret, self._owner.store_id).size
        except BadBatch:
            pass  # it is bad, or goes on behind the view: it is looked at by itself
        return offset

    def _one_batch(self, position: int) -> Generator[int | PartitionDamage, None, int]:
        """Look at what begins at *position*: a batch of any size, or bad bytes; returns where the next one begins."""
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
        """The header at *position* when it, runs, table and mark are right. Raises OSError."""
        view = self._read(position, BATCH_HEADER_SIZE)
        header = self._likely_header(view, position)
        if header is None:
            return None
        view = self._read(position, header.data_start)
        yield len(view)
        return header if self._is_right(view, position) else None

    def _likely_header(self, view: memoryview, position: int) -> Header | None:
        """The header that begins *view*, if its place and sizes can be true."""
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
        """The crc32c of positions [start, end), READ_BYTES at a time. Raises OSError."""
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
        """The first place from *position* on where a right header stands; the file's end when there is none."""
        while position + BATCH_HEADER_SIZE <= self._limit:
            try:
                view = self._read(position, READ_BYTES)
                yield len(view)
                for place in candidates(view, position):
                    if (yield from self._right_header(place)) is not None:
                        return place
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
        """Something about the file that keeps nobody from reading what is in it."""
        return PartitionDamage(self._owner.partition, self._base, self._base + SEGMENT_HEADER_SIZE, reason, ())

    def _examined(self, view: memoryview, position: int, reason: str) -> PartitionDamage:
        """Which messages are bad of a batch with a right header whose data does not fit its checksum."""
        header = parse_header(view)
        if len(view) < header.size:
            return self._bad(position, position + header.size, _SHORTER)
        return self._marked(view, position, marks_of(view, header), reason)

    def _marked(self, view: memoryview, position: int, marks: Marks, reason: str) -> PartitionDamage:
        places = tuple((position + low, high - low) for low, high in marks)
        return PartitionDamage(self._owner.partition, position, position + parse_header(view).size, reason, places)

    def _read(self, position: int, size: int) -> memoryview:
        """*size* bytes from *position* on, fewer where the segment ends.

        Raises OSError where the disk cannot give them, StorageFailed where the system refuses for another reason.
        """
        buffer, done = memoryview(bytearray(max(0, min(size, self._end - position)))), 0
        try:
            if self._fd < 0:
                self._fd = self._disk.open_aside(self.path)
                self._limit = min(self._end, self._base + self._disk.size(self._fd))
            while done < len(buffer):
                read = self._disk.preadv_aside(self._fd, buffer[done:], position - self._base + done)
                if read <= 0:
                    break
                done += read
        except OSError as error:
            if error.errno in BAD_SECTOR:
                raise
            raise failure(error, "read", self.path, position) from error
        if done < len(buffer):  # it may be cut while it is read
            self._limit = min(self._limit, position + done)
        return buffer[:done]
