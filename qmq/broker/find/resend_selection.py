"""The stored messages that a resend is for, as ranges of sequences: by ids, or by prefix and time.

A lookup takes several turns where it looks at many subjects, and waits for reads of what is not in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.serve import blocking_reads
from qmq.broker.find.rows import row_in_batch
from qmq.broker.groups.group import is_exact
from qmq.broker.groups.name_order import NameOrder
from qmq.errors import InvalidOption, UnknownMessage
from qmq.format.ids import MessageId
from qmq.format.lanes import is_known
from qmq.format.layout import DELAY_PARTITION, ENTRY_HAS_ORIGIN_ID, LANE_NORMAL
from qmq.format.private import is_private
from qmq.storage.store import ColdRead, NotInMemory, Store

#: The most messages of one selection, and the most ids.
MOST_MESSAGES: Final = 10_000_000
MOST_IDS: Final = 1_000
#: Names of subjects that one step compares with a prefix; and subjects that it looks up, which by time takes longer.
_NAMES: Final = 2_000
_LOOKED_UP: Final = 128
_BY_TIME: Final = 8
#: Ids that one step looks up: each 20 us, or up to 200 in a batch of 65,000 subjects.
_IDS: Final = 32
#: Ranges that one step counts.
_COUNTED: Final = 4_096
#: Behind all positions.
_END: Final = (1 << 64) - 1

T = TypeVar("T")
#: A piece of work in steps: it yields a read that it waits for, or None to go on in the next turn.
Steps = Generator["ColdRead | None", None, T]


def reading(store: Store, call: Callable[[], T]) -> Steps[T]:
    """Return what *call* does; yield the reads that it needs. Raises what it raises, but NotInMemory."""
    last: object = None
    while True:
        try:
            return call()
        except NotInMemory as missing:
            if missing.read.key == last:  # its bytes leave memory as fast as they are read
                with blocking_reads(store):
                    return call()
            last = missing.read.key
            yield missing.read


class SelectedRange(NamedTuple):
    """The messages [first, end) of a subject."""

    number: int
    first: int
    end: int


class ResendSelection(NamedTuple):
    """Messages by subject number and sequence, ascending; and the positions [low, high] of each partition in which all
    of them lie.
    """

    ranges: list[SelectedRange]
    bounds: list[tuple[int, int]]

    def total(self, store: Store) -> Steps[int]:
        """Return how many messages they are, gaps left out."""
        total = 0
        for at in range(0, len(self.ranges), _COUNTED):
            total += sum(store.subjects.message_count(*one) for one in self.ranges[at : at + _COUNTED])
            yield None
        return total

    def columns(self) -> Steps[SelectionColumns]:
        """Return the subject numbers of the ranges as columns."""
        found = [np.empty(0, np.uint32)]
        for at in range(0, len(self.ranges), _COUNTED):
            found.append(np.array([one.number for one in self.ranges[at : at + _COUNTED]], np.uint32))
            yield None
        of_ranges = np.concatenate(found)
        is_first = np.concatenate(([True], of_ranges[1:] != of_ranges[:-1]))[: len(of_ranges)]
        return SelectionColumns(of_ranges, of_ranges[is_first])


class SelectionColumns(NamedTuple):
    """The subject number of each range of a selection, and each number once; ascending: u32[n]."""

    of_ranges: npt.NDArray[np.uint32]
    numbers: npt.NDArray[np.uint32]


def pack(selection: ResendSelection) -> list[int]:
    """Return the ranges as a flat list of numbers."""
    return [number for one in selection.ranges for number in one]


def unpack(store: Store, numbers: list[int]) -> ResendSelection:
    """Return the selection whose ranges ``pack`` returned."""
    ranges = [SelectedRange(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)]
    return ResendSelection(ranges, everywhere(store))


def visible_ends(store: Store, visible: Callable[[int], int]) -> npt.NDArray[np.uint64]:
    """Return the sequence behind the last visible message of each subject, by number. Raises NotInMemory, StorageError.

    *visible* returns the position before which a partition's messages may be pulled. Others are no selection's: a group
    that has nothing of their subject yet may not know that they wait.
    """
    ends = store.subjects.ends[: store.subjects.count].copy()
    for part in store.partitions:
        position = visible(part.number)
        if position < part.message_log.end:
            for rows in part.consumer_log.rows_since(position):
                np.minimum.at(ends, rows["subject"], rows["first_sequence"])
    return ends


def everywhere(store: Store) -> list[tuple[int, int]]:
    """Return bounds that leave out nothing."""
    return [(0, _END)] * len(store.partitions)


# --- by ids ----------------------------------------------------------------------------------------------------------


def ids_of(store: Store, given: object) -> list[MessageId]:
    """Return the ids of a request. Raises InvalidOption for what is none, UnknownMessage for ids of another store."""
    if type(given) is not list or not given or not all(type(one) is bytes and len(one) == 16 for one in given):
        raise InvalidOption("ids must be a list of message ids of 16 bytes each")
    if len(given) > MOST_IDS:
        raise InvalidOption(f"{len(given)} ids are too many for one request; send at most {MOST_IDS:,}")
    ids = [MessageId.parse(one.hex()) for one in given]
    for one in ids:
        if one.store_id != store.store_id:
            raise UnknownMessage(
                f"message {one} is of store {one.store_id.hex()}; this broker's is {store.store_id.hex()}, so ask the "
                "broker that stored it"
            )
    return ids


def of_sequences(store: Store, given: object) -> list[SelectedRange]:
    """Return the messages of a request that names them: [subject, first sequence, the one behind the last, lane] each;
    the lane may be left out if it is the normal one.

    Raises InvalidOption, and UnknownMessage for a subject that does not exist.
    """
    if type(given) is not list or not 0 < len(given) <= MOST_IDS:
        raise InvalidOption(f"sequences must be a list of 1 to {MOST_IDS:,} lists of a subject and two sequences")
    found = set[SelectedRange]()
    for one in given:
        match one:
            case [str(subject), int(first), int(end), *rest] if 0 <= first < end < 1 << 63 and len(rest) < 2:
                lane = rest[0] if rest else LANE_NORMAL
                if type(lane) is not int or not is_known(lane):
                    raise InvalidOption(f"{lane!r:.80} is no lane")
                number = store.subjects.number(subject, lane)
            case _:
                raise InvalidOption(f"sequences must be lists of a subject and two sequences, not {one!r:.80}")
        if number is None or is_private(subject):
            raise UnknownMessage(f"there is no subject {subject!r:.80} here")
        found.add(SelectedRange(number, first, end))
    ranges = sorted(found)
    if any(one.number == next_.number and one.end > next_.first for one, next_ in pairwise(ranges)):
        raise InvalidOption("two of the sequences overlap")
    return ranges


def of_ranges(store: Store, ranges: list[SelectedRange], visible: Callable[[int], int]) -> Steps[ResendSelection]:
    """Return the visible messages of these ranges. Raises StorageError."""
    ends = yield from reading(store, lambda: visible_ends(store, visible))
    bounded = [one._replace(end=min(one.end, int(ends[one.number]))) for one in ranges]
    return ResendSelection([one for one in bounded if one.first < one.end], everywhere(store))


def of_ids(store: Store, ids: list[MessageId]) -> Steps[ResendSelection]:
    """Return the messages with these ids. Raises UnknownMessage, StorageError."""
    found, bounds = set[SelectedRange](), [(_END, 0)] * len(store.partitions)
    for at, one in enumerate(ids, 1):
        place, position = yield from reading(store, lambda one=one: _place_of(store, one))  # type: ignore[misc]
        found.add(place)
        low, high = bounds[one.partition]
        bounds[one.partition] = min(low, position), max(high, position)
        if at % _IDS == 0:
            yield None
    return ResendSelection(sorted(found), bounds)


def _place_of(store: Store, wanted: MessageId) -> tuple[SelectedRange, int]:
    """Return a message, and the position of its batch. Raises UnknownMessage, NotInMemory and StorageError."""
    _, partition, position = wanted
    if partition >= DELAY_PARTITION:
        raise UnknownMessage(f"message {wanted} was sent with a delay: resend it by its subject and time")
    unknown = UnknownMessage(f"message {wanted} is not stored here, or not any more")
    if partition >= len(store.partitions):
        raise unknown
    part = store.partitions[partition]
    log = part.consumer_log
    row = log.row_at_position(position + 1) - 1
    if row < log.first_row:
        raise unknown
    entry = log.read_entry(row)
    start, row = entry[1], row - entry[5]
    row, index = row_in_batch(part, row, log.read_entry(row), position - start)
    if row >= log.visible_row:
        raise unknown
    entry = log.read_entry(row)
    if entry[1] != start or entry[8] & ENTRY_HAS_ORIGIN_ID:  # a copy has the id of its original
        raise unknown
    sequence = entry[0] + index
    return SelectedRange(entry[3], sequence, sequence + 1), start


def subjects_under(store: Store, order: NameOrder, prefix: str) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the numbers of the subjects that a prefix takes, in pieces."""
    if is_exact(prefix):
        yield np.array(store.subjects.numbers_of(prefix), np.int64)
    else:
        yield from order.pieces(prefix)


