"""Groups: the subjects that they follow, and their cursors.

A group follows prefixes and exact subjects. Its cursor in a subject is the next sequence to hand out; a cursor belongs
to (group, subject and lane), whichever prefix brought the message. Each prefix also has a row cursor for each
partition: the row of the consumer log before which no message is left to hand out. A pull over a prefix reads on from
there in message-log order, and costs the same however many subjects match.

A group that heeds priorities has a filter of its own for each kind of lane under a prefix, with row cursors of its own
(see ``SubjectFilter.lanes``). Other groups have one filter for all lanes.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from qmq.broker.groups.cursors import Cursors
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.member import Member
from qmq.broker.groups.priorities import PriorityShare
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.ports.commands import Pull, Subscribe
from qmq.errors import InvalidOption, StorageError
from qmq.format.batch import EntryRow
from qmq.format.lanes import ORDERED_KINDS, SLOT_BITS, kind_of
from qmq.format.layout import (
    LANE_HIGH,
    LANE_LOW,
    LANE_NORMAL,
    LANE_ORDERED,
    LANE_ORDERED_HIGH,
    LANE_ORDERED_LOW,
)
from qmq.format.private import is_private
from qmq.names import takes
from qmq.net.protocol.types import RELIABLE
from qmq.storage.store import NotInMemory, Store


class StartRule(NamedTuple):
    """The start of a group in the subjects that existed when it began to follow them; in later subjects it starts at 0.

    ``kind`` is "first", "time" (value: microseconds) or "sequence" (value: that sequence).
    """

    kind: str
    value: int
    subjects: int  # subject numbers below this existed then
    #: For "sequence": when the last message was stored of those that were there then.
    until_us: int = 0


class Waiting:
    """A waiting pull."""

    __slots__ = ("deadline_us", "done", "pull", "subscription")

    def __init__(self, pull: Pull, subscription: Subscription, deadline_us: int) -> None:
        self.pull = pull
        self.subscription = subscription
        self.deadline_us = deadline_us
        self.done = False


class OrderScan(Protocol):
    """The reader of a group's messages with order keys."""

    def has_more(self) -> bool:
        """Return whether there may be messages that were not handed out."""


#: The codes of the kinds of lanes in the number of a filter: see ``SubjectFilter.ordinal``.
KIND_CODES: Final = {
    LANE_NORMAL: 0, LANE_HIGH: 4, LANE_LOW: 8, LANE_ORDERED: 12, LANE_ORDERED_HIGH: 13, LANE_ORDERED_LOW: 14,
}  # fmt: skip
KINDS_BY_CODE: Final = {code: kind for kind, code in KIND_CODES.items()}
#: The bits of a filter's number below the code of its kind of lanes.
ORDINAL_BITS: Final = 11
_ORDINALS: Final = 1 << ORDINAL_BITS
_NO_START: Final = np.uint64(2**64 - 1)


