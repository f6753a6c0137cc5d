"""One partition of the message log: a directory of segments, the last of which is written.

Batches are given a position each, staged, and written together: all or none. When one does not fit, ``roll`` prepares
the next segment, and ``write`` makes it the current one. All methods but ``sync`` belong to one thread; ``sync`` may
run in others at the same time, one after another.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from contextlib import suppress
from itertools import compress, pairwise
from pathlib import Path
from typing import Final, NamedTuple

from qmq.errors import BadBytes, StorageError, StorageFailed, SyncFailed
from qmq.format.layout import BATCH_HEADER_SIZE, SEGMENT_HEADER_SIZE
from qmq.storage.disk.disk import Buffer, Disk, failure, read_fully, write_fully
from qmq.storage.message_log.bad_ranges import KnownBad, UnreadableRanges
from qmq.storage.message_log.cold_reads import Residence
from qmq.storage.message_log.segment import FileOffset, Segment, SegmentOwner, segment_path
from qmq.storage.types import SegmentSpan

#: How many sealed segments stay mapped: the last ones that were read.
MAPS_KEPT: Final = 64
_NOT_VIEWED: Final = SegmentSpan(0, 0), memoryview(b"")


class _Group(NamedTuple):
    """Batches staged for one segment, the first at position *start*."""

    segment: Segment
    start: int
    buffers: list[Buffer]


class MessageLog:
    """An open partition. Positions are plain ints; ``end`` is the position behind the last written batch."""

    __slots__ = (
        "_begun", "_ahead", "_created", "_created_synced", "_disk", "_last_viewed", "_maps", "_opened_at", "_retired",
        "_segment_bytes", "_is_dirty", "_start", "_sync_lock", "_target", "_unsynced", "broken", "current", "directory",
        "end", "limit", "owner", "reserve", "residence", "sealed", "staged", "staged_end", "synced", "unreadable",
    )  # fmt: skip

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        owner: SegmentOwner,
        *,
        segment_bytes: int,
        sealed: list[SegmentSpan],
        current: Segment,
        end: int,
        reserve: int,
    ) -> None:
        """Take over a recovered log. *current* is mapped; everything before *end* is on disk."""
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._maps: OrderedDict[int, memoryview] = OrderedDict()
        self._last_viewed = _NOT_VIEWED
        self._begun = Path()  # the file of the sync that ``begin_sync`` began
        self._sync_lock = threading.Lock()
        self._unsynced: tuple[Segment, ...] = (current,)
        self._retired: list[Segment] = []
        self._created = self._created_synced = 0
        self._is_dirty = False
        self.directory = directory
        self.owner = owner
        self.sealed = sealed
        self.current = current
        self.end = self.staged_end = end
        self.synced = end
        #: Batches for the segment that is staged for, the first of them at ``_start``.
        self.staged: list[Buffer] = []
        self._start = end
        self._target = current
        #: Batches staged for segments before that one.
        self._ahead: list[_Group] = []
        #: Positions from here on are given out only after the reserve is renewed.
        self.reserve = reserve
        #: A batch that would end behind this needs ``check``, ``roll`` or a new reserve.
        self.limit = 0
        #: Why no batch is taken any more, after a failed sync.
        self.broken: str | None = None
        #: The bytes that ``view`` refuses.
        self.unreadable = UnreadableRanges()
        self._opened_at = end
        #: Which bytes of the maps are in memory.
        self.residence = Residence(disk, owner.partition)
        self._set_limit()

    # --- writing ---------------------------------------------------------------------------------------------------

    def set_reserve(self, reserve: int) -> None:
        """Allow positions below *reserve* to be given out."""
        self.reserve = reserve
        self._set_limit()

    def fits_segment(self, size: int) -> bool:
        """Return whether *size* more bytes fit the segment that is staged for."""
        return self.staged_end + size <= self._target.base + self._target.capacity

    def stage(self, buffer: Buffer, size: int) -> None:
        """Stage a batch of *size* bytes at ``staged_end``, for the next ``write``."""
        self.staged.append(buffer)
        self.staged_end += size

    def roll(self, created_at_us: int, size: int) -> int:
        """Stage what follows, a batch of *size* bytes, for a new segment, and return its base. The next write makes it
        the current one.

        Raises StorageFull or StorageFailed; nothing has changed then.
        """
        base = self.staged_end
        capacity = max(self._segment_bytes, SEGMENT_HEADER_SIZE + size)
        new = Segment.create(self._disk, self.directory, self.owner, base, base, capacity, created_at_us)
        self._ahead.append(_Group(self._target, self._start, self.staged))
        self._target = new
        self.staged = []
        self._start = self.staged_end = base + SEGMENT_HEADER_SIZE
        self._set_limit()
        return base

    def unstage(self) -> None:
        """Drop all that is staged: its positions are free again, and segments made for it are removed."""
        for segment in [group.segment for group in self._ahead[1:]] + ([self._target] if self._ahead else []):
            segment.close()
            try:
                self._disk.unlink(segment.path)
            except OSError as error:
                self.broken = (
                    f"{failure(error, 'remove', segment.path)}; nothing more is stored in this partition: it would "
                    "overlap that segment. Remove the file and restart the broker"
                )
        self._ahead.clear()
        self._target = self.current
        self.staged.clear()
        self._start = self.staged_end = self.end
        self._set_limit()

    def write(self) -> None:
        """Write all that is staged: a call to the system for each segment and each MiB, mostly one.

        Raises StorageFull or StorageFailed; nothing is stored then, nothing stays staged, and the next write may work
        again. Raises SyncFailed when a part of it may be there after a restart; nothing is written until then.
        """
        if self.broken is not None:
            self.unstage()
            self.check()
        segment, position = self.current, self.end
        try:
            if self._is_dirty:
                self._clean()
            for segment, position, buffers in self._ahead:
                segment.write(buffers, sum(map(len, buffers)), position - segment.base)
            segment, position = self._target, self._start
            segment.write(self.staged, self.staged_end - position, position - segment.base)
        except OSError as error:
            failed = failure(error, "write", segment.path, position)
            self.unstage()
            self._clean_up(failed)
            self.check()
            raise failed from error
        self.end = self._start = self.staged_end
        self.staged.clear()
        if self._ahead:
            self._commit_roll()

    def write_one(self, batch: Buffer, size: int) -> bool:
        """Write one batch at ``end``, while nothing is staged and it ends at or before ``limit``.

        Return False where that is not simple, or the write fails: nothing is stored then, and ``write`` tells why.
        """
        if self.broken is not None or self._is_dirty:
            return False
        segment, position = self.current, self.end
        try:
            if self._disk.pwritev(segment.fd, (batch,), position - segment.base) != size:
                write_fully(self._disk, segment.fd, [batch], position - segment.base)
        except OSError as error:
            self._clean_up(failure(error, "write", segment.path, position))
            return False
        self.end = self._start = self.staged_end = position + size
        return True

    def _clean_up(self, failed: StorageError) -> None:
        """Remove what a failed write left behind the end: whole batches in it would come back after a restart."""
        self._is_dirty = True
        with suppress(OSError):
            self._clean()
        if self._is_dirty and self._has_leftovers():
            self.broken = self.broken or (
                f"{failed}, and the bytes that it wrote cannot be removed; nothing more is stored in this partition "
                "until the broker has been restarted and has read it again"
            )

    def _clean(self) -> None:
        self.current.extend(self.end - self.current.base)
        self._is_dirty = False

    def _has_leftovers(self) -> bool:
        """Return whether bytes may stand behind the end: writes go from front to back."""
        try:
            return any(read_fully(self._disk, self.current.fd, BATCH_HEADER_SIZE, self.end - self.current.base))
        except OSError:
            return True

    def _commit_roll(self) -> None:
        segments = [group.segment for group in self._ahead] + [self._target]
        self._ahead.clear()
        for old, new in pairwise(segments):
            with suppress(OSError):  # the next segment's base says where this one ends; recovery cuts it then
                old.cut(new.base - old.base)
            self._keep_map(old.base, old.view)
            self.sealed.append(SegmentSpan(old.base, new.base))
        self._unsynced += tuple(segments[1:])
        self._created += 1
        self.current = self._target

    def _set_limit(self) -> None:
        end = min(self._target.base + self._target.capacity, self.reserve)
        self.limit = end if self.broken is None else 0

    # --- syncing ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise SyncFailed when a sync has failed since the log was opened."""
        if self.broken is not None:
            raise SyncFailed(self.broken)

    def sync(self) -> None:
        """[thread] Bring everything written before the call to the disk.

        Raises SyncFailed, then for every later call and write too: what a failed sync left in memory reads well but is
        not on disk, and the system reports that only once. Raises StorageFailed when the sync could not begin: call it
        again.
        """
        with self._sync_lock:
            self.check()
            while self._retired:
                self._retired.pop().close()
            segments, created = self._unsynced, self._created
            path = self.directory
            try:
                for segment in segments:
                    path = segment.path
                    segment.sync()
                if created != self._created_synced:
                    path = self.directory
                    self._disk.fsync_directory(path)
                    self._created_synced = created
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # the directory was not even opened
                    raise failure(error, "sync", path) from error
                self._break(error, path)
                self.check()

    def check_there(self) -> None:
        """[thread] Take no more batches when the current segment's name is no longer that of the open file: the file or
        its directory was removed or replaced. Raises StorageFailed when the system cannot say.
        """
        if self.broken is not None:
            return
        with self._sync_lock:  # so no segment is closed meanwhile
            segment = self.current
            try:
                is_there = self._disk.is_at(segment.fd, segment.path)
            except OSError as error:
                raise failure(error, "look at", segment.path) from error
            if not is_there:
                self.give_up(
                    f"{segment.path}, which is being written, was removed, moved or replaced while the broker runs, or "
                    f"{self.directory} was; nothing more is stored in this partition: put it back, then restart the "
                    "broker"
                )

    def give_up(self, reason: str) -> None:
        """[thread] Take no more batches: every later sync and write fails with *reason*."""
        self.broken = self.broken or reason

    def _break(self, error: OSError, path: Path) -> None:
        self.broken = (
            f"{failure(error, 'sync', path)}; nothing more is stored in this partition until the broker has been "
            "restarted and has read it again"
        )

    def begin_sync(self) -> int | None:
        """Return the descriptor whose fdatasync does all that ``sync`` would do; ``end_sync`` must follow, and other
        syncs wait for it. Return None when ``sync`` would do more, or one is running.
        """
        if not self._sync_lock.acquire(blocking=False):
            return None
        if self.broken is None and not self._retired and self._created == self._created_synced:
            segments = self._unsynced
            if len(segments) == 1:
                self._begun = segments[0].path
                return segments[0].fd
        self._sync_lock.release()
        return None

    def end_sync(self, error: OSError | None) -> None:
        """Note that the fdatasync has ended; if it failed, every later ``sync`` fails too."""
        if error is not None:
            self._break(error, self._begun)
        self._sync_lock.release()

    def mark_synced(self, position: int) -> None:
        """Note that a ``sync`` that began when ``end`` was *position* has succeeded."""
        self.synced = max(self.synced, position)
        if len(self._unsynced) > 1:
            segments = self._unsynced
            kept = [after > self.synced for after in (*(segment.base for segment in segments[1:]), self.synced + 1)]
            self._unsynced = tuple(compress(segments, kept))
            # The next sync closes them: one that runs now may still use them.
            self._retired += [segment for segment in segments if segment not in self._unsynced]

    # --- reading ---------------------------------------------------------------------------------------------------

    def view(self, position: int, size: int) -> memoryview:
        """Return *size* mapped bytes at *position*; the view keeps its map alive.

        Raises BadBytes when they are not there, KnownBad when some of them are known to be unreadable.
        """
        if self.unreadable:
            self._check_readable(position, size)
        return self.view_marked(position, size)

    def view_marked(self, position: int, size: int) -> memoryview:
        """Return a view also where bytes are known to be unreadable: the caller knows which, and does not touch
        them.
        """
        current = self.current
        offset = position - current.base
        if offset < SEGMENT_HEADER_SIZE:
            view = self._sealed_view(position, size)
        elif position + size > self.end:
            raise self._outside(position, size)
        else:
            view = current.view[offset : offset + size]
        return self._waited_view(position, view) if self.residence.may_wait else view

    def _waited_view(self, position: int, view: memoryview) -> memoryview:
        """Return the bytes of *view* without touching pages that are not in memory."""
        base = self._base_at(position)
        mapped: mmap.mmap = view.obj  # type: ignore[assignment]  # all views here are of maps
        if position >= self.hot_from() or self.residence.holds(mapped, position - base, len(view)):
            return view
        path = segment_path(self.directory, base)
        try:
            fd = self._disk.open(path, os.O_RDONLY)
            try:
                read = read_fully(self._disk, fd, len(view), position - base)
            finally:
                self._disk.close(fd)
        except OSError as error:
            raise failure(error, "read", path, position) from error
        if len(read) < len(view):
            raise BadBytes(f"{path} is shorter than it was; run qmq verify")
        return memoryview(read)

    def _check_readable(self, position: int, size: int) -> None:
        bad = self.unreadable.first_in(position, size)
        if bad is not None:
            path = segment_path(self.directory, self._base_at(position))
            raise KnownBad(f"{path} is known to be bad from position {bad[0]} to {bad[1]}; run qmq verify")

    def _base_at(self, position: int) -> int:
        """Return the base of the segment that *position* belongs to."""
        bases = [*(span.base for span in self.sealed), self.current.base]
        return bases[max(0, bisect_right(bases, position) - 1)]

    def segment_at(self, position: int) -> SegmentSpan | None:
        """Return the segment that has *position*; None when there is none."""
        if position >= self.current.base:
            return SegmentSpan(self.current.base, self.end)
        at = bisect_right(self.sealed, position, key=lambda span: span.base) - 1
        return self.sealed[at] if at >= 0 and position < self.sealed[at].end else None

    def file_offset_of(self, position: int) -> FileOffset:
        """Return the file and the offset of a position."""
        base = self._base_at(position)
        return FileOffset(segment_path(self.directory, base), position - base, self.owner.partition, position)

    def hot_from(self) -> int:
        """Return the position from which on bytes are taken to be in memory, since they were written a moment ago."""
        return max(self._opened_at, self.current.base, self.end - self._disk.hot_bytes)

    def mapped_at(self, position: int) -> tuple[SegmentSpan, mmap.mmap]:
        """Return the segment that has *position*, or would, and its map. Raises StorageError."""
        current = self.current
        if position >= current.base or not self.sealed:
            return SegmentSpan(current.base, self.end), current.view.obj  # type: ignore[return-value]  # as above
        span = self.sealed[max(0, bisect_right(self.sealed, position, key=lambda span: span.base) - 1)]
        return span, self._sealed_map(span).obj  # type: ignore[return-value]  # as above

    def remove(self, base: int) -> tuple[int, SegmentSpan]:
        """Leave a sealed segment out from now on; return where the one before it ends (its own base if it is the
        first), and its span. Views of it stay good.
        """
        at = next(at for at, span in enumerate(self.sealed) if span.base == base)
        self._maps.pop(base, None)
        self._last_viewed = _NOT_VIEWED
        return self.sealed[at - 1].end if at else base, self.sealed.pop(at)

    def spans(self) -> list[SegmentSpan]:
        """Return the spans of all segments, the current one up to ``end``."""
        return [*self.sealed, SegmentSpan(self.current.base, self.end)]

    def close(self) -> None:
        """Close all files; no sync may be running. Views stay usable."""
        self.unstage()
        for segment in {*self._unsynced, *self._retired}:
            segment.close()
        self._unsynced, self._retired = (), []
        self._maps.clear()
        self._last_viewed = _NOT_VIEWED

    def _sealed_view(self, position: int, size: int) -> memoryview:
        span, view = self._last_viewed
        if not span.base + SEGMENT_HEADER_SIZE <= position <= position + size <= span.end:
            at = bisect_right(self.sealed, position, key=lambda span: span.base) - 1
            if at < 0 or position + size > self.sealed[at].end or position < self.sealed[at].base + SEGMENT_HEADER_SIZE:
                raise self._outside(position, size)
            span = self.sealed[at]
            view = self._sealed_map(span)
            self._last_viewed = span, view
        offset = position - span.base
        if offset + size > len(view):
            raise BadBytes(f"{segment_path(self.directory, span.base)} is shorter than it was; run qmq verify")
        return view[offset : offset + size]

    def _sealed_map(self, span: SegmentSpan) -> memoryview:
        view = self._maps.get(span.base)
        if view is None:
            return self._map(span)
        self._maps.move_to_end(span.base)
        return view

    def _map(self, span: SegmentSpan) -> memoryview:
        segment = Segment.open(self._disk, self.directory, span.base, span.end - span.base, writable=False)
        try:
            segment.capacity = min(segment.capacity, segment.size())
            segment.map()
        except (OSError, ValueError) as error:
            raise StorageFailed(f"cannot map {segment.path}: {error}; check the disk, then run qmq verify") from error
        finally:
            segment.close()
        self._keep_map(span.base, segment.view)
        return segment.view

    def _keep_map(self, base: int, view: memoryview) -> None:
        self._maps[base] = view
        if len(self._maps) > MAPS_KEPT:
            self._maps.popitem(last=False)

    def _outside(self, position: int, size: int) -> BadBytes:
        return BadBytes(f"{self.directory} has no {size} bytes at position {position}; run qmq verify")
