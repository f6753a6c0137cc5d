"""Open the message log of a partition that recovery has read to its end: repair its files, then open it for use."""

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
    """A segment file on disk."""

    base: int
    size: int
    #: The end of the segment before it, from its header; None when the header is bad.
    previous_end: int | None


class RecoveredLog:
    """A message log that has been read, and whose files may need repair."""

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
        """*spans* are the segments in *files*, up to position *end*; from *claimed* on no checkpoint knows them.

        *has_junk* says whether bytes that are no batch follow in the last segment, *changed* whether file names were
        added to or removed from the directory and are not on disk.
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
        """Open the log at its end, in a new segment if the end lies below *floor*; see PartitionReplay.finish."""
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
            if self._has_junk:  # overwrite its beginning first: a file without room at its end looks cut
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
        """Cut the last segment to its exact end: the next segment does not begin there."""
        for span in self._spans[-1:]:
            self._end_file(span)

    def _end_file(self, span: SegmentSpan) -> None:
        def cut(segment: Segment) -> None:
            segment.cut(min(span.end - span.base, segment.size()))  # zeros would hide that the rest is lost

        self._with_file(span.base, "cut", cut)

    def _end_files(self) -> None:
        """Give the sealed files of the tail their exact sizes: a stop may have come before that."""
        sizes = {file.base: file.size for file in self._files}
        for span in self._spans[:-1]:
            if span.end > self._claimed and sizes[span.base] != span.end - span.base:
                self._end_file(span)

    def _repair_headers(self, now_us: int) -> None:
        """Write bad headers again: their content follows from the file's name and its position among the others."""
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
