"""The message log of a partition that was read to its end: its files are put right, and it is opened for use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from qmq.format.layout import BATCH_HEADER_SIZE, SEGMENT_HEADER_SIZE
from qmq.storage.disk.disk import Disk, failure, write_fully
from qmq.storage.message_log.partition_log import MessageLog
from qmq.storage.message_log.segment import Segment, SegmentOwner, pack_header, remove_unfinished
from qmq.storage.types import SegmentSpan


class SegmentFile(NamedTuple):
    """A segment file as found."""

    base: int
    size: int
    #: As its header says; None when the header is bad.
    previous_end: int | None


class RecoveredLog:
    """What has been read of a log, and what its files still need."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        owner: SegmentOwner,
        files: list[SegmentFile],
        spans: list[SegmentSpan],
        end: int,
        *,
        claimed: int,
        has_junk: bool,
        changed: bool,
    ) -> None:
        """*spans* are what stands in *files*, up to position *end*; from *claimed* on no checkpoint knows them.

        *has_junk* says whether bytes that are no batch follow in the last segment, *changed* whether the directory has
        names, or lost some, that are not on disk.
        """
        self._disk = disk
        self._directory = directory
        self._owner = owner
        self._files = files
        self._spans = spans
        self._end = end
        self._claimed = claimed
        self._has_junk = has_junk
        self._changed = changed
        self.notes: list[str] = []

    def open(self, *, floor: int, reserve: int, segment_bytes: int, now_us: int, sync: bool) -> MessageLog:
        """The log at its end, in a new segment when that lies below *floor*; see PartitionReplay.finish."""
        remove_unfinished(self._disk, self._directory)
        self._repair_headers(now_us)
        self._end_files()
        created = not self._spans or self._end < floor
        if created:
            previous_end = self._end if self._spans else floor
            self._seal_last()
            current = Segment.create(
                self._disk, self._directory, self._owner, floor, previous_end, segment_bytes, now_us
            )
            self._end = floor + SEGMENT_HEADER_SIZE
        else:
            current = self._open_current(segment_bytes)
        try:
            if sync or created or self._changed:
                current.sync()
                self._disk.fsync_directory(self._directory)
        except OSError as error:
            current.close()
            raise failure(error, "sync", current.path) from error
        sealed = [span for span in self._spans if span.base != current.base]
        return MessageLog(
            self._disk,
            self._directory,
            self._owner,
            segment_bytes=segment_bytes,
            sealed=sealed,
            current=current,
            end=self._end,
            reserve=reserve,
        )

    def _open_current(self, segment_bytes: int) -> Segment:
        base = self._spans[-1].base
        self._spans[-1] = SegmentSpan(base, self._end)
        capacity = max(segment_bytes, self._end - base)
        current = Segment.open(self._disk, self._directory, base, capacity, writable=True)
        try:
            if self._has_junk:  # take it away, and leave room at every moment: without, the file looks cut
                end = self._end - base
                room = min(BATCH_HEADER_SIZE, capacity - end)
                write_fully(self._disk, current.fd, [bytes(room)], end)
                current.extend(end + room)
            else:
                current.grow()
            current.map()
        except OSError as error:
            current.close()
            raise failure(error, "extend", current.path, self._end) from error
        return current

    def _seal_last(self) -> None:
        """Cut the last segment to its exact end: the next one begins elsewhere."""
        for span in self._spans[-1:]:
            self._end_file(span)

    def _end_file(self, span: SegmentSpan) -> None:
        def cut(segment: Segment) -> None:
            segment.cut(min(span.end - span.base, segment.size()))  # zeros would hide that the rest of it is lost

        self._with_file(span.base, "cut", cut)

    def _end_files(self) -> None:
        """Give the sealed files of the tail their exact sizes, which a stop may have kept from them."""
        sizes = {file.base: file.size for file in self._files}
        for span in self._spans[:-1]:
            if span.end > self._claimed and sizes[span.base] != span.end - span.base:
                self._end_file(span)

    def _repair_headers(self, now_us: int) -> None:
        """Write again what headers must say where they are bad: all of it follows from the file's name and place."""
        end_before = dict(zip((s.base for s in self._spans[1:]), (s.end for s in self._spans), strict=False))
        for file in self._files:
            if file.previous_end is not None or not any(span.base == file.base for span in self._spans):
                continue
            previous_end = end_before.get(file.base, file.base)
            header = pack_header(self._owner, file.base, previous_end, now_us)

            def put(segment: Segment, header: bytes = header) -> None:
                write_fully(self._disk, segment.fd, [header], 0)

            self._with_file(file.base, "write", put)
            self.notes.append(f"{self._directory}: the header of segment {file.base:016x} was bad; it is written again")

    def _with_file(self, base: int, doing: str, change: Callable[[Segment], None]) -> None:
        segment = Segment.open(self._disk, self._directory, base, 0, writable=True)
        try:
            change(segment)
            segment.sync()
        except OSError as error:
            raise failure(error, doing, segment.path) from error
        finally:
            segment.close()
        self._changed = True
