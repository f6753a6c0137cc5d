"""One resend to one group: which of the selected messages are settled, and their retries.

A message is settled for a group that has acked it, or passed it, or that has it as a dead letter. Messages that are
waiting, in flight or in retry are left alone, so that none has two lives. The search for them goes piece by piece,
while the group goes on; then they are taken down at one moment. From then on a message that is not settled at that
moment is left alone, whatever becomes of it, and one that is settled changes only by a redrive, a deletion or a seek.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qmq.broker.error_log.error_log import unpacked
from qmq.broker.find.resend_selection import (
    ResendSelection,
    SelectedRange,
    SelectionColumns,
    Steps,
    reading,
    subjects_under,
)
from qmq.broker.groups.group import Group
from qmq.broker.groups.message_ranges import PARTITIONS, RunPart, partition_of, parts_of
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.groups.resends import ResendCounts, ResendProgress
from qmq.broker.journal.record_types import RESENT, MessageRange
from qmq.intervals import Intervals
from qmq.names import takes
from qmq.storage.store import Store

#: Retries and dead letters that one step looks at, and ranges whose messages it looks up (about 50 us each).
_ITEMS: Final = 1_024
_LOOKS: Final = 16
#: A step hands out so many ranges or dead letters, or a few more, and looks at so many windows of messages at most
#: (about 20 us each; a start of the group by time takes as long as several).
MOST_RANGES: Final = 32
_LETTERS: Final = 32
_WINDOWS: Final = 24
_BY_TIME: Final = 4
#: Messages of a window, where some messages of the subject are not settled or dead.
_WINDOW: Final = 2_048
#: Subjects whose ranges are found at once.
_SUBJECTS: Final = 4_096

Items = np.ndarray[Any, np.dtype[np.void]]
Pieces = list[tuple[int, int]]


class Places:
    """Messages by subject number and sequence."""

    def __init__(self) -> None:
        self._by_subject: dict[int, Intervals] = {}

    def add(self, number: int, start: int, end: int) -> None:
        """Add the messages [start, end) of a subject."""
        known = self._by_subject.get(number)
        if known is None:
            known = self._by_subject[number] = Intervals()
        known.add(start, end)

    def has_any(self, number: int) -> bool:
        """Return whether there are messages of the subject."""
        return number in self._by_subject

    def take_from(self, number: int, pieces: Pieces) -> tuple[Pieces, int]:
        """Return the parts of *pieces* that are not here, and how many messages are."""
        known = self._by_subject.get(number)
        if known is None:
            return pieces, 0
        left = [one for start, end in pieces for one in known.missing(start, end)]
        return left, _size(pieces) - _size(left)


class GroupResend:
    """One resend to one group, from *progress* on."""

    def __init__(
        self, store: Store, order: NameOrder, group: Group, selection: ResendSelection, columns: SelectionColumns,
        run: bytes, progress: ResendProgress, *, dry: bool,
    ) -> None:  # fmt: skip
        """With *dry* it only counts."""
        assert group.ledger is not None
        self._store = store
        self._order = order
        self._group = group
        self._ledger = group.ledger
        self._selection = selection
        self._run = run
        self._dry = dry
        self._kept = progress.selection
        self._upto = progress.upto
        self.counts = ResendCounts(*progress.counts)
        #: Messages of the selection that were looked at.
        self.looked = 0
        #: The group follows a subject of the selection.
        self.follows_any = False
        #: Messages have been added that the group can hand out.
        self.has_added = False
        self._columns = columns
        #: The subjects of the selection that the group follows, ascending.
        self._numbers = columns.numbers[:0]
        self._lows = np.array([low for low, _ in selection.bounds], np.uint64)
        self._highs = np.array([high for _, high in selection.bounds], np.uint64)
        self._cursors: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._in_flight, self._retrying = Places(), Places()
        self._dead: dict[int, dict[int, list[int]]] = {}  # numbers of letters by subject and sequence

    def steps(self, now_us: int) -> Steps[None]:
        """Do it all, in steps. Raises StorageError."""
        yield from self._find_followed()
        self.follows_any = bool(len(self._numbers))
        yield from self._look()
        yield from self._hand_out(now_us)

    def _find_followed(self) -> Steps[None]:
        """Find the subjects of the selection that the group follows: there may be many groups, and many subjects."""
        every = self._columns.numbers
        followed = np.zeros(len(every), np.bool_)
        for prefix in list(self._group.filters):
            for numbers in subjects_under(self._store, self._order, prefix):
                places = every.searchsorted(numbers.astype(np.uint32))
                inside = places < len(every)
                places = places[inside]
                followed[places[every[places] == numbers[inside]]] = True
                if len(numbers) > 1:
                    yield None
        self._numbers = every[followed]

    # --- messages that are not settled, and dead letters -------------------------------------------------------------

    def _look(self) -> Steps[None]:
        ledger, retries = self._ledger, self._ledger.retries
        retrying, letters, last = list[MessageRange](), list[tuple[int, MessageRange]](), 0
        watch = retries.look()
        try:
            for block in retries.scheduled():
                for items in _portions(block):
                    for retry in unpacked(self._chosen(items)):
                        retrying += [one.messages for one in retries.left_of(retry)]
                    yield None
            for block in ledger.dead.after(0):
                last = max(last, int(block["number"].max(initial=0)))
                for items in _portions(block):
                    letters += [(letter.number, letter.messages) for letter in unpacked(self._chosen(items))]
                    yield None
            # The moment: nothing else runs from here until the next yield.
            retrying += [retry.messages for retry in (*retries.waiting(), *watch.added, *watch.passed)]
            for block in ledger.dead.after(last):
                letters += [(letter.number, letter.messages) for letter in unpacked(self._chosen(block))]
            in_flight = [
                one.messages
                for member in ledger.members.values()
                for start, end in member.in_flight.unhandled()
                for one in member.in_flight.between(start, end)
            ]
            self._cursors = self._group.cursors.of(self._numbers)
        finally:
            retries.end_look(watch)
        yield from self._find(in_flight, self._in_flight)
        yield from self._find(retrying, self._retrying)
        for at, (number, messages) in enumerate(letters, 1):
            for subject, start, _ in (yield from self._places(messages)):
                self._dead.setdefault(subject, {}).setdefault(start, []).append(number)
            if at % _LOOKS == 0:
                yield None

    def _chosen(self, items: Items) -> Items:
        """Return the items that may have messages of the selection."""
        logs = items["log"]
        by_position = logs >= PARTITIONS
        partitions = np.where(by_position, logs & 0xFFFF, 0)
        known = partitions < len(self._lows)
        partitions[~known] = 0
        chosen = by_position & known
        chosen &= (items["end"] >= self._lows[partitions]) & (items["first"] <= self._highs[partitions])
        places = self._numbers.searchsorted(logs)
        places[places == len(self._numbers)] = 0
        if len(self._numbers):
            chosen |= ~by_position & (self._numbers[places] == logs)
        return items[chosen & (items["number"] > 0)]

    def _may_have(self, messages: MessageRange) -> bool:
        """Return whether a range may have messages of the selection."""
        if messages.log >= PARTITIONS:
            low, high = self._selection.bounds[partition_of(messages)]
            return messages.end >= low and messages.first <= high
        place = int(self._numbers.searchsorted(np.uint32(messages.log)))
        return place < len(self._numbers) and int(self._numbers[place]) == messages.log

    def _find(self, several: list[MessageRange], found: Places) -> Steps[None]:
        looks = 0
        for messages in several:
            if self._may_have(messages):
                for one in (yield from self._places(messages)):
                    found.add(*one)
                looks += 1
                if looks % _LOOKS == 0:
                    yield None

    def _places(self, messages: MessageRange) -> Steps[list[tuple[int, int, int]]]:
        """Return the messages of a range as (subject number, first sequence, sequence behind the last)."""
        if messages.log < PARTITIONS:
            start = messages.first + messages.skip
            return [(messages.log, start, start + messages.total)]
        found = list[tuple[int, int, int]]()
        for part in (yield from reading(self._store, lambda: parts_of(self._store, self._group, messages))):
            if isinstance(part, RunPart):
                first = part.entry[0]
                found.append((part.entry[3], first + part.start, first + part.stop))
            else:
                firsts = part.rows["first_sequence"].astype(np.int64)
                ends = firsts + part.rows["count"]
                found += zip(part.rows["subject"].tolist(), firsts.tolist(), ends.tolist(), strict=True)
        return found

    # --- hand out ----------------------------------------------------------------------------------------------------

    def _hand_out(self, now_us: int) -> Steps[None]:
        ranges, letters, windows = list[MessageRange](), list[int](), 0
        by_time = any(one.start.kind == "time" for one in self._group.filters.values())
        for at in self._ranges_left():
            selected = self._selection.ranges[at]
            number = selected.number
            if not takes(self._group.filters, self._store.subjects.name(number)):
                continue  # the group follows it no more
            cursor: int | None = self._cursors.item(int(self._numbers.searchsorted(np.uint32(number))))
            if not cursor:
                cursor = yield from reading(self._store, lambda number=number: self._beginning(number))  # type: ignore[misc]
                windows += _BY_TIME if by_time else 0
            for window in self._windows(selected):
                self._settle(window, cursor, ranges, letters)
                self._upto = window.number, window.end
                windows += 1
                if len(ranges) >= MOST_RANGES or len(letters) >= _LETTERS or windows >= _WINDOWS:
                    self._record(ranges, letters, self._kept, now_us)
                    ranges, letters, windows = [], [], 0
                    yield None
        self._record(ranges, letters, None, now_us)

    def _ranges_left(self) -> Iterator[int]:
        """Yield the indexes of the ranges that the group follows and that are not done."""
        of_ranges, ranges, upto = self._columns.of_ranges, self._selection.ranges, self._upto
        start = bisect_right(range(len(ranges)), upto, key=lambda at: (ranges[at].number, ranges[at].end))
        for first in range(0, len(self._numbers), _SUBJECTS):
            some = self._numbers[first : first + _SUBJECTS]
            lows, highs = (of_ranges.searchsorted(some, side).tolist() for side in ("left", "right"))
            for low, high in zip(lows, highs, strict=True):
                yield from range(max(low, start), high)

    def _windows(self, selected: SelectedRange) -> Iterator[SelectedRange]:
        """Yield the range, in windows where there is much to look at."""
        number, first, end = selected
        if self._upto[0] == number:
            first = max(first, self._upto[1])
        is_plain = not self._in_flight.has_any(number) and not self._retrying.has_any(number)
        if is_plain and number not in self._dead:
            yield SelectedRange(number, first, end)
            return
        for start, stop in pairwise([*range(first, end, _WINDOW), end]):
            yield SelectedRange(number, start, stop)

    def _beginning(self, number: int) -> int | None:
        """Return the sequence at which the group begins in a subject of which no consumer had a message at the moment
        of the look; None where none waits. Raises NotInMemory and StorageError.
        """
        name, store = self._store.subjects.name(number), self._store
        starts = [
            self._group.beginning(store, one, number)
            for one in self._group.filters.values()
            if takes((one.prefix,), name)
        ]
        return min((start for start in starts if start is not None), default=None)

    def _settle(
        self, window: SelectedRange, cursor: int | None, ranges: list[MessageRange], letters: list[int]
    ) -> None:
        """Add the settled messages of a window to *ranges*, and their dead letters to *letters*; count all."""
        number, first, end = window
        subjects, dead = self._store.subjects, self._ledger.dead
        self.looked += end - first
        low = max(first, min(end, max(int(subjects.firsts[number]), self._store.offered_sequence(number))))
        gone = low - first
        cut = end if cursor is None else max(low, min(end, cursor))
        waiting = subjects.message_count(number, cut, end)
        pieces: Pieces = [(low, cut)] if low < cut else []
        pieces, in_flight = self._in_flight.take_from(number, pieces)
        pieces, retrying = self._retrying.take_from(number, pieces)
        before = _size(pieces)
        pieces = [one for start, stop in pieces for one in subjects.gaps.between(number, start, stop)]
        gone += before - _size(pieces)
        redriven = 0
        known = self._dead.get(number)
        if known is not None:
            changed = Intervals()  # redriven or deleted since
            for start, stop in pieces:
                for sequence in sorted(known.keys() & range(start, stop)):
                    there = [letter for letter in known[sequence] if dead.has(letter)]
                    letters += there
                    if there:
                        redriven += 1
                    else:
                        changed.add(sequence, sequence + 1)
            pieces = [one for start, stop in pieces for one in changed.missing(start, stop)]
            retrying += changed.size
        counts = ResendCounts(_size(pieces), redriven, waiting, in_flight, retrying, gone)
        self.counts = self.counts.plus(counts)
        for start, stop in pieces:
            last = ranges[-1] if ranges else None
            if last is not None and last.log == number and last.first + last.total == start:
                ranges[-1] = last._replace(total=last.total + stop - start)
            else:
                ranges.append(MessageRange(number, start, 0, 0, stop - start, RESENT))

    def _record(
        self, ranges: list[MessageRange], letters: list[int], selection: dict[str, Any] | None, now_us: int
    ) -> None:
        if self._dry:
            return
        self._ledger.resend(self._run, ResendProgress(selection, self._upto, self.counts), letters, ranges, now_us)
        self.has_added = self.has_added or bool(ranges)


def _portions(items: Items) -> Iterator[Items]:
    for at in range(0, len(items), _ITEMS):
        yield items[at : at + _ITEMS]


def _size(pieces: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in pieces)
