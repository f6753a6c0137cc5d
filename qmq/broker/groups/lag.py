"""The lag of a group: how many messages are ready for it, and how old the oldest is. The cost goes by subjects, not by
messages; what looks at many of them is work in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.group import Group, SubjectFilter, is_exact
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.groups.time_starts import NOTHING, TimeStarts
from qmq.broker.ports.work import NUMBERS_A_UNIT, PIECE, Work
from qmq.errors import StorageError
from qmq.format.batch import EntryRow
from qmq.format.lanes import kind_of
from qmq.format.layout import ENTRY_DTYPE
from qmq.format.private import is_private
from qmq.storage.store import NotInMemory, Store

#: A start at a time is looked up in so many subjects without a cursor; in further ones no message counts as ready.
MOST_LOOKED_UP: Final = 1_000
#: Above all sequences.
_TOP: Final = np.iinfo(np.int64).max
#: Starts that are looked up at once, and the work of each; more are read from all rows since then, where they are few.
_STARTS: Final = 16
_START_WORK: Final = 50
#: The work of looking for the oldest message of a filter.
_OLDEST_WORK: Final = 100
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


def ready(store: Store, group: Group, order: NameOrder, times: TimeStarts) -> Work[ReadyCount]:
    """Count the messages that no consumer of the group had yet. Gaps in sequences do not count."""
    total = 0

    def count(followed: FollowedSubjects) -> None:
        nonlocal total
        total += store.subjects.messages_of(followed.numbers, followed.starts, followed.ends)

    exact = yield from walk_followed(store, group, order, times, count)
    return ReadyCount(total, exact)


def has_ready(
    store: Store, group: Group, subject_filter: SubjectFilter, order: NameOrder, times: TimeStarts
) -> Work[bool]:
    """Return whether there are messages of a filter that no consumer of the group had yet; False where that would need
    a read.
    """
    for numbers in _pieces(store, subject_filter, order):
        followed = yield from _followed(store, group, subject_filter, numbers, times, _Lookups())
        if (followed.starts < followed.ends).any():
            return True
        yield 1 + len(numbers) // NUMBERS_A_UNIT
    return False


def waiting(
    store: Store, group: Group, times: TimeStarts, after: int, most: int
) -> Work[tuple[list[SubjectLag], int | None]]:
    """Return lanes of subjects with messages that no consumer of the group had yet, from number *after* on, and the
    number to go on from (None: there are no more).
    """
    rows, subjects = list[SubjectLag](), store.subjects
    lookups = {prefix: _Lookups() for prefix in group.filters}
    for window in range(after, subjects.count, PIECE):
        end, found = min(window + PIECE, subjects.count), list[FollowedSubjects]()
        for subject_filter in list(group.filters.values()):
            numbers = np.array(subject_filter.numbers_between(store, window, end), np.int64)
            yield 1 + (end - window) // NUMBERS_A_UNIT
            if len(numbers):
                known = lookups.setdefault(subject_filter.prefix, _Lookups())
                found.append((yield from _followed(store, group, subject_filter, numbers, times, known)))
        numbers, starts, ends, _ = _joined(found)
        chosen = np.flatnonzero(starts < ends)
        chosen = chosen[np.argsort(numbers[chosen], kind="stable")]
        left = most - len(rows)
        for at in chosen[:left].tolist():
            with suppress(StorageError):  # its name is damaged
                name, lane = subjects.name(int(numbers[at])), subjects.lane(int(numbers[at]))
                rows.append(SubjectLag(name, int(starts[at]), int(ends[at]), lane))
        if len(chosen) > left:
            return rows, int(numbers[chosen[left]])
        yield 1 + len(rows)
    return rows, None


def walk_followed(
    store: Store, group: Group, order: NameOrder, times: TimeStarts, take: Callable[[FollowedSubjects], None]
) -> Work[bool]:
    """Give *take* the subjects that a group follows, each once, piece by piece; return whether all starts are known."""
    exact, filters = True, list(group.filters.values())
    are_apart = len(group.outermost()) == len(filters)
    below = np.zeros(0 if are_apart else store.subjects.count, np.int64)  # by number: _TOP less the lowest start
    for subject_filter in filters:
        lookups = _Lookups()
        for numbers in _pieces(store, subject_filter, order):
            followed = yield from _followed(store, group, subject_filter, numbers, times, lookups)
            exact = exact and followed.exact
            if are_apart:
                take(followed)
            else:  # some prefixes lie within others
                known = numbers < len(below)
                numbers, starts = numbers[known], followed.starts[known]
                below[numbers] = np.maximum(below[numbers], _TOP - starts)
            yield 1 + len(numbers) // NUMBERS_A_UNIT
    for window in range(0, len(below), PIECE):
        numbers = window + np.flatnonzero(below[window : window + PIECE])
        take(FollowedSubjects(numbers, _TOP - below[numbers], store.subjects.ends[numbers].astype(np.int64), exact))
        yield 1 + PIECE // NUMBERS_A_UNIT
    return exact


class _Lookups:
    """How many more starts may be looked up for one filter."""

    def __init__(self) -> None:
        self.left = MOST_LOOKED_UP


def _followed(
    store: Store, group: Group, subject_filter: SubjectFilter, numbers: npt.NDArray[np.int64], times: TimeStarts,
    lookups: _Lookups,
) -> Work[FollowedSubjects]:  # fmt: skip
    """Return these subjects with what no consumer of the group had yet, by the start of a filter."""
    cursors, exact = yield from _cursors(store, group, subject_filter, numbers, times, lookups)
    starts = np.maximum(cursors, store.subjects.firsts[numbers].astype(np.int64))
    return FollowedSubjects(numbers, starts, store.subjects.ends[numbers].astype(np.int64), exact)


def _joined(pieces: list[FollowedSubjects]) -> FollowedSubjects:
    """Return the subjects of all pieces, each once, with its lowest start."""
    if not pieces:
        return FollowedSubjects(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), True)
    if len(pieces) == 1:
        return pieces[0]
    numbers, starts, ends = (
        np.concatenate(column) for column in zip(*((one.numbers, one.starts, one.ends) for one in pieces), strict=True)
    )
    by_number = np.argsort(numbers, kind="stable")
    numbers, starts, ends = numbers[by_number], starts[by_number], ends[by_number]
    heads = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
    exact = all(piece.exact for piece in pieces)
    return FollowedSubjects(numbers[heads], np.minimum.reduceat(starts, heads), ends[heads], exact)


def _pieces(store: Store, subject_filter: SubjectFilter, order: NameOrder) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the numbers of the subjects under a filter's prefix, of all lanes, in no order that counts."""
    if is_exact(subject_filter.prefix):
        yield np.array(store.subjects.numbers_of(subject_filter.prefix), np.int64)
    else:
        yield from order.pieces(subject_filter.prefix)


