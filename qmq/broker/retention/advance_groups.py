"""Move groups that are behind past a segment that goes, and count the messages that they miss."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgpack
import numpy as np

from qmq.broker.groups.group import Group, SubjectFilter
from qmq.broker.groups.message_ranges import Rows
from qmq.broker.journal.record_types import RecordKind
from qmq.broker.ports.work import Work
from qmq.broker.retention.references import SegmentTarget
from qmq.format.layout import LANE_NORMAL
from qmq.storage.store import Store

#: The rows of one piece, and how many a filter is asked of in a microsecond.
_ROWS: Final = 32_768
_ROWS_A_UNIT: Final = 16
#: The work of a group, and of each prefix and subject that it follows, in microseconds.
_GROUP_WORK: Final = 20
_FILTER_WORK: Final = 20


class GroupAdvance:
    """Moves groups past one segment, piece by piece of its rows: a group that is behind goes on meanwhile."""

    def __init__(self, store: Store, target: SegmentTarget, rows: Rows) -> None:
        """*rows* are the rows of the segment, which is the first of its partition."""
        self._store = store
        self._target = target
        self._rows = rows
        self._first_row = store.partitions[target.partition].consumer_log.first_row
        self._end_row = self._first_row + len(rows)
        #: Messages that each group misses, as far as it was moved, by name.
        self.skipped = Counter[str]()

    def look(self, group: Group) -> Work[bool]:
        """Return whether a group has taken all messages of the segment. Raises NotInMemory and StorageError."""
        row = self._first_row
        while True:
            prefixes, exact = self._behind(group)
            if exact:
                return False
            row, stop = self._piece(prefixes, row)
            if self._missed(prefixes, [], row, stop):
                return False
            yield _work(group, prefixes, stop - row)
            if stop == self._end_row:
                return True
            row = stop

    def move(self, group: Group, *, may_skip: bool) -> Work[bool]:
        """Move a group past the segment, and record that; return False where it would miss messages and *may_skip* does
        not allow that. Nothing of a piece has changed where that raises NotInMemory or StorageError.
        """
        while True:
            prefixes, exact = self._behind(group)
            if not prefixes and not exact:
                yield _work(group, prefixes, 0)
                return True
            row, stop = self._piece(prefixes, self._first_row)
            skipped = self._missed(prefixes, exact, row, stop)
            if stop < self._end_row:
                exact = []  # these are moved with the last piece
            skipped += sum(self._missed_of(subject_filter) for subject_filter in exact)
            if skipped and not may_skip:
                return False
            self._apply(group, prefixes, exact, stop, skipped)
            yield _work(group, prefixes, stop - row)

    # --- what a group has not taken ----------------------------------------------------------------------------------

    def _behind(self, group: Group) -> tuple[list[SubjectFilter], list[SubjectFilter]]:
        """Return the filters of prefixes, and of subjects, that have not taken all. Raises NotInMemory and
        StorageError.
        """
        prefixes, exact = list[SubjectFilter](), list[SubjectFilter]()
        for subject_filter in group.every_lane(self._store):
            if subject_filter.exact:
                number = subject_filter.subject(self._store)
                if number is not None and self._next(subject_filter, number) < self._end_of(number):
                    exact.append(subject_filter)
            elif subject_filter.row_cursors[self._target.partition] < self._end_row:
                prefixes.append(subject_filter)
        return prefixes, exact

    def _next(self, subject_filter: SubjectFilter, number: int) -> int:
        """Return the next sequence of a subject for a group; the segment's end of it while that is not known."""
        end = self._end_of(number)
        cursor = subject_filter.group.cursors.get(number)
        if cursor or not end:  # where the segment has nothing of it, its beginning need not be read
            return cursor
        beginning = subject_filter.group.beginning(self._store, subject_filter, number)
        return end if beginning is None else beginning

    def _end_of(self, number: int) -> int:
        """Return the sequence behind the segment's last message of a subject; 0 where it has none."""
        had, key = self._target.had, np.uint32(number)
        index = int(had.subjects.searchsorted(key, "right")) - 1
        return int(had.ends[index]) if index >= 0 and had.subjects[index] == key else 0

    def _missed_of(self, subject_filter: SubjectFilter) -> int:
        """Return how many messages before the segment's end of a subject a group has not taken."""
        number, subjects = subject_filter.number, self._store.subjects
        assert number is not None
        first = max(self._next(subject_filter, number), int(subjects.firsts[number]))
        return subjects.message_count(number, first, self._end_of(number))

    def _piece(self, prefixes: list[SubjectFilter], row: int) -> tuple[int, int]:
        """Return the next piece [row, stop) of whole batches, from a row on, that a filter has not read; the segment's
        end where all have.
        """
        cursors = [subject_filter.row_cursors[self._target.partition] for subject_filter in prefixes]
        row = max(row, min(cursors, default=self._end_row))
        at = row + _ROWS - self._first_row
        if at >= len(self._rows):
            return row, self._end_row
        entry = self._rows[at]
        return row, row + _ROWS + (int(entry["runs"]) - int(entry["run"]) if entry["run"] else 0)

    def _missed(self, prefixes: list[SubjectFilter], exact: list[SubjectFilter], row: int, stop: int) -> int:
        """Return how many messages of a piece filters of prefixes have not taken, but for those of *exact*."""
        rows = self._rows[row - self._first_row : stop - self._first_row]
        ends = rows["first_sequence"] + rows["count"]
        starts = ends.copy()  # the group misses each row's messages from here on
        for subject_filter in prefixes:
            begin = max(subject_filter.row_cursors[self._target.partition] - row, 0)
            subjects, matches = rows["subject"][begin:], subject_filter.matches(self._store)
            taken = np.arange(begin, len(rows)) if matches is None else begin + np.flatnonzero(matches[subjects])
            floor = subject_filter.group.floor(subject_filter, rows["subject"][taken])
            floor = np.maximum(rows["first_sequence"][taken], floor)
            starts[taken] = np.minimum(starts[taken], floor)
        if exact:
            numbers = [subject_filter.number or 0 for subject_filter in exact]
            starts = np.where(np.isin(rows["subject"], numbers), ends, starts)
        return int((ends - starts).sum())

    # --- moves -------------------------------------------------------------------------------------------------------

    def _apply(
        self, group: Group, prefixes: list[SubjectFilter], exact: list[SubjectFilter], stop: int, skipped: int
    ) -> None:
        """Move filters behind a piece that ends at row *stop*, and record that the group misses so many messages."""
        partition, cursors = self._target.partition, list[list[Any]]()
        is_end = stop == self._end_row
        position = self._target.end if is_end else int(self._rows["position"][stop - self._first_row])
        for subject_filter in exact:
            number = subject_filter.number
            assert number is not None
            end = self._end_of(number)
            group.cursors.set(number, end)
            cursors.append([subject_filter.prefix, subject_filter.kind or LANE_NORMAL, end])
        for subject_filter in prefixes:
            subject_filter.row_cursors[partition] = max(subject_filter.row_cursors[partition], stop)
        group.skipped += skipped
        if skipped:
            group.missed_before[partition] = position
            if group.name is not None:
                self.skipped[group.name] += skipped
        group.dirty = True
        if group.ledger is not None:
            fields = [group.ledger.number, partition, position, skipped, cursors]
            self._store.groups.stage(RecordKind.MOVED, msgpack.packb(fields))


def _work(group: Group, prefixes: list[SubjectFilter], rows: int) -> int:
    return _GROUP_WORK + _FILTER_WORK * len(group.filters) + len(prefixes) * rows // _ROWS_A_UNIT


def replay(store: Store, group: Group, partition: int, position: int, skipped: int, cursors: list[Any]) -> None:
    """Apply the record that a group was moved past everything before *position*."""
    row = store.partitions[partition].consumer_log.row_at_position(position)
    for subject_filter in group.every_lane(store):
        if not subject_filter.exact:
            subject_filter.row_cursors[partition] = max(subject_filter.row_cursors[partition], row)
    for subject, lane, cursor in cursors:
        number = store.subjects.number(subject, lane)
        if number is not None:
            group.cursors.set(number, max(group.cursors.get(number), cursor))
    group.skipped += skipped
    if skipped:
        group.missed_before[partition] = position
    group.dirty = True