# --- by prefix and time ----------------------------------------------------------------------------------------------


class PrefixSelection:
    """The messages of the subjects that a prefix takes, or of one subject, as they are when this is made."""

    def __init__(
        self, store: Store, order: NameOrder, prefix: str, since_us: int | None, until_us: int | None,
        follows: Callable[[str], bool], visible: Callable[[int], int],
    ) -> None:  # fmt: skip
        """Messages stored from *since_us* on, before *until_us*; None: without limit. *follows* returns whether
        anybody gets the messages of a subject; for *visible* see ``visible_ends``.
        """
        self._store = store
        self._order = order
        self._prefix = prefix
        self._since_us, self._until_us = since_us, until_us
        self._follows = follows
        self._visible = visible
        self._ends: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        #: Subjects with such messages that nobody follows.
        self.unfollowed = 0

    def find(self) -> Steps[ResendSelection]:
        """Return the selection. Raises StorageError."""
        found, looked_up = list[SelectedRange](), 0
        self._ends = yield from reading(self._store, lambda: visible_ends(self._store, self._visible))
        chosen = yield from self._chosen()
        for start in range(0, len(chosen), _NAMES):
            for number in (start + np.flatnonzero(chosen[start : start + _NAMES])).tolist():
                (name,) = self._store.subjects.names_of((number,))
                if name is None or is_private(name):
                    continue
                one = yield from reading(self._store, lambda number=number: self._range_of(number))  # type: ignore[misc]
                looked_up += 1 if self._since_us is None and self._until_us is None else _BY_TIME
                if looked_up >= _LOOKED_UP:
                    looked_up = 0
                    yield None
                if one.first >= one.end:
                    continue
                if self._follows(name):
                    found.append(one)
                else:
                    self.unfollowed += 1
            yield None
        bounds = yield from reading(self._store, self._bounds)
        return ResendSelection(found, bounds)

    def _chosen(self) -> Steps[npt.NDArray[np.bool_]]:
        """Return which subjects there are under the prefix, by number."""
        chosen = np.zeros(len(self._ends), np.bool_)
        for numbers in subjects_under(self._store, self._order, self._prefix):
            chosen[numbers[numbers < len(chosen)]] = True
            yield None
        return chosen

    def _range_of(self, number: int) -> SelectedRange:
        """Return the messages of a subject; an empty range for none. Raises NotInMemory."""
        store = self._store
        first, end = int(store.subjects.firsts[number]), int(self._ends[number])
        if self._since_us is not None:
            since = store.sequence_at_time(number, self._since_us)
            first = end if since is None else max(first, since)
        if self._until_us is not None:
            until = store.sequence_at_time(number, self._until_us)
            end = end if until is None else min(end, until)
        return SelectedRange(number, first, end)

    def _bounds(self) -> list[tuple[int, int]]:
        """Return positions of each partition between which the messages lie. Raises NotInMemory."""
        bounds = list[tuple[int, int]]()
        for part in self._store.partitions:
            log, low, high = part.consumer_log, 0, _END
            if self._since_us is not None:
                row = log.row_at_time(self._since_us)
                low = log.read_entry(row)[1] if row < log.visible_row else part.message_log.end
            if self._until_us is not None and (row := log.row_at_time(self._until_us)) < log.visible_row:
                high = log.read_entry(row)[1]
            bounds.append((low, high))
        return bounds


def checked_times(fields: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return since_us and until_us of a request. Raises InvalidOption."""
    times = fields.get("since_us"), fields.get("until_us")
    for name, value in zip(("since", "until"), times, strict=True):
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 63):
            raise InvalidOption(f"{name} must be microseconds since 1970, not {value!r:.40}")
    since_us, until_us = times
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise InvalidOption("since is not before until, so no message lies between them; turn them round")
    return since_us, until_us