def _cursors(
    store: Store, group: Group, subject_filter: SubjectFilter, numbers: npt.NDArray[np.int64], times: TimeStarts,
    lookups: _Lookups,
) -> Work[tuple[npt.NDArray[np.int64], bool]]:  # fmt: skip
    """Return the next sequence of each of these subjects, and whether all are known."""
    cursors = group.floor(subject_filter, numbers).astype(np.int64)
    if subject_filter.start.kind != "time":
        return cursors, True
    ends = store.subjects.ends[numbers].astype(np.int64)
    unset = np.flatnonzero((cursors == 0) & (numbers < subject_filter.start.subjects) & (ends > 0))
    cursors[unset] = ends[unset]
    if len(unset) > _STARTS and (store.leaving is None or subject_filter.begun_behind is not store.leaving):
        known = yield from times.at(subject_filter.start.value)
        if known is not None:
            found = known.of(numbers[unset])
            cursors[unset] = np.where(found == NOTHING, ends[unset], found)
            return cursors, True
    exact = len(unset) <= lookups.left
    chosen = unset[: lookups.left].tolist()
    lookups.left -= len(chosen)
    for done, at in enumerate(chosen, 1):
        try:
            cursor = group.cursor(store, subject_filter, int(numbers[at]))
        except (NotInMemory, StorageError):
            exact = False
            continue
        if cursor is not None:
            cursors[at] = cursor
        if done % _STARTS == 0:
            yield _STARTS * _START_WORK
    return cursors, exact


def oldest_us(store: Store, group: Group) -> Work[int | None]:
    """Return about when the oldest message of the lag was stored, or a little earlier. None where that would need a
    read.
    """
    found = list[int]()
    for subject_filter in group.every_lane(store):
        if subject_filter.exact:
            yield _OLDEST_WORK + sum(part.consumer_log.look_up_us for part in store.partitions)
            found += _oldest_of_subject(store, group, subject_filter)
        else:
            found += _oldest_of_prefix(store, group, subject_filter)
            yield _OLDEST_WORK
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
    return entry[0] + entry[4] > int(group.floor(subject_filter, np.array([number]))[0])


def _not_given(
    store: Store, group: Group, subject_filter: SubjectFilter, rows: np.ndarray[Any, np.dtype[np.void]]
) -> npt.NDArray[np.int64]:
    """Return the indexes of the rows (ENTRY_DTYPE) that are for the group and were not handed out."""
    assert rows.dtype == ENTRY_DTYPE
    subjects = rows["subject"].astype(np.int64)
    wanted = rows["first_sequence"] + rows["count"] > group.floor(subject_filter, subjects)
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
