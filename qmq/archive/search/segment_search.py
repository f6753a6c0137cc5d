"""Find messages in segments without a broker: the batches of one store by their stamps, read in windows."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from qmq.archive.files import Files, Reading
from qmq.archive.keys import looked_up
from qmq.archive.segments import Index, SegmentSource, followed
from qmq.errors import BadBatch, BadBytes, UnknownMessage
from qmq.format.ids import MessageId
from qmq.format.layout import HAS_ORIGIN_ID
from qmq.format.pieces import StoredBatch, read_answer
from qmq.format.run import Run
from qmq.net.protocol.matches import MessageMatcher
from qmq.net.protocol.selection import END_US, Boundary, Selection

#: Bytes that one step reads, and batches that it looks at, about.
STEP_BYTES: Final = 4 << 20
STEP_BATCHES: Final = 4_096
#: Batches closer than this are read together.
_JOIN_BYTES: Final = 64 << 10
_OPEN_FILES: Final = 16


class _Place(NamedTuple):
    """A batch at positions [position, end) of a segment."""

    stored_at_us: int
    segment: SegmentSource
    position: int
    end: int


class FoundInFiles(NamedTuple):
    """The result of one step: verified runs in the order of the store, and where the search goes on (None: done).

    ``looked`` bytes of segments were looked at, ``left`` are left; ``unreadable`` places could not be read.
    """

    runs: list[Run]
    after: Boundary | None
    upto_us: int
    looked: int
    left: int
    unreadable: int


class SegmentSearch:
    """A search of the segments of one store. Blocking calls, for one thread at a time."""

    def __init__(self, files: Files, store_id: bytes, segments: Sequence[SegmentSource]) -> None:
        self.store_id = store_id
        self._files = files
        self._segments = sorted(segments, key=lambda segment: (segment.partition, segment.base))
        self._open: OrderedDict[str, Reading] = OrderedDict()
        self._batches: Iterator[_Place] | None = None
        self._next: _Place | None = None
        self._after: Boundary | None = None
        self._left = 0
        self._unreadable = 0
        self._passed = 0  # bytes of segments that the key index has ruled out

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()

    # --- one message -------------------------------------------------------------------------------------------------

    def message(self, name: MessageId) -> Run:
        """Return the run with the message that was stored under an id of this store. Raises UnknownMessage,
        StorageError.
        """
        for segment in self._segments:
            if segment.partition != name.partition or not segment.base <= name.position < segment.end:
                continue
            for index, end in followed(segment.pieces(self._files), segment.end):
                positions = index["position"].astype(np.int64)
                at = int(np.searchsorted(positions, name.position, side="right")) - 1
                if at < 0:
                    break
                following = int(positions[at + 1]) if at + 1 < len(positions) else end
                if name.position >= following:
                    continue
                place = _Place(int(index["stored_at_us"][at]), segment, int(positions[at]), following)
                return self._message_in(place, name)
        raise UnknownMessage(f"there is no message {name} in {self._files.name}")

    def _message_in(self, place: _Place, name: MessageId) -> Run:
        view = memoryview(
            self._reading(place.segment).read(place.position - place.segment.base, place.end - place.position)
        )
        runs, damaged = read_answer(view)
        ordinal = name.position - place.position
        for run in runs:
            if run.ordinal <= ordinal < run.ordinal + run.count and not run.flags & HAS_ORIGIN_ID:
                return run.slice(ordinal - run.ordinal, ordinal - run.ordinal + 1)
        if damaged:
            raise BadBytes(f"message {name} cannot be read in {self._files.name}: {damaged[0].reason}")
        raise UnknownMessage(f"there is no message {name} in {self._files.name}")

    # --- a search ----------------------------------------------------------------------------------------------------

    def step(self, selection: Selection, newest: bool, after: Boundary | None, upto_us: int | None) -> FoundInFiles:
        """Read a few megabytes further from *after* on. Raises StorageError."""
        upto = END_US - 1 if upto_us is None else upto_us
        if self._batches is None or after != self._after:
            self._begin(selection, newest, after, upto)
        places, size = list[_Place](), 0
        while (place := self._next) is not None and size < STEP_BYTES and len(places) < STEP_BATCHES:
            places.append(place)
            size += place.end - place.position
            assert self._batches is not None
            self._next = next(self._batches, None)
        matcher = MessageMatcher(selection) if selection.is_sparse else None
        runs = list[Run]()
        for place, view in self._views(sorted(places)):
            runs += self._runs(selection, matcher, place, view, newest, after)
        unreadable, self._unreadable = self._unreadable, 0
        size, self._passed = size + self._passed, 0
        looked, self._left = min(size, self._left), max(self._left - size, 0)
        self._after = None
        if self._next is not None:
            last_us = places[-1].stored_at_us
            self._after = Boundary(last_us if newest else last_us + 1, 0)
        else:
            self._batches, self._left = None, 0
        return FoundInFiles(runs, self._after, upto, looked, self._left, unreadable)

    def _begin(self, selection: Selection, newest: bool, after: Boundary | None, upto_us: int) -> None:
        low, high = selection.since_us, min(selection.until_us, upto_us)
        if after is not None and newest:
            high = min(high, after.stored_at_us + (after.ordinal > 0))
        elif after is not None:
            low = max(low, after.stored_at_us)
        numbers = sorted({segment.partition for segment in self._segments})
        value = MessageMatcher(selection).value if selection.is_sparse else None
        partitions = [self._partition(number, low, high, newest, value) for number in numbers]
        self._batches = heapq.merge(*partitions, key=lambda place: place.stored_at_us, reverse=newest)
        self._left = sum(segment.end - segment.base for segment in self._segments)
        self._next = next(self._batches, None)

    def _partition(self, number: int, low_us: int, high_us: int, newest: bool, value: int | None) -> Iterator[_Place]:
        """Yield the batches of one partition that were stored in [low, high), in the order of the search; where a
        segment has a key index, those that have the hash *value*.
        """
        segments = [segment for segment in self._segments if segment.partition == number]
        for segment in reversed(segments) if newest else segments:
            having = None if value is None else looked_up(self._files, segment, value, newest)
            if having == []:
                self._passed += segment.end - segment.base
                continue
            try:
                pieces: Iterator[tuple[Index, int]] = followed(segment.pieces(self._files), segment.end)
                for index, end in reversed(list(pieces)) if newest else pieces:
                    positions = index["position"].astype(np.int64)
                    ends = np.append(positions[1:], end).tolist()
                    stamps = index["stored_at_us"]
                    mask = (stamps >= np.uint64(low_us)) & (stamps < np.uint64(high_us))
                    if having is not None:
                        mask &= np.isin(positions, having)
                    chosen = np.flatnonzero(mask).tolist()
                    for at in reversed(chosen) if newest else chosen:
                        yield _Place(int(stamps[at]), segment, int(positions[at]), ends[at])
            except BadBytes:  # without its index, nobody knows where its batches begin
                self._unreadable += 1

    def _views(self, places: list[_Place]) -> Iterator[tuple[_Place, memoryview]]:
        """Yield the batches at some places, ascending, each read with its neighbours."""
        at = 0
        while at < len(places):
            first, stop = places[at], at + 1
            end = first.end
            while (
                stop < len(places)
                and places[stop].segment is first.segment
                and 0 <= places[stop].position - end < _JOIN_BYTES
            ):
                end = places[stop].end
                stop += 1
            base = first.segment.base
            try:
                window = memoryview(self._reading(first.segment).read(first.position - base, end - first.position))
            except BadBytes:
                self._unreadable += 1
                window = memoryview(b"")
            for place in places[at:stop] if len(window) else ():
                yield place, window[place.position - first.position : place.end - first.position]
            at = stop

    def _runs(
        self, selection: Selection, matcher: MessageMatcher | None, place: _Place, view: memoryview, newest: bool,
        after: Boundary | None,
    ) -> Iterator[Run]:  # fmt: skip
        """Yield the runs of selected messages of one batch, verified."""
        try:
            batch = StoredBatch(view)
        except BadBatch:
            self._unreadable += 1
            return
        if batch.header.position != place.position or batch.header.store_id != self.store_id:
            self._unreadable += 1
            return
        if matcher is not None and batch.header.flags & matcher.flags != matcher.flags:
            return
        if not any(selection.takes(name) for name in batch.names):
            return
        runs, damaged = read_answer(view)
        self._unreadable += len(damaged)
        for run in runs:
            if not selection.takes(run.subject):
                continue
            wanted = [(0, run.count)]
            if matcher is not None:
                wanted = [(index, index + 1) for index in matcher.matches(run)]
            for start, stop in wanted:
                start, stop = _within(run, start, stop, newest, after)
                if start < stop:
                    yield run if (start, stop) == (0, run.count) else run.slice(start, stop)

    def _reading(self, segment: SegmentSource) -> Reading:
        file = self._open.pop(segment.path, None)
        if file is None:
            try:
                file = self._files.open(segment.path)
            except FileNotFoundError as error:
                raise BadBytes(f"{segment.path} in {self._files.name} is gone") from error
        self._open[segment.path] = file
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return file


def _within(run: Run, start: int, stop: int, newest: bool, after: Boundary | None) -> tuple[int, int]:
    """Return the part of messages [start, stop) of a run that lies behind the boundary, in the order of the search."""
    if after is None or run.stored_at_us != after.stored_at_us:
        return start, stop
    edge = after.ordinal - run.ordinal
    return (start, min(stop, edge)) if newest else (max(start, edge), stop)


def searches_of(files: Files, segments: Sequence[SegmentSource]) -> list[SegmentSearch]:
    """Return a search for each store that has segments in a tree."""
    stores = sorted({segment.store_id for segment in segments})
    return [SegmentSearch(files, one, [segment for segment in segments if segment.store_id == one]) for one in stores]
