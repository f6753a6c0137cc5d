"""A search for the batches with one hash: through the key index of each segment that has one, and through the hash
columns of the others, in bounded steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np

from qmq.errors import StorageError
from qmq.storage.key_index.walk import SegmentWalk
from qmq.storage.types import SegmentSpan

#: Segments that one step looks into by their index, and positions that it returns, about.
SEGMENTS_A_STEP: Final = 64
POSITIONS_A_STEP: Final = 1_000


@dataclass(slots=True)
class SearchPart:
    """The part of a search that lies in one segment: batches that begin at positions [low, high)."""

    span: SegmentSpan
    low: int
    high: int
    is_indexed: bool


class Segments(Protocol):
    """The segments that a search reads: qmq.storage.key_index.index.KeyIndex."""

    removed: set[int]

    def look_up(
        self, span: SegmentSpan, value: int, low: int, high: int, *, newest: bool = False, limit: int = 0
    ) -> list[int] | None: ...
    def close_unused(self) -> None: ...
    def walk(self, span: SegmentSpan, start: int, wanted: int | None = None) -> SegmentWalk: ...
    def stretches(self, base: int, value: int) -> tuple[list[tuple[int, int]], int]: ...


class SearchStep(NamedTuple):
    """The result of one step."""

    #: The positions of batches that have the hash, in the order of the search, each once.
    positions: list[int]
    #: All batches before this position are searched; of a search for the newest: all from this position on.
    searched_to: int
    #: Bytes of the message log that were read, and how many of them the disk could not read.
    read_bytes: int
    unread_bytes: int
    is_last: bool


class KeySearch:
    """[thread] A search of one partition. Call ``step`` until it is the last, then ``close``. Made by
    ``KeyIndex.search``.
    """

    def __init__(
        self, index: Segments, value: int, parts: list[SearchPart], start: int, end: int, *, newest: bool
    ) -> None:
        self._index = index
        self._value = value
        self._newest = newest
        self._parts = deque(reversed(parts) if newest else parts)
        self._last = start if newest else end
        self._searched_to = end if newest else start
        self._ranges: deque[tuple[int, int]] | None = None  # of the first part, where it has no index
        self._walk: SegmentWalk | None = None
        self._gathered: list[int] = []  # found in a range that is read forwards and returned backwards

    def step(self) -> SearchStep:
        """Search a little further: some segments by their index, or a megabyte of one without.

        Raises StorageFailed when the disk refuses; the step can be tried again.
        """
        self._index.close_unused()
        positions: list[int] = []
        for _ in range(SEGMENTS_A_STEP):
            if not self._parts or positions:
                break
            part = self._parts[0]
            if part.span.base in self._index.removed:
                self._pass(part)
            elif part.is_indexed:
                self._look_up(part, positions)
            else:
                return self._scan(part)
        return self._step(positions, 0, 0)

    def close(self) -> None:
        """Close the file that is being read."""
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def _step(self, positions: list[int], read: int, unread: int) -> SearchStep:
        is_last = not self._parts
        if is_last:
            self._searched_to = self._last
        return SearchStep(positions, self._searched_to, read, unread, is_last)

    def _pass(self, part: SearchPart) -> None:
        """Go on behind a part."""
        self.close()
        self._searched_to = part.low if self._newest else part.high
        self._ranges = None
        self._gathered = []
        self._parts.popleft()

    def _look_up(self, part: SearchPart, positions: list[int]) -> None:
        found = self._index.look_up(
            part.span, self._value, part.low, part.high, newest=self._newest, limit=POSITIONS_A_STEP
        )
        if found is None:
            part.is_indexed = False
            return
        positions += found
        if len(found) < POSITIONS_A_STEP:
            self._pass(part)
        else:
            self._narrow(part, found[-1] if self._newest else found[-1] + 1)

    def _narrow(self, part: SearchPart, position: int) -> None:
        """Note that a part is searched up to *position*; from there on, in a search for the newest."""
        self._searched_to = position
        if self._newest:
            part.high = position
        else:
            part.low = position

    def _scan(self, part: SearchPart) -> SearchStep:
        """Read a megabyte of a part without index, if its filters do not say that it is not needed."""
        if self._ranges is None:
            self._ranges = self._ranges_of(part)
        if not self._ranges:
            self._pass(part)
            return self._step([], 0, 0)
        low, high = self._ranges[0]
        if self._walk is None:
            self._walk = self._index.walk(part.span, low, high)
        try:
            found = self._walk.step() if self._walk.position < high else None
        except StorageError:
            if part.span.base not in self._index.removed:
                raise
            self._pass(part)  # its messages are gone
            return self._step([], 0, 0)
        read = unread = 0
        if found is not None:
            mine = np.unique(found.positions[found.hashes == np.uint64(self._value)])
            mine = mine[(mine >= low) & (mine < high)]
            self._gathered += mine.tolist()
            read, unread = found.size, found.unread
        is_done = self._walk.position >= high or self._walk.is_done
        positions: list[int] = []
        if not self._newest:
            positions, self._gathered = self._gathered, []
            self._narrow(part, min(self._walk.position, high))
        elif is_done:
            positions = self._gathered[: -POSITIONS_A_STEP - 1 : -1]
            del self._gathered[-POSITIONS_A_STEP:]
            if self._gathered:
                is_done = False
                self._narrow(part, positions[-1])
            else:
                self._narrow(part, low)
        if is_done:
            self.close()
            self._ranges.popleft()
            if not self._ranges:
                self._pass(part)
        return self._step(positions, read, unread)

    def _ranges_of(self, part: SearchPart) -> deque[tuple[int, int]]:
        """Return the ranges of positions of a part that have to be read, in the order of the search."""
        stretches, known = self._index.stretches(part.span.base, self._value)
        if known < part.high:
            stretches.append((max(known, part.low), part.high))
        ranges = [(max(low, part.low), min(high, part.high)) for low, high in stretches]
        ranges = [found for found in ranges if found[0] < found[1]]
        return deque(reversed(ranges) if self._newest else ranges)
