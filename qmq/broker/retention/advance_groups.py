"""Move groups that are behind past a segment that goes, and count the messages that they miss."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from qmq.broker.groups.group import Group, SubjectFilter
from qmq.broker.groups.message_ranges import Rows, chosen_of
from qmq.broker.journal.record_types import RecordKind
from qmq.broker.retention.references import SegmentTarget
from qmq.format.layout import LANE_NORMAL
from qmq.storage.store import Store, subject_ranges_of


class GroupAdvance:
    """Moves groups past one segment."""

    def __init__(self, store: Store, target: SegmentTarget, rows: Rows) -> None:
        """*rows* are the rows of the segment, which is the first of its partition."""
        self._store = store
        self._target = target
        self._rows = rows
        self._first_row = store.partitions[target.partition].consumer_log.first_row
        self._end_row = self._first_row + len(rows)

    def _is_behind(self, subject_filter: SubjectFilter) -> bool:
        if not subject_filter.exact:
            return subject_filter.row_cursors[self._target.partition] < self._end_row
        number = subject_filter.subject(self._store)
        if number is None:
            return False
        return int(subject_filter.group.cursors.upto(number + 1)[number]) < self._store.offered_sequence(number)

    def _begins_before(self, subject_filter: SubjectFilter) -> bool:
        """Return whether the next message of an exact filter lies in the segment or before it."""
        number = subject_filter.number
        assert number is not None
        first = self._next(subject_filter, number)
        return first is not None and first < self._store.offered_sequence(number)

    def _next(self, subject_filter: SubjectFilter, number: int) -> int | None:
        group = subject_filter.group
        return int(group.cursors.upto(number + 1)[number]) or group.beginning(self._store, subject_filter, number)

    def missed(self, group: Group) -> int:
        """Return how many messages of the segment the group has not taken. Raises NotInMemory and StorageError."""
        had = self._target.had
        starts = had.ends.copy()  # the group misses each range of sequences from here on
        for subject_filter in group.every_lane(self._store):
            if subject_filter.exact:
                number = subject_filter.subject(self._store)
                first = None if number is None else self._next(subject_filter, number)
                if first is not None:
                    mine = had.subjects == number
                    starts[mine] = np.minimum(starts[mine], np.clip(first, had.starts[mine], had.ends[mine]))
            elif self._is_behind(subject_filter):
                self._lower(subject_filter, starts)
        return int((had.ends - starts).sum())

    def move(self, group: Group) -> int:
        """Move a group past the segment, record that, and return how many messages the group misses.

        Nothing has changed when this raises NotInMemory or StorageError.
        """
        behind = [one for one in group.every_lane(self._store) if self._is_behind(one)]
        for subject_filter in [one for base in group.all_filters() for one in base.with_lanes()]:
            if subject_filter.exact or subject_filter.prefix in group.ended:  # such a filter reads no rows
                subject_filter.row_cursors[self._target.partition] = max(
                    subject_filter.row_cursors[self._target.partition], self._end_row
                )
        if not behind:
            return 0
        exact = [subject_filter for subject_filter in behind if subject_filter.exact]
        exact = [subject_filter for subject_filter in exact if self._begins_before(subject_filter)]
        skipped = self._count(group, [one for one in behind if not one.exact], exact)
        cursors = list[list[Any]]()
        for subject_filter in exact:
            number = subject_filter.number
            assert number is not None
            end = self._store.offered_sequence(number)
            group.cursors.upto(number + 1)[number] = end
            cursors.append([subject_filter.prefix, subject_filter.kind or LANE_NORMAL, end])
        for subject_filter in behind:
            if not subject_filter.exact:
                subject_filter.row_cursors[self._target.partition] = self._end_row
        group.skipped += skipped
        if skipped:
            group.missed_before[self._target.partition] = self._target.end
        group.dirty = True
        if group.ledger is not None:
            fields = [group.ledger.number, self._target.partition, self._target.end, skipped, cursors]
            self._store.groups.stage(RecordKind.MOVED, msgpack.packb(fields))
        return skipped

    def _count(self, group: Group, prefixes: list[SubjectFilter], exact: list[SubjectFilter]) -> int:
        had, store = self._target.had, self._store
        # The group misses each range of sequences from here on.
        starts = had.ends.copy()
        for subject_filter in prefixes:
            self._lower(subject_filter, starts)
        missed = 0
        for subject_filter in exact:
            number = subject_filter.number
            assert number is not None
            starts[had.subjects == number] = had.ends[had.subjects == number]
            first = max(self._next(subject_filter, number) or 0, int(store.subjects.firsts[number]))
            missed += store.subjects.message_count(number, first, store.offered_sequence(number))
        return missed + int((had.ends - starts).sum())

    def _lower(self, subject_filter: SubjectFilter, starts: npt.NDArray[np.uint64]) -> None:
        had, matches = self._target.had, subject_filter.matches(self._store)
        taken = np.ones(len(starts), np.bool_) if matches is None else matches[had.subjects]
        begin = had.starts
        row = subject_filter.row_cursors[self._target.partition]
        if row > self._first_row:  # the group may have passed rows that it was never to get
            begin = self._left_of(subject_filter, row, had.ends)
        floor = np.maximum(begin, subject_filter.group.floor(subject_filter, had.subjects))
        starts[taken] = np.minimum(starts, floor)[taken]

    def _left_of(self, subject_filter: SubjectFilter, row: int, ends: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return where each range begins in the rows from *row* on; its end where those rows have nothing of it."""
        had, found = self._target.had, ends.copy()
        left = subject_ranges_of(chosen_of([self._rows], np.arange(row - self._first_row, len(self._rows))))
        positions = had.subjects.searchsorted(left.subjects)
        while len(behind := np.flatnonzero(had.ends[positions] <= left.starts)):
            positions[behind] += 1
        np.minimum.at(found, positions, left.starts)
        return found


def replay(store: Store, group: Group, partition: int, position: int, skipped: int, cursors: list[Any]) -> None:
    """Apply the record that a group was moved past everything before *position*."""
    row = store.partitions[partition].consumer_log.row_at_position(position)
    for subject_filter in group.every_lane(store):
        if not subject_filter.exact:
            subject_filter.row_cursors[partition] = max(subject_filter.row_cursors[partition], row)
    for subject, lane, cursor in cursors:
        number = store.subjects.number(subject, lane)
        if number is not None:
            known = group.cursors.upto(number + 1)
            known[number] = max(int(known[number]), cursor)
    group.skipped += skipped
    if skipped:
        group.missed_before[partition] = position
    group.dirty = True
