"""Replay one partition after a start: check its files, bring its consumer log up to date, find its end.

``load`` reads the part that the checkpoint claims, only where the consumer log has lost rows. ``read_tail`` reads
everything behind the checkpoint. ``decide`` says what to do with the tail (decide.py); ``finish`` then opens the log
for use (finish_log.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from qmq.errors import BadBytes, ForeignFile, StorageError
from qmq.format.batch import EntryRow, Header
from qmq.format.layout import ENTRY_DTYPE, SEGMENT_HEADER_SIZE
from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.consumer_log.rebuild import Damaged, RowMaker
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.disk.disk import Disk, failure, read_fully, write_fully
from qmq.storage.message_log.partition_log import MessageLog
from qmq.storage.message_log.reader import Scanner, ScanResult
from qmq.storage.message_log.segment import (
    ForeignSegment,
    Segment,
    SegmentOwner,
    list_bases,
    segment_path,
)
from qmq.storage.meta.checkpoint import PartitionClaim
from qmq.storage.meta.subjects import SubjectTable
from qmq.storage.recovery.decide import PartitionReport, Tail
from qmq.storage.recovery.finish_log import RecoveredLog, SegmentFile
from qmq.storage.types import Hole, SegmentSpan

_GATHER_ROWS: Final = 4_096


class PartitionReplay:
    """Replays one partition while its store is opened."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        owner: SegmentOwner,
        secret: bytes,
        consumer: ConsumerLog,
        subjects: SubjectTable,
        claim: PartitionClaim | None,
        floor: int,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._owner = owner
        self._consumer = consumer
        self._claim = claim
        self._floor = floor
        self._maker = RowMaker(subjects)
        self._secret = secret
        self._scanner = Scanner(disk, secret, owner.store_id, self._feed)
        self._files: list[SegmentFile] = []
        self._foreign_segments: list[SegmentFile] = []
        self._spans: list[SegmentSpan] = []
        self._base = -1  # of the segment that the consumer log appends to
        self._changed = False
        self._has_junk = False  # bytes that are no batch follow in the last segment
        self.report = PartitionReport(owner.partition)
        self.notes: list[str] = []
        #: The first position that the checkpoint does not claim.
        self.claimed = 0
        self.end = 0
        self.last_stored_at_us = 0
        self.blind_bytes = 0
        self.damaged: list[Damaged] = []
        self.holes: list[Hole] = list(claim.holes) if claim else []
        #: The bases of removed segments that still have files.
        self.left: list[int] = []

    # --- the claimed part --------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Check the files, load the consumer log, and append the rows of the claimed part that it has lost.

        Raises StorageError when the files are missing, belong to another store, or cannot be read.
        """
        self._files = self._look()
        bases = {file.base: file for file in self._files}
        claim = self._claim
        if claim is None:
            self.claimed = self._files[0].base if self._files else self._floor
            position = self._consumer.load([(self.claimed, self.claimed, False)] if self._files else [], 0)
            self._base = self.claimed if self._files else -1
            self._spans = []
            return
        self.claimed = claim.position
        if claim.segments and not any(span.base in bases for span in claim.segments):
            if self._foreign_segments:
                raise ForeignFile("; ".join(self.notes))
            raise StorageError(
                f"{self._directory} has none of the {len(claim.segments)} segments that the checkpoint knows; is its "
                "disk mounted? If they are lost, move the checkpoints and the directory away to start over"
            )
        for span in claim.segments:
            if span.base not in bases:
                self._lose(Hole(span.base, span.end))
            elif span.base + bases[span.base].size < span.end:
                self._lose(Hole(self._whole_until(span), span.end))
        self._spans = [span for span in claim.segments if span.base in bases]
        current = self._spans[-1:] if self._spans and self._spans[-1] == claim.segments[-1] else []
        known = [(span.base, span.end, span not in current) for span in self._spans]
        renumber = bool(claim.removed)
        position = self._consumer.load(known, claim.position, claim.journal, self.reread, renumber=renumber)
        self._base = max((span.base for span in self._spans if span.base <= position), default=-1)
        if self._base >= 0 and not current and position >= self._spans[-1].end:
            self._base = -1
        self._feed_claimed(position)
        self._consumer.settle_claimed()

    def _look(self) -> list[SegmentFile]:
        files = []
        for base in list_bases(self._disk, self._directory):
            segment = Segment.open(self._disk, self._directory, base, 0, writable=False)
            try:
                files.append(SegmentFile(base, segment.size(), segment.previous_end(self._owner)))
            except ForeignSegment as error:
                self._foreign_segments.append(SegmentFile(base, segment.size(), None))
                self.notes.append(f"{error}; until then it is not read")
            finally:
                segment.close()
        claim = self._claim
        if claim is None:
            if self._foreign_segments and not files:
                raise ForeignFile("; ".join(self.notes))
            return files
        claimed = {span.base for span in claim.segments}
        strays = [file.base for file in files if file.base < claim.position and file.base not in claimed]
        self.notes += [
            f"{self._directory}: the checkpoint does not know segment {base:016x}; it is not changed"
            for base in strays
            if not claim.is_removed(base)
        ]
        self.left = [base for base in strays if claim.is_removed(base)]
        return [file for file in files if file.base not in strays]

    def _whole_until(self, span: SegmentSpan) -> int:
        """Return the end of the last whole batch of a segment that was cut short."""
        segment = Segment.open(self._disk, self._directory, span.base, 0, writable=False)
        scanner = Scanner(self._disk, self._secret, self._owner.store_id, lambda header, batch: None)
        try:
            return scanner.scan(segment, span.base, span.base + segment.size()).end
        finally:
            segment.close()

    def _lose(self, hole: Hole) -> None:
        """Record claimed bytes that are gone, once."""
        if not any(known.start <= hole.start and hole.end <= known.end for known in self.holes):
            self.report.damaged.append(hole)
            self.holes.append(hole)

    def _lose_claimed(self, found: ScanResult, end: int) -> None:
        """Record the bytes up to *end* that a scan of claimed bytes has not found."""
        self.report.damaged += found.rotten
        for hole in found.holes:
            self._lose(hole)
        if found.end < end:
            self._lose(Hole(found.end, end))

    def _feed_claimed(self, position: int) -> None:
        """Append the rows of the batches from *position* up to the checkpoint's position."""
        for span in self._spans:
            if span.end <= position:
                continue
            self._enter(span.base)
            self.report.rebuilt_bytes += span.end - max(position, span.base)
            found = self._scan(span.base, max(position, span.base), span.end, vouched=True)
            self._lose_claimed(found, span.end)

    def reread(self, base: int, end: int) -> list[EntryRow | Rows]:
        """Return the rows of the batches of the segment at *base*, before position *end*. Raises StorageFailed."""
        pieces: list[EntryRow | Rows] = []
        few: list[EntryRow] = []

        def feed(header: Header, batch: memoryview) -> None:
            if self._is_hole(header):
                return
            rows = self._maker.rows(header, batch)
            if isinstance(rows, tuple):
                few.append(rows)
                if len(few) < _GATHER_ROWS:
                    return
            if few:
                pieces.append(np.array(few, ENTRY_DTYPE))
                few.clear()
            if not isinstance(rows, tuple):
                pieces.append(rows)

        segment = Segment.open(self._disk, self._directory, base, 0, writable=False)
        try:
            found = Scanner(self._disk, self._secret, self._owner.store_id, feed).scan(segment, base, end, vouched=True)
        finally:
            segment.close()
        self._lose_claimed(found, end)
        if few:
            pieces.append(np.array(few, ENTRY_DTYPE))
        return pieces

    # --- the tail ----------------------------------------------------------------------------------------------------

    def read_tail(self, segment_bytes: int, *, rewrite: bool) -> Tail:
        """Read everything behind the checkpoint; with *rewrite*, write valid batches again in place and sync them.

        A file of *segment_bytes* or more, the size at creation, has not been shortened.

        Raises StorageFailed, or BadBytes when the batches are those of a store with another secret.
        """
        spans = {span.base for span in self._spans}
        files = [file for file in self._files if file.base not in spans or file.base == self._current_base()]
        tail = Tail.SHORT if self._is_short() else Tail.WHOLE
        self.end = self.claimed
        foreign = 0
        for number, file in enumerate(files):
            if file.base not in spans:
                if self._spans and self.end < self._expected(file) and not any(map(self._has_batches, files[number:])):
                    self._remove(files[number:])
                    break
                self._open_gap(file, first=not self._spans)
            following = files[number + 1] if number + 1 < len(files) else None
            stop = file.base + file.size if following is None else min(file.base + file.size, following.base)
            start = max(file.base, self.claimed) if file.base in spans else file.base
            self._enter(file.base)
            found = self._scan(file.base, start, stop, rewrite_from=start if rewrite else None)
            foreign += found.foreign
            self._note(found)
            self.end = max(self.end, found.end)
            self._put_span(SegmentSpan(file.base, self.end))
            if following is None and found.junk_bytes:
                tail |= Tail.JUNK
                self.report.cut_bytes = found.junk_bytes
            self._has_junk = found.junk_bytes > 0
            shortened = found.severed or (found.full and file.size < segment_bytes)
            if rewrite and following is None and shortened:
                tail |= Tail.SEVERED
        if foreign and not self.report.replayed_batches and not self._claim:
            raise BadBytes(
                f"the batches in {self._directory} were not written by this store: store-a and store-b belong to "
                "another directory; put the right ones back"
            )
        if self.report.holes:
            tail |= Tail.HOLES
        if self.blind_bytes:
            tail |= Tail.BLIND
        if rewrite:
            self._sync_directory()
        return tail

    def blocked_until(self, reserve: int) -> int:
        """Return the end of the last foreign file below the reserve, where the log would continue; 0 without one."""
        blocking = (file for file in self._foreign_segments if self.claimed <= file.base < reserve)
        return max((file.base + file.size for file in blocking), default=0)

    def _current_base(self) -> int:
        """Return the base of the segment that was current at the checkpoint; -1 when it is gone."""
        there = self._claim is not None and self._spans and self._spans[-1] == self._claim.segments[-1]
        return self._spans[-1].base if there else -1

    def _is_short(self) -> bool:
        if self._claim is None or not self._claim.segments:
            return False
        base = self._current_base()
        return base < 0 or any(file.base == base and base + file.size < self.claimed for file in self._files)

    def _open_gap(self, file: SegmentFile, *, first: bool) -> None:
        """Record lost bytes between the end so far and the next segment, unless there are none, or a jump."""
        expected = self._expected(file)
        if not first and self.end < expected:
            self.report.holes.append(Hole(self.end, expected))
            self.blind_bytes += expected - self.end
            if self._spans[-1].end == self.end:
                self._spans[-1] = self._spans[-1]._replace(end=expected)
        self.end = file.base + SEGMENT_HEADER_SIZE

    def _expected(self, file: SegmentFile) -> int:
        """Return the end of the log when that segment was created."""
        if file.previous_end is not None:
            return file.previous_end
        return self.end if file.base == self._floor else file.base

    def _has_batches(self, file: SegmentFile) -> bool:
        return self._whole_until(SegmentSpan(file.base, file.base + file.size)) > file.base + SEGMENT_HEADER_SIZE

    def _remove(self, files: list[SegmentFile]) -> None:
        """Remove segments that a roll created and that got no batch: the bytes before them were not written either."""
        for file in reversed(files):
            path = segment_path(self._directory, file.base)
            try:
                self._disk.unlink(path)
            except OSError as error:
                raise failure(error, "remove", path) from error
        self._changed = True

    def _note(self, found: ScanResult) -> None:
        self.report.holes += found.holes
        self.report.replayed_batches += found.batches
        self.report.rewritten_bytes += found.rewritten_bytes
        self.blind_bytes += found.blind_bytes
        for prefix in found.damaged:
            self.damaged += self._maker.damaged(prefix)

    def _put_span(self, span: SegmentSpan) -> None:
        if self._spans and self._spans[-1].base == span.base:
            self._spans.pop()
        self._spans.append(span)

    def _enter(self, base: int) -> None:
        """Make the consumer log append to the segment at *base*."""
        if base > self._base:
            self._consumer.roll(base)
            self._base = base

    def _scan(
        self, base: int, start: int, stop: int, rewrite_from: int | None = None, *, vouched: bool = False
    ) -> ScanResult:
        segment = Segment.open(self._disk, self._directory, base, 0, writable=rewrite_from is not None)
        try:
            found = self._scanner.scan(segment, start, stop, rewrite_from, vouched=vouched)
            if rewrite_from is not None:
                if rewrite_from == base:
                    header = read_fully(self._disk, segment.fd, SEGMENT_HEADER_SIZE, 0)
                    write_fully(self._disk, segment.fd, [header], 0)
                segment.sync()
        except OSError as error:
            raise failure(error, "sync", segment.path) from error
        finally:
            segment.close()
        return found

    def _is_hole(self, header: Header) -> bool:
        """Return whether a batch lies in a hole: its sequences are gaps, so it must not come back."""
        return any(hole.start <= header.position < hole.end for hole in self.holes)

    def _feed(self, header: Header, batch: memoryview) -> None:
        if header.position < self.claimed and self._is_hole(header):
            return
        self._consumer.append(self._maker.rows(header, batch))
        if header.position >= self.claimed:
            self.report.replayed_messages += header.messages
            self.last_stored_at_us = max(self.last_stored_at_us, header.stored_at_us)

    def _sync_directory(self) -> None:
        try:
            self._disk.fsync_directory(self._directory)
        except OSError as error:
            raise failure(error, "sync", self._directory) from error

    def claim(self) -> PartitionClaim:
        """Return the checkpoint's claim as far as it is still true, without the consumer log; else an empty claim."""
        if self._claim is None:
            return PartitionClaim(self._files[0].base if self._files else self._floor, (), (), None)
        holes = tuple(hole for hole in self.holes if hole.start < self.claimed)
        return replace(self._claim, holes=holes, journal=None)

    # --- opening -----------------------------------------------------------------------------------------------------

    def finish(self, *, floor: int, reserve: int, segment_bytes: int, now_us: int, sync: bool) -> MessageLog:
        """Cut the tail and open the log at its end, in a new segment if the end lies below *floor*. The changes are on
        disk when this returns, with *sync* the older bytes too. Raises StorageFull or StorageFailed.
        """
        read = RecoveredLog(
            self._disk,
            self._directory,
            self._owner,
            self._files,
            self._spans,
            self.end,
            claimed=self.claimed,
            has_junk=self._has_junk,
            changed=self._changed,
        )
        log = read.open(floor=floor, reserve=reserve, segment_bytes=segment_bytes, now_us=now_us, sync=sync)
        self.notes += read.notes
        self.end = log.end
        self._enter(log.current.base)
        return log
