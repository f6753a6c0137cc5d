"""The key indexes of one partition: which segments have one, look-ups in them, and the ones to make.

A segment without a key index (the one that is being written, those sealed a moment ago, those whose file is gone or
rotten) is searched by its hash columns; ``search`` does both, so that its result is always complete.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Final

from qmq.errors import BadBytes, StorageFailed
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq.storage.disk.disk import BAD_SECTOR, Disk
from qmq.storage.disk.free_space import FreeSpace
from qmq.storage.key_index.build import KeyIndexBuilder
from qmq.storage.key_index.check import KeyReader
from qmq.storage.key_index.key_file import SUFFIX, KeyFile, base_of, keys_path, owner_of
from qmq.storage.key_index.recent import RecentFilters
from qmq.storage.key_index.search import KeySearch, SearchPart
from qmq.storage.key_index.walk import SegmentWalk
from qmq.storage.message_log.partition_log import MessageLog
from qmq.storage.types import SegmentSpan

#: Key indexes that are open at a time: the last ones that were searched.
FILES_KEPT: Final = 128


class KeyIndex:
    """The key indexes of one partition. All methods but those marked [thread] belong to the thread of the store."""

    def __init__(self, disk: Disk, log: MessageLog, secret: bytes, room: FreeSpace) -> None:
        self._disk = disk
        self._room = room
        self._log = log
        self._secret = secret
        self._lock = threading.Lock()
        self._files: OrderedDict[int, KeyFile] = OrderedDict()
        self._recent: dict[int, RecentFilters] = {}
        self._is_closed = False
        #: The bases of segments that have a key index, as far as is known.
        self.indexed: set[int] = set()
        #: The bases of segments that were removed.
        self.removed: set[int] = set()

    def load(self, left: list[int]) -> None:
        """Find the files that are there, and remove those of segments that are not; *left* are the bases of removed
        segments that still have files. Never fails: what cannot be read is made again.
        """
        known = {span.base for span in self._log.sealed}
        with suppress(OSError):
            for name in self._disk.listdir(self._log.directory):
                base = base_of(name)
                if base is None:
                    continue
                if name.endswith(SUFFIX) and base in known:
                    self.indexed.add(base)
                elif not name.endswith(SUFFIX) or base not in left:
                    with suppress(OSError):
                        self._disk.unlink(self._log.directory / name)

    # --- searching ---------------------------------------------------------------------------------------------------

    def search(self, value: int, start: int = 0, end: int | None = None, *, newest: bool = False) -> KeySearch:
        """Return a search for the batches with a hash that begin at positions [start, end), oldest or *newest* first.

        *value* is ``hashing.key_hash`` of a key, or ``hashes.hash_of_id`` of an origin id; a batch that is found may
        have another key with the same hash. Batches that are stored from now on are not found. Example::

            search = partition.key_index.search(key_hash("order-4421"), newest=True)
            while not (step := search.step()).is_last:      # in a thread
                ...                                         # step.positions, step.searched_to
            search.close()
        """
        stop = self._log.end if end is None else min(end, self._log.end)
        parts = [
            SearchPart(span, max(start, span.base), min(stop, span.end), span.base in self.indexed)
            for span in self._log.spans()
            if span.base < stop and span.end > start
        ]
        return KeySearch(self, value, parts, start, stop, newest=newest)

    def unindexed(self) -> list[SegmentSpan]:
        """Return the segments without a key index, ascending; the last is the one that is being written."""
        return [span for span in self._log.spans() if span.base not in self.indexed]

    def look_up(
        self, span: SegmentSpan, value: int, low: int, high: int, *, newest: bool = False, limit: int = 0
    ) -> list[int] | None:
        """[thread] Return the positions in [low, high) of batches of one segment that have a hash, in order; where they
        are *limit* or more there may be others behind them. None: the segment has no good index, and has to be read.
        """
        base = span.base
        with self._lock:
            try:
                file = self._file(span)
                if not file.may_have(value):
                    return []
                found = file.offsets(value, low - base, high - base, newest=newest, limit=limit)
            except BadBytes:
                self._distrust(base)
                return None
            except OSError as error:
                if isinstance(error, FileNotFoundError) or error.errno in BAD_SECTOR:
                    self._distrust(base)
                return None
        return [base + offset for offset in found]

    def _file(self, span: SegmentSpan) -> KeyFile:
        file = self._files.get(span.base)
        if file is None:
            if self._is_closed:
                raise BadBytes("the store is closed")
            owner = owner_of(self._log.owner.partition, self._log.owner.store_id, *span)
            file = self._files[span.base] = KeyFile.open(self._disk, self._log.directory, owner)
            if len(self._files) > FILES_KEPT:
                self._files.popitem(last=False)[1].close()
        else:
            self._files.move_to_end(span.base)
        return file

    def _distrust(self, base: int) -> None:
        """Have the index of a segment made again, and search its batches until then."""
        self.indexed.discard(base)
        file = self._files.pop(base, None)
        if file is not None:
            file.close()

    def distrust(self, base: int) -> None:
        """[thread] Have the index of a segment made again: its file is missing or rotten."""
        with self._lock:
            self._distrust(base)

    def check(self, span: SegmentSpan) -> None:
        """[thread] Have the index of a segment made again if its file is not there, or not the one of the segment."""
        self.look_up(span, 0, span.base, span.base)

    def reader(self, span: SegmentSpan) -> KeyReader:
        """Return a reader, for the thread of the scrub, of a key index."""
        log = self._log
        return KeyReader(self._disk, log.directory, owner_of(log.owner.partition, log.owner.store_id, *span))

    def close_unused(self) -> None:
        """[thread] Close the files of segments that have been removed."""
        with self._lock:
            for base in self._files.keys() - self.indexed:
                self._files.pop(base).close()

    def walk(self, span: SegmentSpan, start: int, wanted: int | None = None) -> SegmentWalk:
        """Return a reader, for a thread, of the batches of a segment from *start* on, up to *wanted* or its end."""
        log = self._log
        return SegmentWalk(
            self._disk, log.directory, log.owner.store_id, self._secret, span.base, start, span.end, wanted
        )

    def stretches(self, base: int, value: int) -> tuple[list[tuple[int, int]], int]:
        """[thread] Return the ranges of positions of an unindexed segment that may have batches with a hash, and the
        position up to which that is known.
        """
        recent = self._recent.get(base)
        return ([], base) if recent is None else recent.stretches(value)

    # --- making ------------------------------------------------------------------------------------------------------

    def missing(self, settled: list[SegmentSpan]) -> list[SegmentSpan]:
        """Return the segments among *settled*, those with all of their files on disk, that need an index: the newest
        first, since that is looked for most.
        """
        return [span for span in reversed(settled) if span.base not in self.indexed]

    def builder(self, span: SegmentSpan) -> KeyIndexBuilder:
        """Return a builder, for a thread, of the key index of a segment. Pass it to ``built`` when it is done."""
        log = self._log
        owner = owner_of(log.owner.partition, log.owner.store_id, *span)
        return KeyIndexBuilder(
            self._disk, log.directory, owner, self.walk(span, span.base), check_room=self._room.check
        )

    def built(self, base: int) -> bool:
        """Note that a builder is done. Return False where the segment has been removed meanwhile: ``discard`` it."""
        if base in self.removed:
            return False
        self.indexed.add(base)
        self._recent.pop(base, None)
        return True

    def discard(self, base: int) -> None:
        """[thread] Remove the key index of a segment that was removed; the next start does, if this cannot."""
        with suppress(OSError):
            self._disk.unlink(keys_path(self._log.directory, base))

    def extension(self) -> FilterExtension | None:
        """Return the work that covers the segment that is being written with filters, and those that were a moment ago,
        for a thread; None when they are covered.
        """
        current = self._log.current.base
        if current not in self._recent:
            self._recent[current] = RecentFilters(current)
        for span in reversed(self.unindexed()):
            recent = self._recent.get(span.base)
            if (
                recent is not None
                and not recent.is_full
                and recent.end < span.end
                and span.end > span.base + SEGMENT_HEADER_SIZE
            ):
                return FilterExtension(recent, self.walk(span, recent.end))
        return None

    def forget(self, base: int) -> None:
        """Note that a segment was removed."""
        self.removed.add(base)
        self.indexed.discard(base)
        self._recent.pop(base, None)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._is_closed = True
            while self._files:
                self._files.popitem()[1].close()


class FilterExtension:
    """[thread] Covers what was written to a segment with filters. Call ``step`` until it returns False, then
    ``close``.
    """

    def __init__(self, recent: RecentFilters, walk: SegmentWalk) -> None:
        self._recent = recent
        self._walk = walk

    def step(self) -> bool:
        """Read a megabyte of the segment; return False when it is covered. Raises StorageError."""
        if self._walk.is_done or self._recent.is_full:
            return False
        found = self._walk.step()
        if found.unread:
            raise StorageFailed(f"the disk cannot read {found.unread} bytes of {self._walk.path}; run qmq verify")
        self._recent.extend(found.hashes, found.positions, self._walk.position)
        return True

    def close(self) -> None:
        """Close the file."""
        self._walk.close()