class SubjectFilter:
    """One prefix or exact subject that a group follows."""

    def __init__(
        self, group: Group, prefix: str, start: StartRule, row_cursors: list[int], positions: list[int], ordinal: int,
        base: SubjectFilter | None = None, kind: int | None = None,
    ) -> None:  # fmt: skip
        """*kind* says which lanes it takes, one of KIND_CODES; None: all. *base* is the prefix's filter of normal
        lanes, None for that itself.
        """
        self.group = group
        self.prefix = prefix
        self.kind = kind
        self.base = base
        #: In a filter of normal lanes: the filters of other lanes, by kind. Each is made before its first message is
        #: looked for, with the row cursors from then: the rows before these have none of its messages.
        self.lanes: dict[int, SubjectFilter] = {}
        self.start = start
        #: The segment that was leaving when the prefix was first followed: its messages are not for the filter, unless
        #: it stays.
        self.begun_behind: object = None if base is None else base.begun_behind
        #: Cursors that its start at a sequence has set in subjects that a kill has renumbered: the sequence by number.
        self.begun: dict[int, int] = {}
        self.row_cursors = row_cursors  # by partition: the next row to read; unused for an exact subject
        #: By partition, for the checkpoint: a position at or before that row.
        self.positions = positions
        self.exact = is_exact(prefix) and (kind or 0) < LANE_ORDERED
        #: Its number in its group, from 1 on, with the code of its kind of lanes above ORDINAL_BITS; it never changes.
        self.ordinal = ordinal
        self.number: int | None = None  # the number of an exact subject, once it exists
        #: In an at_most_once group: a start skips all messages up to this stamp (exact subject: sequence), and the
        #: write that is raising it. Records say so up to ``recorded``, before they are on disk.
        self.reserved = self.recorded = 0
        self.reserving: object = None
        self.reserves = 0  # since a message was handed out
        #: For an exact subject with one partition: no message is left before that row, unless its cursor says so.
        self.passed = 0
        #: For an exact subject: (partition, entry) of rows that became visible in this turn while a pull waited.
        self.arrived: list[tuple[int, EntryRow]] = []
        self.waiting: OrderedDict[int, Waiting] = OrderedDict()  # by id(Waiting), longest first
        #: Bytes for it are being read; and the reads since it last got messages, so that none is repeated for ever.
        self.reading = False
        self.reads: set[object] = set()
        self._matches: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._matched = 0
        self._generation = 0
        self._looked = 0  # the subjects that ``find_lanes`` has looked at

    # --- lanes -------------------------------------------------------------------------------------------------------

    def find_lanes(self, store: Store, since: int = 0, least: list[int] | None = None) -> bool:
        """Make the filters of other lanes of which there are subjects now; return whether there are any.

        *least*: no row before these is of a subject of another lane from number *since* on. Call it before the row
        cursors move. A filter of all lanes of one subject reads rows once the subject has a second lane.
        """
        count = store.subjects.count
        if self._looked != count:
            if store.subjects.has_lanes:
                self._find_lanes(store, least if self._looked >= since else None)
            self._looked = count
        return bool(self.lanes) or (self.kind is None and not self.exact and is_exact(self.prefix))

    def _find_lanes(self, store: Store, least: list[int] | None) -> None:
        subjects = store.subjects
        if is_exact(self.prefix):
            # A filter of one subject reads no rows, so its row cursors may lie before the first one.
            self.row_cursors[:] = map(max, self.row_cursors, _first_rows(store))
            kinds = {kind_of(lane) for lane in subjects.lanes_of(self.prefix)}
            if self.kind is None and kinds - {LANE_NORMAL}:
                self.exact = False
            self.group.reads_leaving = self.group.reads_leaving or store.leaving is not None
        else:
            kinds = subjects.kinds_under(self.prefix, self._looked)
        if self.kind is None:
            return
        for kind in kinds - {LANE_NORMAL} - self.lanes.keys():
            rows = self.row_cursors if least is None else map(max, self.row_cursors, least)
            self.add_lane(kind, list(rows), list(self.positions))

    def add_lane(self, kind: int, row_cursors: list[int], positions: list[int]) -> SubjectFilter:
        """Add the filter of another kind of lanes."""
        ordinal = self.ordinal | KIND_CODES[kind] << ORDINAL_BITS
        start = self.start
        self.lanes[kind] = added = SubjectFilter(
            self.group, self.prefix, start, row_cursors, positions, ordinal, self, kind
        )
        added.waiting = self.waiting  # a pull waits for all lanes
        self.group.dirty, self.group.scan = True, None
        return added

    def with_lanes(self) -> Iterator[SubjectFilter]:
        """Return the filter and those of its other lanes."""
        return itertools.chain((self,), self.lanes.values())

    def clear_blocks(self) -> None:
        """Forget the blocks of an at_most_once group, also one whose write has not ended."""
        self.reserved, self.recorded, self.reserving = 0, 0, None

    def begin_within(self, store: Store, partition: int) -> None:
        """Go back to where it would have begun, as the segment stays that was leaving. Raises StorageError."""
        log = store.partitions[partition].consumer_log
        for one in self.with_lanes():
            one.row_cursors[partition] = min(one.row_cursors[partition], log.row_at_position(one.positions[partition]))
        self.group.scan = None

    def with_slots(self) -> Iterator[SubjectFilter]:
        """Yield the filters of its lanes of order keys."""
        return (self.lanes[kind] for kind in ORDERED_KINDS if kind in self.lanes)

    @property
    def has_slots(self) -> bool:
        """Whether there are subjects with order keys for it."""
        return not self.lanes.keys().isdisjoint(ORDERED_KINDS)

    def first_cursors(self) -> tuple[list[int], list[int]]:
        """Return its row cursors, or those of one of its other lanes where they lie before, and their positions."""
        several = list(self.with_lanes())
        rows = [min(by_filter) for by_filter in zip(*(one.row_cursors for one in several), strict=True)]
        positions = [min(by_filter) for by_filter in zip(*(one.positions for one in several), strict=True)]
        return rows, positions

    # --- subjects ----------------------------------------------------------------------------------------------------

    def matches(self, store: Store) -> npt.NDArray[np.bool_] | None:
        """Return which subjects of its lanes the prefix takes, by subject number; None if it takes all.

        No prefix takes a subject that is private to one group.
        """
        takes_all_lanes = self.kind is None or (self.kind == LANE_NORMAL and not store.subjects.has_lanes)
        if self.prefix == "" and takes_all_lanes and not store.subjects.has_private:
            return None
        count = store.subjects.count
        if self._generation != store.subjects.generation:
            self._generation = store.subjects.generation
            self._matches[: self._matched][store.subjects.is_forgotten[: self._matched]] = False
        if self._matched < count:
            if len(self._matches) < count:
                grown = np.zeros(max(count, 2 * len(self._matches)), np.bool_)
                grown[: self._matched] = self._matches[: self._matched]
                self._matches = grown
            numbers = self.numbers_between(store, self._matched, count)
            if store.subjects.has_lanes and self.kind is not None:
                numbers = numbers[_of_kind(store.subjects.lanes[numbers], self.kind)]
            self._matches[numbers] = True
            self._matched = count
        return self._matches

    def numbers(self, store: Store) -> npt.NDArray[np.int64]:
        """Return the numbers of all subjects under the prefix, whatever their lanes."""
        return self.numbers_between(store, 0, store.subjects.count)

    def numbers_between(self, store: Store, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the numbers in [start, end) of subjects under the prefix, of all lanes."""
        if is_exact(self.prefix):
            return np.array([one for one in store.subjects.numbers_of(self.prefix) if start <= one < end], np.int64)
        if self.prefix == "" and not store.subjects.has_private:
            return np.arange(start, end)
        numbers = store.subjects.under(self.prefix, start, end)
        if store.subjects.has_private:
            shared = [number for number in numbers.tolist() if not is_private(store.subjects.name(number))]
            return np.array(shared, np.int64)
        return numbers

    def positions_now(self, store: Store, visible: list[int]) -> list[int]:
        """Return the positions of its row cursors, by partition: all before is handed out."""
        return _filter_positions(store, self, visible)

    def has_more(self, store: Store) -> bool:
        """Return whether there may be messages that it has not handed out."""
        if self.group.scan is not None and self.kind in ORDERED_KINDS:
            return self.group.scan.has_more()
        if not self.exact:
            if len(self.row_cursors) == 1:
                return self.row_cursors[0] < store.partitions[0].consumer_log.visible_row
            return any(
                row < store.partitions[partition].consumer_log.visible_row
                for partition, row in enumerate(self.row_cursors)
            )
        number = self.subject(store) if self.number is None else self.number
        if number is None:
            return False
        cursors = self.group.cursors  # looked up here: each message asks
        column = cursors.column
        cursor = column.item(number) if number < len(column) else cursors.few.get(number, 0)
        return cursor < store.subjects.ends.item(number)

    def pass_run(self, number: int, first: int, end: int, row: int, total: int) -> bool:
        """Move behind a run that it takes, if that is the next to hand out, and *total* messages of it are: sequences
        [first, end) of a subject, in that row of the only partition. Return False, with nothing changed, otherwise.

        It is the next where all before is handed out, and no start has to be asked.
        """
        group = self.group
        column = group.cursors.column
        cursor = column.item(number) if number < len(column) else group.cursors.few.get(number, 0)
        if not cursor or end - first != total:
            return False
        if self.exact:
            if first != cursor:
                return False
            self.passed = row + 1
        else:
            if self.row_cursors[0] != row or first < cursor:
                return False
            self.row_cursors[0] = row + 1
        if number < len(column):
            column[number] = end
        else:
            group.cursors.few[number] = end
        group.dirty = True
        return True

    def subject(self, store: Store) -> int | None:
        """Return the number of the exact subject in its lane, or None before its first message."""
        if self.number is None:
            self.number = store.subjects.number(self.prefix, self.kind or LANE_NORMAL)
        return self.number


def is_exact(prefix: str) -> bool:
    """Return whether a prefix takes one subject only."""
    return prefix != "" and not prefix.endswith(".")


def _of_kind(lanes: npt.NDArray[np.uint16], kind: int) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = lanes == kind if kind < LANE_ORDERED else (lanes | SLOT_BITS) == kind | SLOT_BITS
    return found


class Group:
    """One group, or (name None) a solo consumer, which has no state on disk."""

    def __init__(self, name: str | None, mode: str = RELIABLE) -> None:
        self.name = name
        self.mode = mode
        #: It hands out higher priorities first; other groups and solo consumers get messages in stored order.
        self.heeds_priority = name is not None and mode == RELIABLE
        #: The share that is due to lower priorities, in a group that heeds priorities.
        self.share = PriorityShare()
        self.cursors = Cursors()
        self.filters: dict[str, SubjectFilter] = {}
        #: The prefixes that it no longer follows, with their cursors, should it follow them again.
        self.ended: dict[str, SubjectFilter] = {}
        self._by_ordinal: dict[int, SubjectFilter] = {}
        #: What is read of its messages with order keys (broker/delivery/order/scan.py), once a pull has looked; None
        #: again when it follows something else.
        self.scan: OrderScan | None = None
        #: The state of its messages; None for a solo consumer.
        self.ledger: Ledger | None = None
        #: Messages that it never gets: dropped by retention, expired (in a group without dead letters), or maybe handed
        #: out before a crash.
        self.skipped = 0
        #: The subscriptions of its consumers, by connection and number.
        self.subscriptions: dict[tuple[int, int], Subscription] = {}
        #: Subscriptions of an at_most_once group, whose consumers have no state.
        self.readers = 0
        #: Its prefixes and their starts are on disk when ``Durable.has`` this ticket.
        self.ticket = 0
        self.dirty = True
        #: What ``packed`` has returned.
        self.row = b""
        self._packed_ledger = b""
        #: The cursors and filters as they were packed last, with the count of cursors and their sum then: passed.py
        #: compares them with those of now, unless ``is_comparable`` is false until the next checkpoint.
        self.packed_bytes = b""
        self.packed_cursors = self.packed_sum = 0
        #: Whether a filter of one subject may have begun to read rows of a segment that is leaving.
        self.reads_leaving = False
        self.is_comparable = True
        #: By partition: the end of the last segment of which retention has the group miss messages. Cursors pass these
        #: with the next messages, or never.
        self.missed_before: dict[int, int] = {}
        #: Messages that the cursors have passed without a word, or that were counted and not passed, since the last
        #: seek.
        self.unaccounted = 0

    def consumers_there(self) -> int:
        """Return how many consumers have a client."""
        return self.readers + (0 if self.ledger is None else self.ledger.consumers_there())

    def follow(self, prefix: str, begin: GroupStart, ordinal: int | None = None) -> SubjectFilter:
        """Begin to follow a prefix; *ordinal* is its number where it has one."""
        before = self.ended.pop(prefix, None)
        if ordinal is None:
            ordinal = 1 + max(self._by_ordinal, default=0) if before is None else before.ordinal
        subject_filter = SubjectFilter(
            self, prefix, begin.start, list(begin.row_cursors), list(begin.positions), ordinal,
            kind=LANE_NORMAL if self.heeds_priority else None,
        )  # fmt: skip
        subject_filter.begun_behind = begin.leaving
        if before is not None:
            # A start skips these blocks even so.
            subject_filter.reserved, subject_filter.recorded = before.reserved, before.recorded
        self.filters[prefix] = self._by_ordinal[ordinal] = subject_filter
        self._begin_alike(subject_filter)
        self.dirty, self.scan = True, None
        return subject_filter

    def _begin_alike(self, wide: SubjectFilter) -> None:
        """Have the filters within one that begins at the first message begin there as well: the first message that any
        of them hands out moves the group's cursor, so an earlier start of another one would be passed.
        """
        if wide.start.kind != "first" or is_exact(wide.prefix):
            return
        for base in self.filters.values():
            if base.start.kind != "first" and takes((wide.prefix,), base.prefix):
                self.compare_anew()  # it may have passed a subject from its own start on
                self.cursors.update({n: 0 for n, begun in base.begun.items() if self.cursors.get(n) == begun})
                base.begun.clear()
                for narrow in base.with_lanes():
                    narrow.start, narrow.passed = wide.start, 0
                    narrow.row_cursors[:] = map(min, narrow.row_cursors, wide.row_cursors)
                    narrow.positions[:] = map(min, narrow.positions, wide.positions)

    def unfollow(self, prefixes: Iterable[str]) -> list[SubjectFilter]:
        """Stop to follow these prefixes. Ranges of messages that name one of them keep their meaning."""
        ended = [self.filters.pop(prefix) for prefix in prefixes if prefix in self.filters]
        self.ended.update((subject_filter.prefix, subject_filter) for subject_filter in ended)
        self.dirty, self.scan = True, None
        return ended

    def follows_no_more(self, subject: str) -> bool:
        """Return whether the group once followed that subject and does not now."""
        return bool(self.ended) and takes(self.ended, subject) and not takes(self.filters, subject)

    def all_filters(self) -> Iterator[SubjectFilter]:
        """Return the filters of all prefixes that it follows or once followed."""
        return itertools.chain(self.filters.values(), self.ended.values())

    def every_lane(self, store: Store) -> list[SubjectFilter]:
        """Return the filters of all lanes of which there are subjects, for the prefixes that it follows."""
        for subject_filter in self.filters.values():
            subject_filter.find_lanes(store)
        return [one for subject_filter in self.filters.values() for one in subject_filter.with_lanes()]

    def filter_of(self, ordinal: int) -> SubjectFilter | None:
        """Return the filter with that number, also an ended one; None if the record of it is lost."""
        subject_filter = self._by_ordinal.get(ordinal % _ORDINALS)
        kind = KINDS_BY_CODE.get(ordinal >> ORDINAL_BITS, LANE_NORMAL)
        if subject_filter is None or kind == LANE_NORMAL:
            return subject_filter
        known = subject_filter.lanes.get(kind)
        if known is None:
            known = subject_filter.add_lane(kind, list(subject_filter.row_cursors), list(subject_filter.positions))
        return known

    def seek(self, begin: GroupStart) -> None:
        """Set the cursors of all prefixes that it follows or once followed."""
        self.cursors = Cursors()
        for subject_filter in [one for base in self.all_filters() for one in base.with_lanes()]:
            subject_filter.start, subject_filter.begun_behind = begin.start, begin.leaving
            subject_filter.row_cursors[:] = begin.row_cursors
            subject_filter.positions[:] = begin.positions
            subject_filter.arrived.clear()
            subject_filter.begun.clear()
            subject_filter.clear_blocks()
        self.dirty, self.scan = True, None
        self.packed_bytes, self.packed_cursors, self.packed_sum, self.unaccounted = b"", 0, 0, 0
        if self.ledger is not None:
            self.ledger.totals.passed_before = self.ledger.totals.passed

    def leave_rows(self, store: Store) -> None:
        """Move row cursors to the first row where a segment has gone that a filter of one subject began to read when
        the group had been moved past it.
        """
        self.reads_leaving = False
        for base in self.all_filters():
            for subject_filter in base.with_lanes():
                subject_filter.row_cursors[:] = map(max, subject_filter.row_cursors, _first_rows(store))

    def compare_anew(self) -> None:
        """Compare no cursors up to the next checkpoint: what lies between them and those of the last is not known."""
        self.is_comparable = False
        self.dirty = True

    def covering(self, prefix: str) -> SubjectFilter | None:
        """Return a filter of the group that takes all that *prefix* takes."""
        return _covering(self.filters, prefix)

    def left_at(self, prefix: str) -> SubjectFilter | None:
        """Return an ended filter that takes all that *prefix* takes: its cursors are known."""
        return self.ended.get(prefix) or _covering(self.ended, prefix)

    def within(self, prefixes: Iterable[str]) -> list[str]:
        """Return the parts of these prefixes that the group follows."""
        found = dict[str, None]()
        for prefix in prefixes:
            if prefix in self.filters or self.covering(prefix) is not None:
                found[prefix] = None
            elif prefix == "" or prefix.endswith("."):
                found.update((known, None) for known in self.filters if known.startswith(prefix))
        return list(found)

    def outermost(self) -> list[str]:
        """Return its prefixes without those that lie within another one."""
        return [prefix for prefix in self.filters if self.covering(prefix) is None]

    def cursor(self, store: Store, subject_filter: SubjectFilter, number: int) -> int | None:
        """Return the next sequence of a subject; before the first pull the one of the start, or None while no message
        that was stored since can be read.
        """
        cursor = self.cursors.get(number)
        if cursor:
            return cursor
        first = self.beginning(store, subject_filter, number)
        if first is None or subject_filter.begun_behind is not store.leaving:
            return first  # it may have messages of a leaving segment until retention moves it, and counts the others
        return max(first, store.offered_sequence(number))

    def beginning(self, store: Store, subject_filter: SubjectFilter, number: int) -> int | None:
        """Return the sequence at which the group starts in a subject; None while it cannot be found out."""
        start = subject_filter.start
        if number >= start.subjects or start.kind == "first":
            return 0
        if start.kind == "sequence":
            return start.value
        return store.sequence_at_time(number, start.value)

    def floor(self, subject_filter: SubjectFilter, numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        """Return the cursors of many subjects, for the rows that a scan reads: u64[len(numbers)].

        A start at a time needs no floor here: the scan began at that time.
        """
        return self.started(subject_filter, numbers, self.cursors.of(numbers))

    def started(
        self, subject_filter: SubjectFilter, numbers: npt.NDArray[Any], cursors: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Return *cursors* of many subjects, with those of the group's start set where it has none yet."""
        start = subject_filter.start
        if start.kind == "sequence" and start.value:
            unset = (cursors == 0) & (numbers < start.subjects)
            cursors[unset] = start.value
        return cursors

    def started_in_slots(
        self, store: Store, numbers: npt.NDArray[Any], cursors: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Do as ``started`` for subjects with order keys: of several prefixes that take one, the first start counts."""
        if cursors.all() or not any(base.start.kind == "sequence" for base in self.filters.values()):
            return cursors
        starts = np.full(len(numbers), _NO_START)
        for base in self.filters.values():
            start = base.start
            is_sequence = start.kind == "sequence"
            for ordered in base.with_slots():
                matches = ordered.matches(store)
                assert matches is not None  # these are some lanes only
                taken = matches[numbers]
                own = np.where(is_sequence & (numbers[taken] < start.subjects), np.uint64(start.value), np.uint64(0))
                starts[taken] = np.minimum(starts[taken], own)
        unset = (cursors == 0) & (starts != _NO_START)
        cursors[unset] = starts[unset]
        return cursors

    def is_changed(self) -> bool:
        """Return whether its state has changed since ``packed``."""
        return self.dirty or (self.ledger is not None and self.ledger.is_changed())

    def packed(self, store: Store, visible: list[int]) -> bytes:
        """Return its name and state for the checkpoint: the number of its ledger, its cursors, its ledger's state.

        They are made anew only after a change. Row cursors go in as positions, which survive when the consumer log is
        rebuilt.
        """
        assert self.ledger is not None
        ledger = self.ledger.packed_bytes()
        if not self.dirty and ledger is self._packed_ledger:
            return self.row
        if self.dirty:
            fields = {
                "mode": self.mode,
                "skipped": self.skipped,
                "unaccounted": self.unaccounted,
                "missed_before": self.missed_before,
                "cursors": self.cursors.packed(),
                "filters": [
                    (
                        subject_filter.prefix,
                        subject_filter.ordinal,
                        tuple(subject_filter.start),
                        _filter_positions(store, subject_filter, visible),
                        subject_filter.recorded,  # no start reads the records before the checkpoint
                        subject_filter.prefix in self.ended,
                        [
                            (kind, _filter_positions(store, lane, visible))
                            for kind, lane in subject_filter.lanes.items()
                        ],
                    )
                    for subject_filter in self.all_filters()
                ],
            }
            leaving = store.leaving
            if leaving is not None and any(one.begun_behind is leaving for one in self.all_filters()):
                fields["beside_leaving"] = True
            if begun := {one.ordinal: one.begun for one in self.all_filters() if one.begun}:
                fields["begun"] = begun
            self.packed_bytes = msgpack.packb(fields)
            self._note_packed()
            self.dirty = False
        self._packed_ledger = ledger
        self.row = msgpack.packb(self.name) + msgpack.packb((self.ledger.number, self.packed_bytes, ledger))
        return self.row

    def _note_packed(self) -> None:
        numbers, sequences = self.cursors.items()
        self.packed_cursors, self.packed_sum = len(numbers), int(sequences.sum())
        self.is_comparable = True
        if self.ledger is not None:
            self.ledger.totals.passed_before = self.ledger.totals.passed

    def restore(self, store: Store, packed: dict[str, Any], packed_bytes: bytes) -> None:
        """Take over cursors from ``packed``, which *packed_bytes* are."""
        numbers, sequences = packed["cursors"]
        self.cursors.restore(numbers, sequences, store.subjects.is_forgotten)
        self.packed_bytes = packed_bytes
        self._note_packed()
        self.skipped = packed["skipped"]
        self.is_comparable = not packed.get("beside_leaving")
        self.unaccounted = packed.get("unaccounted", 0)  # an older program has not counted it
        self.missed_before = packed.get("missed_before", {})
        for prefix, ordinal, start, positions, reserved, has_ended, lanes in packed["filters"]:
            begin = GroupStart(StartRule(*start), *_rows_at(store, positions))
            subject_filter = self.follow(prefix, begin, ordinal)
            subject_filter.reserved = subject_filter.recorded = reserved
            for kind, positions_of_lane in lanes:
                subject_filter.add_lane(kind, *_rows_at(store, positions_of_lane))
            subject_filter.begun.update(packed.get("begun", {}).get(ordinal, {}))
            if has_ended:
                self.unfollow([prefix])


def _rows_at(store: Store, positions: list[int]) -> tuple[list[int], list[int]]:
    """Return the row at each partition's position, and the positions; a partition may be new."""
    row_cursors = [
        part.consumer_log.row_at_position(positions[partition]) if partition < len(positions) else 0
        for partition, part in enumerate(store.partitions)
    ]
    return row_cursors, [*positions, *[0] * len(store.partitions)][: len(store.partitions)]


def _covering(filters: Mapping[str, SubjectFilter], prefix: str) -> SubjectFilter | None:
    end = 0
    while end < len(prefix):
        subject_filter = filters.get(prefix[:end])
        if subject_filter is not None:
            return subject_filter
        end = prefix.find(".", end) + 1 or len(prefix)
    return None


class GroupStart(NamedTuple):
    """The point where a group begins to follow: the rule for cursors; by partition the row to read from and its
    position; and the segment that is leaving then, whose messages are not for it.
    """

    start: StartRule
    row_cursors: list[int]
    positions: list[int]
    leaving: object = None


def _first_rows(store: Store) -> list[int]:
    return [part.consumer_log.first_row for part in store.partitions]


def _filter_positions(store: Store, subject_filter: SubjectFilter, visible: list[int]) -> list[int]:
    """Return the positions of the filter's row cursors.

    The position before is as good where a row would have to be read, or is gone: cursors tell what was handed out
    since. A filter that has begun behind a segment that is leaving keeps its positions: the segment may stay.
    """
    if subject_filter.begun_behind is not None and subject_filter.begun_behind is store.leaving:
        return list(subject_filter.positions)
    for partition, row in enumerate(subject_filter.row_cursors):
        part = store.partitions[partition]
        if row >= part.consumer_log.visible_row:
            subject_filter.positions[partition] = visible[partition]
            continue
        if row < part.consumer_log.first_row:
            continue
        with suppress(NotInMemory, StorageError):
            subject_filter.positions[partition] = part.consumer_log.read_entry(row)[1]
    return list(subject_filter.positions)


class ConsumerShare:
    """The part of its group's messages that one consumer may have, with what is known of subjects and ranges so far."""

    __slots__ = ("among", "is_all", "known", "prefixes", "subjects")

    def __init__(self, followed: Collection[str], prefixes: Iterable[str]) -> None:
        """The group follows *followed*, the consumer takes *prefixes* of that."""
        self.prefixes = frozenset(prefixes)
        self.among = len(followed)  # the share is made anew when the group follows more
        self.is_all = all(takes(self.prefixes, prefix) for prefix in followed)
        self.subjects: dict[int, bool] = {}  # by number: whether the consumer takes the subject
        #: By range, in order: counts of messages, and whether the consumer may have them.
        self.known = dict[MessageRange, list[tuple[int, bool]]]()


class Subscription:
    """One consumer of a group, or a solo consumer, on one connection."""

    __slots__ = (
        "asked", "connection", "consumer", "filters", "group", "epoch", "is_withdrawn", "member", "name", "number",
        "plain_at", "share", "turn", "unconfirmed",
    )  # fmt: skip

    def __init__(
        self, number: int, connection: int, consumer: str, group: Group, filters: list[SubjectFilter],
        asked: Sequence[str],
    ) -> None:  # fmt: skip
        """*asked*: the prefixes that the consumer named; *filters* are what its group follows of these."""
        self.number = number
        #: Connection, group, consumer and nonce, if it has one: a subscription with the same name replaces it.
        self.name: tuple[int, str, str, bytes] | None = None
        self.asked = asked
        self.connection = connection
        self.consumer = consumer
        self.group = group
        self.filters = filters
        self.turn = 0  # counts the pulls that got new messages
        #: The consumer in its group; None for a solo consumer, and in an at_most_once group.
        self.member: Member | None = None
        self.epoch = 0
        #: In an at_most_once group: the messages of the last answer, until the next pull says that it has arrived, and
        #: whether that answer's pull was withdrawn afterwards.
        self.unconfirmed = 0
        self.is_withdrawn = False
        #: The part of the group's retries that it may have; None until a pull needs it.
        self.share: ConsumerShare | None = None
        #: The version of the group's ledger at which its next pull was known to be plain; -1: never.
        self.plain_at = -1

    def note_plain(self, store: Store) -> None:
        """Note whether the consumer may get the next messages without a further question, until its group changes.

        It follows one prefix or subject, which has no other lanes than normal ones, the store has one partition, and
        the group has no retries and no settings that choose among messages or limit their time.
        """
        ledger, member = self.group.ledger, self.member
        if (
            ledger is not None
            and member is not None
            and member.is_there
            and member.epoch == self.epoch
            and not member.quarantined
            and len(self.filters) == 1
            and len(store.partitions) == 1
            and ledger.is_plain
            and not self.find_lanes(store)
        ):
            self.plain_at = ledger.version
        else:
            self.plain_at = -1

    def find_lanes(self, store: Store, since: int = 0, least: list[int] | None = None) -> bool:
        """Return whether there are subjects of other lanes than normal ones for it; see SubjectFilter.find_lanes."""
        if not store.subjects.has_lanes:
            return False
        found = [subject_filter.find_lanes(store, since, least) for subject_filter in self.filters]  # all of them look
        return any(found)

    def every_lane(self) -> list[SubjectFilter]:
        """Return its filters, with those of other lanes."""
        return [one for subject_filter in self.filters for one in subject_filter.with_lanes()]

    def in_turn(self) -> list[SubjectFilter]:
        """Return the filters, beginning with the one that the next pull begins with."""
        if len(self.filters) == 1:
            return self.filters
        turn = (self.turn + 1) % len(self.filters)
        return self.filters[turn:] + self.filters[:turn]

    @property
    def begins_with_order_keys(self) -> bool:
        """Whether the next pull takes messages with order keys before others of the normal priority: each of them
        comes first for as many pulls as there are filters.
        """
        return bool(self.turn // len(self.filters) % 2)


def check_followed(command: Subscribe, group: Group | None, most: int) -> None:
    """Raise InvalidOption if the group may not follow these prefixes as well; it has at most *most* of them."""
    prefixes = set(command.prefixes)
    if group is not None:
        _check_wider(command, group)
        prefixes |= group.filters.keys()
    check_count(command.group or "this consumer", prefixes, group, most)


def follows_none(group: Group, prefixes: Iterable[str]) -> InvalidOption:
    """Return the error for a consumer that asked for no subject that the group follows."""
    asked, follows = (", ".join(repr(prefix) for prefix in several) for several in (prefixes, group.outermost()))
    return InvalidOption(
        f"group {group.name} does not follow {asked:.400}, only {follows:.400}; "
        f"`qmq groups set {group.name} follows=...` changes that, and a new subscription that does not only look"
    )


def check_count(who: str, prefixes: set[str], group: Group | None, most: int) -> None:
    """Raise InvalidOption if the group may not follow just these prefixes, or has followed too many over time."""
    if len(prefixes) > most:
        raise InvalidOption(
            f"{who} would follow {len(prefixes)} prefixes and subjects, at most {most} are allowed; "
            "follow a prefix that takes many of them"
        )
    known = (
        len(prefixes.union(subject_filter.prefix for subject_filter in group.all_filters())) if group is not None else 0
    )
    if known > 2 * most:
        raise InvalidOption(
            f"{who} would have followed {known} prefixes and subjects over time, at most {2 * most} are kept; "
            "delete the group, or follow what it has followed before"
        )


def _check_wider(command: Subscribe, group: Group) -> None:
    """Raise InvalidOption for a wider prefix with a later start: it would skip ready messages of narrower ones."""
    if command.start in (None, "first"):
        return
    for prefix in set(command.prefixes) - group.filters.keys():
        if (prefix and not prefix.endswith(".")) or group.left_at(prefix) is not None:
            continue  # one subject, or a prefix that goes on where the group left it
        within = next((known for known in group.filters if known.startswith(prefix)), None)
        if within is not None:
            raise InvalidOption(
                f"group {group.name} follows {within!r} already, so the wider {prefix!r} can only start at "
                "'first': a later start would skip what the group has not taken yet; leave start out"
            )


def resolve_start(store: Store, start: str | tuple[str, int] | None, default: str) -> GroupStart:
    """Return where a subscription with that ``start`` begins. Raise NotInMemory."""
    rule, rows = _resolve(store, start, default)
    # A segment that is leaving may stay: then it begins in that after all.
    positions = [_position(store, partition, row) for partition, row in enumerate(rows)]
    offered = [max(row, part.offered_row) for row, part in zip(rows, store.partitions, strict=True)]
    return GroupStart(rule, offered, positions, store.leaving)


def _position(store: Store, partition: int, row: int) -> int:
    """Return a position that leads back to that row, also if it is behind all rows."""
    part = store.partitions[partition]
    if row <= part.consumer_log.first_row:
        return 0
    if row < part.consumer_log.visible_row:
        return part.consumer_log.read_entry(row)[1]
    return part.consumer_log.read_entry(row - 1)[1] + 1


def _resolve(store: Store, start: str | tuple[str, int] | None, default: str) -> tuple[StartRule, list[int]]:
    """Return the rule for cursors, and by partition the first row that is for it, also in a segment that is leaving."""
    partitions = range(len(store.partitions))
    subjects = store.subjects.count
    start = default if start is None else start
    if start == "new":
        start = ("time", 1 + max(_last_visible_stamp(store, partition) for partition in partitions))
        rows = [store.partitions[partition].consumer_log.visible_row for partition in partitions]
    elif start == "first":
        return StartRule("first", 0, subjects), _first_rows(store)
    elif start[0] == "sequence":
        assert isinstance(start, tuple)
        # A start may number subjects anew: messages of other partitions, and delayed ones, gave them their numbers.
        until_us = max(store.last_stored_at_us, 1)
        return StartRule("sequence", start[1], subjects, until_us), _first_rows(store)
    else:
        assert isinstance(start, tuple)
        # A time ahead of all stamps means the end, so that a prefix and a subject begin alike.
        last = max(_last_visible_stamp(store, partition) for partition in partitions)
        start = ("time", min(start[1], last + 1))
        rows = [store.partitions[partition].consumer_log.row_at_time(start[1]) for partition in partitions]
    assert isinstance(start, tuple)
    return StartRule("time", start[1], subjects), rows


def _last_visible_stamp(store: Store, partition: int) -> int:
    part = store.partitions[partition]
    visible = part.consumer_log.visible_row
    return part.consumer_log.read_entry(visible - 1)[2] if visible > part.consumer_log.first_row else 0
