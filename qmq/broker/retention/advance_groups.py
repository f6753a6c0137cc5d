"""Groups that were behind when a segment goes: moved past it, and how many messages they miss by that counted."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.encode import Rows, chosen_of
from qmq.broker.groups.group import Following, Group
from qmq.broker.journal.record_types import Kind
from qmq.broker.retention.references import Target
from qmq.storage.store import Store, stretches_of


class Moving:
    """Past one segment."""

    def __init__(self, store: Store, target: Target, rows: Rows) -> None:
        """*rows* are those of the segment, which is the first of its partition."""
        self._store = store
        self._target = target
        self._rows = rows
        self._first_row = store.first_row(target.partition)
        self._end_row = self._first_row + len(rows)

    def _is_behind(self, following: Following) -> bool:
        if not following.exact:
            return following.scan[self._target.partition] < self._end_row
        number = following.subject(self._store)
        if number is None:
            return False
        return int(following.group.cursors.upto(number + 1)[number]) < self._store.offered_sequence(number)

    def _begins_before(self, following: Following) -> bool:
        """Whether what an exact following gets next lies in the segment, or before it."""
        number = following.number
        assert number is not None
        first = self._next(following, number)
        return first is not None and first < self._store.offered_sequence(number)

    def _next(self, following: Following, number: int) -> int | None:
        group = following.group
        return int(group.cursors.upto(number + 1)[number]) or group.beginning(self._store, following, number)

    def move(self, group: Group) -> int:
        """Move it past the segment; how many messages it is not given by that. That is a record too. Nothing has
        changed when this raises NotAtHand or StorageError.
        """
        behind = [following for following in group.followings.values() if self._is_behind(following)]
        for following in group.all_followings():
            if following.exact or following.prefix in group.ended:  # no row is looked at there
                following.scan[self._target.partition] = max(following.scan[self._target.partition], self._end_row)
        if not behind:
            return 0
        exact = [following for following in behind if following.exact]
        exact = [following for following in exact if self._begins_before(following)]
        skipped = self._count(group, [one for one in behind if not one.exact], exact)
        cursors = list[list[Any]]()
        for following in exact:
            number = following.number
            assert number is not None
            end = self._store.offered_sequence(number)
            group.cursors.upto(number + 1)[number] = end
            cursors.append([following.prefix, end])
        for following in behind:
            if not following.exact:
                following.scan[self._target.partition] = self._end_row
        group.skipped += skipped
        group.dirty = True
        if group.ledger is not None:
            fields = [group.ledger.number, self._target.partition, self._target.end, skipped, cursors]
            self._store.groups.stage(Kind.MOVED, msgpack.packb(fields))
        return skipped

    def _count(self, group: Group, prefixes: list[Following], exact: list[Following]) -> int:
        had, store = self._target.had, self._store
        # Of each stretch of sequences what is missed is from here on.
        starts = had.ends.copy()
        for following in prefixes:
            self._lower(following, starts)
        missed = 0
        for following in exact:
            number = following.number
            assert number is not None
            starts[had.subjects == number] = had.ends[had.subjects == number]
            first = max(self._next(following, number) or 0, int(store.firsts[number]))
            missed += store.message_count(number, first, store.offered_sequence(number))
        return missed + int((had.ends - starts).sum())

    def _lower(self, following: Following, starts: npt.NDArray[np.uint64]) -> None:
        had, matches = self._target.had, following.matches(self._store)
        taken = np.ones(len(starts), np.bool_) if matches is None else matches[had.subjects]
        begin = had.starts
        row = following.scan[self._target.partition]
        if row > self._first_row:  # what it has passed may be what it never was to have
            begin = self._left_of(following, row, had.ends)
        floor = np.maximum(begin, following.group.floor(following, had.subjects))
        starts[taken] = np.minimum(starts, floor)[taken]

    def _left_of(self, following: Following, row: int, ends: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Where each stretch begins in the rows from that one on; its end, where it has none there."""
        had, found = self._target.had, ends.copy()
        left = stretches_of(chosen_of([self._rows], np.arange(row - self._first_row, len(self._rows))))
        places = had.subjects.searchsorted(left.subjects)
        while len(behind := np.flatnonzero(had.ends[places] <= left.starts)):
            places[behind] += 1
        np.minimum.at(found, places, left.starts)
        return found


def replay(store: Store, group: Group, partition: int, position: int, skipped: int, cursors: list[Any]) -> None:
    """A record says that a group was moved past all that lay before that position."""
    row = store.row_at_position(partition, position)
    for following in group.followings.values():
        if not following.exact:
            following.scan[partition] = max(following.scan[partition], row)
    for subject, cursor in cursors:
        number = store.subject_number(subject)
        if number is not None:
            known = group.cursors.upto(number + 1)
            known[number] = max(int(known[number]), cursor)
    group.skipped += skipped
    group.dirty = True
