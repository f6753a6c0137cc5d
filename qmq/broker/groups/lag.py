"""The lag of a group: how many messages are ready for it, and how old the oldest is. The cost goes by subjects, not by
messages.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.group import Group, SubjectFilter, is_exact
from qmq.broker.groups.name_order import NameOrder
from qmq.errors import StorageError
from qmq.format.batch import EntryRow
from qmq.format.lanes import kind_of
from qmq.format.layout import ENTRY_DTYPE
from qmq.format.private import is_private
from qmq.storage.store import NotInMemory, Store

#: A start at a time is looked up in so many subjects without a cursor; in further ones no message counts as ready.
MOST_LOOKED_UP: Final = 1_000
#: Rows to look at for the oldest message, a few one by one at first.
_FEW_ROWS: Final = 4
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


class FollowedSubjects(NamedTuple):
    """Subjects that a group follows, with the interval of sequences in each that no consumer of the group had yet:
    three columns i64[n]. ``exact``: all starts are known.
    """

    numbers: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    exact: bool


def ready(store: Store, group: Group, order: NameOrder) -> ReadyCount:
    """Count the messages that no consumer of the group had yet. Gaps in sequences do not count."""
    numbers, starts, ends, exact = followed(store, group, order)
    return ReadyCount(store.subjects.messages_of(numbers, starts, ends), exact)


def has_ready(store: Store, group: Group, subject_filter: SubjectFilter, order: NameOrder) -> bool:
    """Return whether there are messages of a filter that no consumer of the group had yet; False where that would need
    a read.
    """
    numbers = numbers_of(store, subject_filter, order)
    ends = store.subjects.ends[numbers].astype(np.int64)
    cursors, _ = _cursors(store, group, subject_filter, numbers, ends)
    starts = np.maximum(cursors, store.subjects.firsts[numbers].astype(np.int64))
    return bool((starts < ends).any())


def waiting(
    store: Store, group: Group, order: NameOrder, after: int, most: int
) -> tuple[list[SubjectLag], int | None]:  # fmt: skip
    """Return lanes of subjects with messages that no consumer of the group had yet, from number *after* on, and the
    number to go on from (None: there are no more).
    """
    numbers, starts, ends, _ = followed(store, group, order)
    chosen = np.flatnonzero((numbers >= after) & (starts < ends))
    chosen = chosen[np.argsort(numbers[chosen], kind="stable")]
    rows = list[SubjectLag]()
    for at in chosen[:most].tolist():
        with suppress(StorageError):  # its name is damaged
            name, lane = store.subjects.name(int(numbers[at])), store.subjects.lane(int(numbers[at]))
            rows.append(SubjectLag(name, int(starts[at]), int(ends[at]), lane))
    return rows, int(numbers[chosen[most]]) if len(chosen) > most else None


def followed(store: Store, group: Group, order: NameOrder) -> FollowedSubjects:
    """Return the subjects that a group follows, each once."""
    pieces = list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]()
    exact = True
    for subject_filter in group.filters.values():
        numbers = numbers_of(store, subject_filter, order)
        if len(numbers):
            ends = store.subjects.ends[numbers].astype(np.int64)
            cursors, all_known = _cursors(store, group, subject_filter, numbers, ends)
            pieces.append((numbers, cursors))
            exact = exact and all_known
    numbers, cursors = pieces[0] if len(pieces) == 1 else _joined(pieces)
    starts = np.maximum(cursors, store.subjects.firsts[numbers].astype(np.int64))
    return FollowedSubjects(numbers, starts, store.subjects.ends[numbers].astype(np.int64), exact)


def _joined(
    pieces: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the subjects of all pieces and the lowest cursor of each."""
    if not pieces:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    numbers, cursors = (np.concatenate(column) for column in zip(*pieces, strict=True))
    by_number = np.argsort(numbers, kind="stable")
    numbers, cursors = numbers[by_number], cursors[by_number]
    heads = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
    return numbers[heads], np.minimum.reduceat(cursors, heads)


def numbers_of(store: Store, subject_filter: SubjectFilter, order: NameOrder) -> npt.NDArray[np.int64]:
    """Return the numbers of the subjects under a filter's prefix, of all lanes, in no order that counts: i64[n]."""
    if is_exact(subject_filter.prefix):
        return np.array(store.subjects.numbers_of(subject_filter.prefix), np.int64)
    return order.under(subject_filter.prefix)


def _cursors(
    store: Store,
    group: Group,
    subject_filter: SubjectFilter,
    numbers: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], bool]:
    """Return the next sequence of each of these subjects, which end before *ends*, and whether all are known."""
    cursors = group.peek_floor(subject_filter, numbers).astype(np.int64)
    if subject_filter.start.kind != "time":
        return cursors, True
    unset = np.flatnonzero((cursors == 0) & (numbers < subject_filter.start.subjects) & (ends > 0))
    cursors[unset] = ends[unset]
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
        log = store.partitions[partition].consumer_log
        few = min(row + _FEW_ROWS, log.visible_row)
        try:
            for entry in map(log.read_entry, range(row, few)):  # the first or second is most often one of them
                if _is_not_given(store, group, subject_filter, entry):
                    found.append(entry[2])
                    break
            else:
                rows = log.rows(few, _ROWS)[: max(0, log.visible_row - few)]
                wanted = _not_given(store, group, subject_filter, rows)
                if len(wanted) or len(rows) == _ROWS:
                    found.append(int(rows["stored_at_us"][wanted[0] if len(wanted) else -1]))
        except (NotInMemory, StorageError):
            continue
    return found


def _is_not_given(store: Store, group: Group, subject_filter: SubjectFilter, entry: EntryRow) -> bool:
    """Return whether a row is for the group and was not handed out."""
    number = entry[3]
    if not _takes(store, subject_filter, number):
        return False
    return entry[0] + entry[4] > int(group.peek_floor(subject_filter, np.array([number]))[0])


def _not_given(
    store: Store, group: Group, subject_filter: SubjectFilter, rows: np.ndarray[Any, np.dtype[np.void]]
) -> npt.NDArray[np.int64]:
    """Return the indexes of the rows (ENTRY_DTYPE) that are for the group and were not handed out."""
    assert rows.dtype == ENTRY_DTYPE
    subjects = rows["subject"].astype(np.int64)
    wanted = rows["first_sequence"] + rows["count"] > group.peek_floor(subject_filter, subjects)
    if subject_filter.prefix or subject_filter.kind is not None or store.subjects.has_private:
        # By name: what a filter keeps to match rows takes a byte a subject, and many groups may be idle.
        different, which = np.unique(subjects, return_inverse=True)
        taken = [_takes(store, subject_filter, number) for number in different.tolist()]
        wanted &= np.array(taken, np.bool_)[which]
    return np.flatnonzero(wanted)


def _takes(store: Store, subject_filter: SubjectFilter, number: int) -> bool:
    prefix, kind = subject_filter.prefix, subject_filter.kind
    if kind is not None and kind_of(store.subjects.lane(number)) != kind:
        return False
    try:
        name = store.subjects.name(number)
    except StorageError:
        return not prefix
    return name == prefix if is_exact(prefix) else name.startswith(prefix) and not is_private(name)
