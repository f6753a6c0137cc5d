"""The trace of a consumer: its own records of the pull log, found beside the loop, and their messages.

A consumer is meant by its id or by the name of its program, so several may be. The joins of the whole pull log say
which numbers these had; after that, only the records from the wanted time on are looked at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.find.trace.events import ACKED, DISPOSITIONS, HANDED_OUT, LEAVES
from qmq.broker.find.trace.places import id_of
from qmq.broker.find.trace.records import AT_ONCE, MOST_DECODED, Consumer, Decoded, consumers_of, table_of, with_heads
from qmq.broker.groups.group import Group
from qmq.broker.groups.message_ranges import RunPart, parts_of
from qmq.broker.journal.record_bytes import HANDED, unpack
from qmq.broker.journal.record_types import LeaveReason, MessageRange, RecordKind, unflat
from qmq.format.private import origin_subject
from qmq.net.protocol.types import Disposition
from qmq.storage.store import PullLogScan, PullPiece, Store

JOINED: Final = "joined"
#: The most events of one answer, the last ones.
MOST_CONSUMER_EVENTS: Final = 1_000
#: Rows of one event: those of one subject that follow each other are one.
MOST_ROWS_AN_EVENT: Final = 32

#: Records whose second field is the consumer; in others the numbers come before it.
_DELIVERIES: Final = (*HANDED, RecordKind.ACK)
_OF_CONSUMERS: Final = table_of(*_DELIVERIES, RecordKind.BACK, RecordKind.LEAVE, RecordKind.PART)

_FIRST = itemgetter(0)


class _Given(NamedTuple):
    """Delivery sequences [first, end) of a consumer, and their messages."""

    first: int
    end: int
    messages: MessageRange
    attempt: int


class ConsumerRecord(NamedTuple):
    """A record of a consumer of a group: its position, what happened, when, and to which messages, with their attempts.
    ``unknown`` is the count of further messages, which were handed out before the records that were read.
    """

    position: int
    kind: str
    time_us: int
    group: int
    consumer: str
    ranges: tuple[tuple[MessageRange, int], ...] = ()
    unknown: int = 0
    reason: str = ""


class _Join(NamedTuple):
    position: int
    group: int
    next_number: int
    name: str
    now_us: int
    program: str


class ConsumerScan:
    """Reads the pull log for one consumer, in a thread, a file at a step."""

    #: It is a read of no partition, and has a thread of its own.
    partition = -1

    def __init__(
        self, joins: PullLogScan, files: PullLogScan, name: str, members: Mapping[Consumer, str], since_us: int,
        limit: int,
    ) -> None:  # fmt: skip
        """*joins* reads all of the pull log, *files* that from *since_us* on. *members* are the consumers that the
        groups have now and that are meant by *name*, with their ids.
        """
        self._joins: PullLogScan | None = joins
        self._files = files
        self._name = name
        self._since_us = since_us
        self._limit = limit
        #: The consumers that are meant, with their ids.
        self.names = dict(members)
        self.events = list[ConsumerRecord]()
        #: Some records were not decoded, or are kept no more.
        self.is_partial = False
        self._all_joins = list[_Join]()
        self._given: defaultdict[Consumer, list[_Given]] = defaultdict(list)
        self._keys: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._decoded = Decoded()

    def step(self) -> bool:
        """[thread] Look at the next file; return whether there may be more. Raises StorageFailed."""
        files = self._files if self._joins is None else self._joins
        if files.upcoming() is None:
            if self._joins is None:
                self.is_partial |= self._files.is_partial and self._since_us > 0
                self._keep_last()
                return False
            self._joins = None
            self._find_numbers()
            return bool(self.names)
        piece = files.next()
        if piece is None:
            return True
        for start in range(0, len(piece.offsets), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            part = piece._replace(offsets=piece.offsets[some], kinds=piece.kinds[some])
            if self._joins is not None:
                self._note_joins(part)
            else:
                self._look(part)
            if self._decoded.count > MOST_DECODED:
                self.is_partial = True
                self._keep_last()
                return False
        return True

    def _decode(self, piece: PullPiece, offset: int) -> tuple[list[Any] | None, int, int]:
        self._decoded.note(piece, offset)
        record = piece.record(offset)
        if record is None:
            return None, 0, 0
        kind, fields = unpack(record.kind, record.payload)
        return fields, record.position, kind

    # --- who it was ---------------------------------------------------------------------------------------------------

    def _note_joins(self, piece: PullPiece) -> None:
        for offset in piece.offsets[piece.kinds == RecordKind.JOIN].tolist():
            fields, position, _ = self._decode(piece, offset)
            if fields is not None:
                group, numbers, name, _, _, now_us, *_, program = fields
                self._all_joins.append(_Join(position, group, numbers[0], name, now_us, program))

    def _find_numbers(self) -> None:
        """Find the numbers of the consumers: the last join at which a number was the next one made the consumer."""
        self._decoded = Decoded()
        makers = {(join.group, join.next_number): join.name for join in self._all_joins}
        meant = {(join.group, join.name) for join in self._all_joins if self._name in (join.name, join.program)}
        for consumer, name in makers.items():
            if (consumer[0], name) in meant:
                self.names[consumer] = name
        for join in self._all_joins:
            if (join.group, join.name) in meant:
                self._add(
                    ConsumerRecord(join.position, JOINED, join.now_us, join.group, join.name, reason=join.program)
                )
        self._all_joins.clear()
        self._keys = np.array(sorted(group << 32 | number for group, number in self.names), np.uint64)

    # --- what it did --------------------------------------------------------------------------------------------------

    def _look(self, piece: PullPiece) -> None:
        """Look at some records of a file."""
        offsets, likely = with_heads(piece, _OF_CONSUMERS)
        likely += offsets[np.isin(consumers_of(piece, offsets), self._keys)].tolist()
        for offset in sorted(likely):
            fields, position, kind = self._decode(piece, offset)
            if fields is not None and (fields[0], fields[1 if kind in _DELIVERIES else 2]) in self.names:
                self._take(fields, position, kind)

    def _take(self, fields: list[Any], position: int, kind: int) -> None:
        match kind:
            case RecordKind.PULL | RecordKind.PASSED | RecordKind.AGAIN:
                group, number, first, _, now_us, *rest = fields
                if kind == RecordKind.AGAIN:
                    several = [(MessageRange(*one[1:7]), one[7]) for one in rest[1]]
                elif not (ranges := unflat(rest[kind == RecordKind.PASSED])):
                    return  # a pull that only passed messages
                else:
                    several = [(messages, 1) for messages in ranges]
                for messages, attempt in several:
                    given = _Given(first, first + messages.total, messages, attempt)
                    self._given[group, number].append(given)
                    first = given.end
                name = self.names[group, number]
                self._add(ConsumerRecord(position, HANDED_OUT, now_us, group, name, tuple(several)))
            case RecordKind.ACK:
                group, number, now_us, numbers = fields
                intervals = list(zip(numbers[::2], numbers[1::2], strict=True))
                self._settle(position, ACKED, now_us, (group, number), intervals)
            case RecordKind.BACK:
                group, _, number, rows, reasons, now_us = fields
                by_reason: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
                for start, end, disposition, _, reason in rows:
                    by_reason[disposition, reasons[reason]].append((start, end))
                for (disposition, reason), intervals in by_reason.items():
                    event = DISPOSITIONS[Disposition(disposition)]
                    self._settle(position, event, now_us, (group, number), intervals, reason)
            case _:
                group, _, number, why = fields[:4]
                if why in LEAVES and kind == RecordKind.LEAVE:
                    name = self.names[group, number]
                    self._add(ConsumerRecord(position, LEAVES[LeaveReason(why)], fields[4], group, name))

    def _settle(
        self, position: int, kind: str, now_us: int, consumer: Consumer, intervals: list[tuple[int, int]],
        reason: str = "",
    ) -> None:  # fmt: skip
        if now_us < self._since_us:
            return
        ranges, unknown, given = list[tuple[MessageRange, int]](), 0, self._given[consumer]
        for start, end in intervals:
            count = 0
            for one in given[max(bisect_right(given, start, key=_FIRST) - 1, 0) :]:
                if one.first >= end:
                    break
                low, high = max(start, one.first), min(end, one.end)
                if low < high:
                    ranges.append((one.messages.part(low - one.first, high - one.first), one.attempt))
                    count += high - low
            unknown += end - start - count
        group, name = consumer[0], self.names[consumer]
        self._add(ConsumerRecord(position, kind, now_us, group, name, tuple(ranges), unknown, reason))

    def _add(self, event: ConsumerRecord) -> None:
        if event.time_us >= self._since_us:
            self.events.append(event)
            if len(self.events) > 2 * self._limit:
                self._keep_last()

    def _keep_last(self) -> None:
        """Keep the last events, in order."""
        self.events.sort(key=_FIRST)
        if len(self.events) > self._limit:
            del self.events[: -self._limit]
            self.is_partial = True


def rows_of(
    store: Store, group: Group, event: ConsumerRecord
) -> list[tuple[str | None, int | None, int, int, str | None]]:
    """Return the messages of an event: subject, first sequence, count, attempt, and the id of the first, each; of
    messages that are not kept, or too many, only their count. Raises NotInMemory and StorageError.
    """
    rows = list[tuple[str | None, int | None, int, int, str | None]]()
    gone = event.unknown
    for messages, attempt in event.ranges:
        gone += messages.total
        for part in _runs_of(store, group, messages):
            name, count = origin_subject(store.subjects.name(part.entry[3])), part.stop - part.start
            sequence = part.entry[0] + part.start
            if rows and rows[-1][0] == name and rows[-1][3] == attempt:
                _, first, before, _, message_id = rows[-1]
                if first is not None and first + before == sequence:
                    rows[-1] = name, first, before + count, attempt, message_id
                    gone -= count
                    continue
            if len(rows) < MOST_ROWS_AN_EVENT:
                rows.append((name, sequence, count, attempt, id_of(store, part.partition, part.entry, part.start)))
                gone -= count
    if gone or not rows:
        rows.append((None, None, gone, 0, None))
    return rows


def _runs_of(store: Store, group: Group, messages: MessageRange) -> Iterator[RunPart]:
    for part in parts_of(store, group, messages):
        if isinstance(part, RunPart):
            yield part
        else:
            for entry in part.rows.tolist():
                yield RunPart(part.partition, entry, 0, entry[4])
