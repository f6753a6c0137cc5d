"""The lag of a group: how many messages are ready for it, and how old the oldest is. The cost goes by subjects, not by
messages.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.group import Group, SubjectFilter
from qmq.errors import StorageError
from qmq.format.layout import ENTRY_DTYPE
from qmq.storage.store import NotInMemory, Store

#: A start at a time is looked up in so many subjects without a cursor; in further ones no message counts as ready.
MOST_LOOKED_UP: Final = 1_000
#: Rows to look at for the oldest message.
_ROWS: Final = 1_024


class ReadyCount(NamedTuple):
    """The count of messages that no consumer of the group had yet; where it is not *exact* there may be more."""

    messages: int
    exact: bool


class SubjectLag(NamedTuple):
    """A lane of a subject whose messages with sequences from ``start`` up to ``end`` no consumer of a group had yet."""

    subject: str
    start: int
    end: int
    lane: int


def ready(store: Store, group: Group) -> ReadyCount:
    """Count the messages that no consumer of the group had yet. Gaps in sequences do not count."""
    starts, ends, exact = _starts(store, group)
    return ReadyCount(store.subjects.messages_between(starts, ends), exact)


def has_ready(store: Store, group: Group, subject_filter: SubjectFilter) -> bool:
    """Return whether there are messages of a filter that no consumer of the group had yet; False where that would need
    a read.
    """
    subject_filter.find_lanes(store)
    ends = store.subjects.ends[: store.subjects.count].astype(np.int64)
    for lane in subject_filter.with_lanes():
        numbers = _followed(store, lane)
        cursors, _ = _cursors(store, group, lane, numbers, ends)
        starts = np.maximum(cursors, store.subjects.firsts[numbers].astype(np.int64))
        if (starts < ends[numbers]).any():
            return True
    return False


def waiting(store: Store, group: Group, after: int, most: int) -> tuple[list[SubjectLag], int | None]:
    """Return lanes of subjects with messages that no consumer of the group had yet, from number *after* on, and the
    number to go on from (None: there are no more).
    """
    starts, ends, _ = _starts(store, group)
    numbers = np.flatnonzero(starts[after:] < ends[after:]) + after
    rows = list[SubjectLag]()
    for number in numbers[:most].tolist():
        with suppress(StorageError):  # its name is damaged
            span = int(starts[number]), int(ends[number])
            rows.append(SubjectLag(store.subjects.name(number), *span, store.subjects.lane(number)))
    return rows, int(numbers[most]) if len(numbers) > most else None


def _starts(store: Store, group: Group) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], bool]:
    """Return the sequence of each subject from which on no consumer of the group had a message, the sequence behind its
    last one, and whether all of the former are known.
    """
    count = store.subjects.count
    firsts, ends = store.subjects.firsts[:count].astype(np.int64), store.subjects.ends[:count].astype(np.int64)
    nexts, exact = np.full(count, np.iinfo(np.int64).max), True
    for subject_filter in group.every_lane(store):
        numbers = _followed(store, subject_filter)
        if len(numbers):
            cursors, all_known = _cursors(store, group, subject_filter, numbers, ends)
            nexts[numbers] = np.minimum(nexts[numbers], cursors)
            exact = exact and all_known
    return np.maximum(nexts, firsts), ends, exact


def _followed(store: Store, subject_filter: SubjectFilter) -> npt.NDArray[np.int64]:
    if subject_filter.exact:
        number = subject_filter.subject(store)
        return np.array([] if number is None else [number], np.int64)
    matches = subject_filter.matches(store)
    return np.arange(store.subjects.count) if matches is None else np.flatnonzero(matches[: store.subjects.count])


def _cursors(
    store: Store,
    group: Group,
    subject_filter: SubjectFilter,
    numbers: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], bool]:
    """Return the next sequence of each of these subjects, and whether all of them are known."""
    cursors = group.floor(subject_filter, numbers).astype(np.int64)
    if subject_filter.start.kind != "time":
        return cursors, True
    unset = np.flatnonzero((cursors == 0) & (numbers < subject_filter.start.subjects) & (ends[numbers] > 0))
    cursors[unset] = ends[numbers[unset]]
    exact = len(unset) <= MOST_LOOKED_UP
    for at in unset[:MOST_LOOKED_UP].tolist():
        try:
            cursor = group.cursor(store, subject_filter, int(numbers[at]))
        except (NotInMemory, StorageError):
            exact = False
            continue
        if cursor is not None:
            cursors[at] = cursor
    return cursors, exact


def oldest_us(store: Store, group: Group) -> int | None:
    """Return about when the oldest message of the lag was stored, or a little earlier. None where that would need a
    read.
    """
    found = [
        stored_us
        for subject_filter in group.every_lane(store)
        for stored_us in (_oldest_of_subject if subject_filter.exact else _oldest_of_prefix)(
            store, group, subject_filter
        )
    ]
    return min(found, default=None)


def _oldest_of_subject(store: Store, group: Group, subject_filter: SubjectFilter) -> list[int]:
    number = subject_filter.subject(store)
    if number is None:
        return []
    try:
        cursor = group.cursor(store, subject_filter, number)
        pieces = [] if cursor is None else store.subject_rows(number, cursor, 1)
    except (NotInMemory, StorageError):
        return []
    return [int(rows["stored_at_us"][0]) for _, rows in pieces[:1]]


def _oldest_of_prefix(store: Store, group: Group, subject_filter: SubjectFilter) -> list[int]:
    found = []
    for partition, row in enumerate(subject_filter.row_cursors):
        part = store.partitions[partition]
        try:
            rows = part.consumer_log.rows(row, _ROWS)
        except (NotInMemory, StorageError):
            continue
        rows = rows[: max(0, part.consumer_log.visible_row - row)]
        wanted = _not_given(store, group, subject_filter, rows)
        if len(wanted):
            found.append(int(rows["stored_at_us"][wanted[0]]))
        elif len(rows) == _ROWS:
            found.append(int(rows["stored_at_us"][-1]))
    return found


def _not_given(
    store: Store, group: Group, subject_filter: SubjectFilter, rows: np.ndarray[Any, np.dtype[np.void]]
) -> npt.NDArray[np.int64]:
    """Return the indexes of the rows (ENTRY_DTYPE) that are for the group and were not handed out."""
    assert rows.dtype == ENTRY_DTYPE
    subjects = rows["subject"].astype(np.int64)
    wanted = rows["first_sequence"] + rows["count"] > group.floor(subject_filter, subjects)
    matches = subject_filter.matches(store)
    return np.flatnonzero(wanted if matches is None else wanted & matches[subjects])
