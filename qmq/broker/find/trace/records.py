"""The records of the pull log that may concern one message, found beside the loop.

Whole files are looked at as columns. Records that may name the message are checked and decoded one by one: those that
hand out a range around it, and of the consumers that got such a range the acks, nacks and leaves around their delivery
sequences. What exactly concerns the message is decided in the loop (events.py), since that may need rows of the log.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.find.trace.places import MessagePlace, may_have
from qmq.broker.groups.message_ranges import PARTITIONS
from qmq.broker.journal.record_bytes import HANDED, OF_VERSION_2, unpack
from qmq.broker.journal.record_types import LeaveReason, MessageRange, RecordKind, unflat
from qmq.format.layout import (
    PULL_HANDED_DTYPE,
    PULL_HANDED_SIZE,
    PULL_HEAD_DTYPE,
    PULL_HEADED_KINDS,
    PULL_MANY,
    PULL_RANGE_DTYPE,
    PULL_RANGE_SIZE,
)
from qmq.net.protocol.types import Disposition
from qmq.storage.store import KIND_OFFSET, PullLogScan, PullPiece

Numbers = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]

#: Records of one trace that are decoded; behind that it lacks events. As many of version 2 count as one of them, since
#: these have no heads, and all are decoded.
MOST_DECODED: Final = 200_000
OLD_AS_ONE: Final = 10
#: Records that are looked at as columns: each operation on them takes less than the interpreter's switch interval.
AT_ONCE: Final = 8_192
#: Ranges of a record that are compared as columns; a record with more of them is decoded.
_RANGES_IN_STEP: Final = 4
#: Consumers whose ranges are compared as columns, and the bits of a delivery sequence in that.
_MOST_CONSUMERS: Final = 1 << 16
_SEQUENCE_BITS: Final = np.uint64(48)
_LAST_SEQUENCE: Final = np.uint64((1 << 48) - 1)


def table_of(*kinds: RecordKind) -> npt.NDArray[np.bool_]:
    """Return which kinds of records these are, also by their numbers in version 2: bool[256]."""
    table = np.zeros(256, np.bool_)
    table[list(kinds)] = True
    table[[old for old, kind in OF_VERSION_2.items() if kind in kinds]] = True
    return table


_BRINGS: Final = table_of(RecordKind.OVER, RecordKind.RESTORED, RecordKind.RESENT)
_LETTERS: Final = table_of(RecordKind.REDRIVE, RecordKind.FORGET)
#: Read whatever messages they are of.
_OTHERS: Final = _BRINGS | _LETTERS | table_of(RecordKind.JOIN, RecordKind.SEEK)
_GIVES: Final = table_of(*HANDED)
_ACKS: Final = table_of(RecordKind.ACK)
_RETURNS: Final = table_of(RecordKind.BACK, RecordKind.LEAVE, RecordKind.PART)

#: Dispositions that may make dead letters.
_MAY_BURY: Final = (Disposition.NACK, Disposition.REJECT)

#: A consumer of a group, by their numbers.
Consumer = tuple[int, int]


class GivenRange(NamedTuple):
    """A range that a consumer was given, from a delivery sequence on; ``position`` is that of the record."""

    position: int
    consumer: Consumer
    first: int
    messages: MessageRange
    attempt: int
    now_us: int
    session_expiries: int = 0


class PassedRange(NamedTuple):
    """A range that a pull passed. With *has_others* the record does not say which of its messages were filtered: others
    were skipped, or handed out by an at-most-once group. Without, all were that no consumer got by the same record.
    """

    position: int
    messages: MessageRange
    now_us: int
    has_others: bool


class Settled(NamedTuple):
    """Delivery sequences [start, end) of a consumer that were acked (no disposition) or handed back."""

    position: int
    start: int
    end: int
    disposition: Disposition | None
    reason: str
    now_us: int
    #: The number of the first dead letter that the record may have made, and of the last one by the message at *start*.
    first_letter: int = 0
    last_letter: int = 0


class LostHold(NamedTuple):
    """A consumer left, or its session expired: all its messages in flight before a delivery sequence came back."""

    position: int
    end: int
    why: int
    now_us: int
    #: The number of the first dead letter that the record may have made.
    first_letter: int


class Brought(NamedTuple):
    """A range that came to a group as retries: by a handover from another broker, a restore or a resend."""

    position: int
    group: int
    messages: MessageRange
    kind: RecordKind
    attempt: int
    reason: str
    now_us: int
    #: The number of the dead letter that a handover may have made.
    letter: int = 0


class ChangedLetters(NamedTuple):
    """Dead letters of a group were redriven or deleted: these numbers, ascending."""

    position: int
    kind: RecordKind
    numbers: Sequence[int]
    now_us: int

    def has_any(self, first: int, last: int) -> bool:
        """Return whether a number from *first* to *last* is among them."""
        at = bisect_left(self.numbers, first)
        return at < len(self.numbers) and self.numbers[at] <= last


class Sought(NamedTuple):
    """A group was set to another place: nothing stays in flight, and with ``clears`` nothing in retry."""

    position: int
    start: list[Any]
    clears: bool
    now_us: int


class Decoded:
    """Counts the records that are decoded."""

    def __init__(self) -> None:
        self._count = 0  # in parts of OLD_AS_ONE

    @property
    def count(self) -> int:
        """How many they are."""
        return self._count // OLD_AS_ONE

    def note(self, piece: PullPiece, offset: int) -> None:
        """Count one."""
        self._count += 1 if int(piece.octets[offset + KIND_OFFSET]) in OF_VERSION_2 else OLD_AS_ONE


class FoundRecords:
    """The decoded records, by consumer and group."""

    def __init__(self) -> None:
        self.given: defaultdict[int, list[GivenRange]] = defaultdict(list)  # by group
        self.passed: defaultdict[int, list[PassedRange]] = defaultdict(list)  # by group
        self.settled: defaultdict[Consumer, list[Settled]] = defaultdict(list)
        self.departed: defaultdict[Consumer, list[LostHold]] = defaultdict(list)
        self.brought: defaultdict[int, list[Brought]] = defaultdict(list)  # by group
        self.letters: defaultdict[int, list[ChangedLetters]] = defaultdict(list)  # by group
        self.sought: defaultdict[int, list[Sought]] = defaultdict(list)  # by group
        self.names: dict[Consumer, str] = {}
        self.decoded = Decoded()
        #: Some records were not decoded, or are kept no more.
        self.is_partial = False


class FileFacts(NamedTuple):
    """Facts of a file of the pull log whose bytes stay as they are: whether a message may have been handed out in it
    follows from them, and they have the places of the few records that a trace always reads.
    """

    #: The least position of a range by position.
    first: int
    #: The numbers of the subjects that ranges by sequence are of.
    subjects: frozenset[int]
    others: Offsets


#: Facts of so many files are remembered, with at most so many subjects and other records each.
MOST_FACTS: Final = 4_096
_MOST_NOTED: Final = 1_024


class _FactsSoFar:
    """Collects the facts of the file that is being looked at."""

    def __init__(self) -> None:
        self.first = 1 << 64
        self.subjects = set[int]()
        self.others = list[Offsets]()

    def add(self, first: Numbers, log: Numbers, by_position: npt.NDArray[np.bool_]) -> None:
        """Note ranges."""
        if by_position.all():
            self.first = min(self.first, int(first.min(initial=(1 << 64) - 1)))
        else:
            self.first = min(self.first, int(first[by_position].min(initial=(1 << 64) - 1)))
            if len(self.subjects) <= _MOST_NOTED:
                self.subjects.update(np.unique(log[~by_position]).tolist())

    def note(self, messages: MessageRange) -> None:
        """Note a range of a record that was decoded."""
        if messages.log >= PARTITIONS:
            self.first = min(self.first, messages.first)
        else:
            self.subjects.add(messages.log)

    def facts(self) -> FileFacts | None:
        """Return the facts; None where they are too many."""
        others = np.concatenate(self.others) if self.others else np.empty(0, np.int64)
        if len(others) > _MOST_NOTED or len(self.subjects) > _MOST_NOTED:
            return None
        return FileFacts(self.first, frozenset(self.subjects), others)


def with_heads(piece: PullPiece, kinds: npt.NDArray[np.bool_]) -> tuple[Offsets, list[int]]:
    """Return the offsets of the records of these kinds that have heads, and of those that have none: of version 2."""
    offsets, has_head = piece.offsets[kinds[piece.kinds]], piece.kinds[kinds[piece.kinds]] >= PULL_HEADED_KINDS
    old: list[int] = offsets[~has_head].tolist()
    return offsets[has_head], old


def consumers_of(piece: PullPiece, offsets: Offsets) -> Numbers:
    """Return the keys of the consumers of records with heads: the group's number, and in the low 32 bits its own."""
    group = piece.field(PULL_HEAD_DTYPE, "group", offsets)
    return group << np.uint64(32) | piece.field(PULL_HEAD_DTYPE, "consumer", offsets)


class RecordScan:
    """Reads the pull log for one message, in a thread, a file at a step."""

    #: It is a read of no partition, and has a thread of its own.
    partition = -1

    def __init__(self, files: PullLogScan, places: list[MessagePlace], facts: dict[int, FileFacts]) -> None:
        """*facts* are those of files that were looked at before, by base; the scan adds to them."""
        self._files = files
        self._facts = facts
        self._so_far = _FactsSoFar()
        self._places = places
        self.found = FoundRecords()
        #: Files that were not read, by what was known of them.
        self.skipped = 0
        self._positions = np.array(sorted({place.entry[1] for place in places}), np.uint64)
        self._last_position = self._positions.max(initial=0)
        self._subjects = np.array(sorted({place.entry[3] for place in places}), np.uint64)
        #: The consumers that got ranges which may have the message, and the delivery sequences of these ranges that no
        #: ack has had yet.
        self._consumers: defaultdict[Consumer, list[tuple[int, int]]] = defaultdict(list)
        #: The keys of these consumers, ascending; and their intervals, each with the place of its consumer among them.
        self._keys = self._places_of = self._lows = self._highs = np.empty(0, np.uint64)
        #: The bounds of all intervals.
        self._first_sequence = self._last_sequence = np.uint64(0)
        self._settled = 0  # consumers whose ranges were all acked since the columns were made

    def step(self) -> bool:
        """[thread] Look at the next file; return whether there may be more. Raises StorageFailed."""
        upcoming = self._files.upcoming()
        if upcoming is None:
            self.found.is_partial |= self._files.is_partial
            return False
        base, stays = upcoming
        known = self._facts.get(base)
        if known is not None and self._is_of_others(known):
            if not len(known.others):
                self._files.skip()
                self.skipped += 1
                return True
            piece = self._files.next(known.others)
        else:
            piece, known = self._files.next(), None
        if piece is None:
            return True
        self._so_far = _FactsSoFar()
        for start in range(0, len(piece.offsets), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            self._look(piece._replace(offsets=piece.offsets[some], kinds=piece.kinds[some]))
            if self.found.decoded.count > MOST_DECODED:
                self.found.is_partial = True
                return False
        facts = self._so_far.facts() if stays and known is None else None
        if facts is not None:
            if len(self._facts) >= MOST_FACTS:
                self._facts.clear()
            self._facts[base] = facts
        return True

    def _is_of_others(self, facts: FileFacts) -> bool:
        """Return whether a file has no range that may have the message, and nothing of those found before it."""
        return (
            not self._consumers
            and facts.first > int(self._last_position)
            and not any(int(subject) in facts.subjects for subject in self._subjects)
        )

    def _look(self, piece: PullPiece) -> None:
        """Look at some records of a file."""
        others = piece.offsets[_OTHERS[piece.kinds]]
        if len(others):
            self._so_far.others.append(others)
        self._find_given(piece)
        self._find_brought(piece)
        self._find_joins(piece)
        self._find_changes(piece)
        if self._consumers:
            acked = self._find_acks(piece)
            self._find_returns(piece)
            self._settle(acked)

    # --- ranges that were handed out ----------------------------------------------------------------------------------

    def _find_given(self, piece: PullPiece) -> None:
        offsets, likely = with_heads(piece, _GIVES)
        several = piece.field(PULL_HANDED_DTYPE, "ranges", offsets)
        likely += self._likely(piece, PULL_HANDED_DTYPE, offsets[several == 0])
        likely += offsets[several > _RANGES_IN_STEP].tolist()
        for number in range(min(int(several.max(initial=0)), _RANGES_IN_STEP)):
            skip = PULL_HANDED_SIZE + number * PULL_RANGE_SIZE
            likely += self._likely(piece, PULL_RANGE_DTYPE, offsets[several > number], skip)
        if not likely:
            return
        for offset in sorted(set(likely)):
            for given in self._given_by(piece, offset):
                self.found.given[given.consumer[0]].append(given)
                self._consumers[given.consumer].append((given.first, given.first + given.messages.total))
        self._make_columns()

    def _make_columns(self) -> None:
        """Make columns of the consumers and their ranges."""
        self._settled = 0
        consumers = sorted(self._consumers)[:_MOST_CONSUMERS]
        self.found.is_partial |= len(consumers) < len(self._consumers)
        self._keys = np.array([_key(consumer) for consumer in consumers], np.uint64)
        rows = [
            (place, *interval)
            for place, consumer in enumerate(consumers)
            for interval in sorted(self._consumers[consumer])
        ]
        places, lows, highs = np.array(rows, np.uint64).reshape(-1, 3).T
        self._lows, self._highs = lows, _ordered(places, highs)
        self._places_of = places
        self._first_sequence, self._last_sequence = lows.min(initial=_LAST_SEQUENCE), highs.max(initial=0)

    def _likely(self, piece: PullPiece, dtype: np.dtype[np.void], offsets: Offsets, skip: int = 0) -> list[int]:
        """Return the offsets of the records of which a range may have the message, by one of its places. The range is
        what *dtype* is, or what the head stands for: with nothing skipped, and of one batch.
        """
        log, first = piece.field(dtype, "log", offsets, skip), piece.field(dtype, "first", offsets, skip)
        by_position = log >= PARTITIONS
        self._so_far.add(first, log, by_position)
        may = by_position & (first <= self._last_position)
        if not by_position.all():
            may |= np.isin(log, self._subjects)
        at = np.flatnonzero(may)
        log, first, by_position, offsets = log[at], first[at], by_position[at], offsets[at]
        is_range = dtype is PULL_RANGE_DTYPE
        end = piece.field(dtype, "end", offsets, skip) if is_range else first
        between = np.searchsorted(self._positions, end, "right") > np.searchsorted(self._positions, first, "left")
        found = by_position & between
        by_sequence = np.flatnonzero(~by_position)
        of_these, number = offsets[by_sequence], log[by_sequence]
        start, count = first[by_sequence], piece.field(dtype, "count", of_these, skip)
        if is_range:
            start = start + piece.field(dtype, "skip", of_these, skip)
        for place in self._places:
            has = (number == place.entry[3]) & (start <= place.sequence) & (place.sequence < start + count)
            found[by_sequence] |= has
        likely: list[int] = offsets[found].tolist()
        return likely

    def _given_by(self, piece: PullPiece, offset: int) -> list[GivenRange]:
        fields, position, kind = self._decode(piece, offset)
        if fields is None:
            return []
        number, consumer, first, _, now_us, *rest = fields
        who, given = (number, consumer), list[GivenRange]()
        if kind == RecordKind.PULL:
            several = [(messages, 1, 0) for messages in unflat(rest[0])]
        elif kind == RecordKind.PASSED:
            ranges, handed, filtered, skipped, _ = rest
            several, passed = [(messages, 1, 0) for messages in unflat(handed)], unflat(ranges)
            has_others = skipped > 0 or (not consumer and filtered < sum(messages.total for messages in passed))
            self._note_passed(number, position, passed, now_us, has_others=has_others)
        else:
            several = [(MessageRange(*one[1:7]), one[7], one[8]) for one in rest[1]]
        for messages, attempt, expiries in several:
            self._so_far.note(messages)
            if any(may_have(messages, place) for place in self._places):
                given.append(GivenRange(position, who, first, messages, attempt, now_us, expiries))
            first += messages.total
        return given

    def _note_passed(
        self, group: int, position: int, ranges: list[MessageRange], now_us: int, *, has_others: bool
    ) -> None:  # fmt: skip
        """Note ranges that a pull passed, and in which messages were filtered."""
        for messages in ranges:
            self._so_far.note(messages)
            if any(may_have(messages, place) for place in self._places):
                self.found.passed[group].append(PassedRange(position, messages, now_us, has_others))

    def _decode(self, piece: PullPiece, offset: int) -> tuple[list[Any] | None, int, int]:
        """Return the fields of a record (None where these bytes are no record), its position and its kind."""
        self.found.decoded.note(piece, offset)
        record = piece.record(offset) if self.found.decoded.count <= MOST_DECODED else None
        if record is None:
            return None, 0, 0
        kind, fields = unpack(record.kind, record.payload)
        return fields, record.position, kind

    # --- ranges that came as retries, and joins ----------------------------------------------------------------------

    def _find_brought(self, piece: PullPiece) -> None:
        for offset in piece.offsets[_BRINGS[piece.kinds]].tolist():
            fields, position, kind = self._decode(piece, offset)
            if fields is None:
                continue
            group, letter = fields[0], 0
            if kind == RecordKind.OVER:
                ranges, attempt, reason, now_us = [MessageRange(*fields[2])], fields[3], fields[5], fields[7]
                letter = fields[1][2]
            else:
                ranges, attempt, reason, now_us = (
                    unflat(fields[2 if kind == RecordKind.RESTORED else 7]),
                    1,
                    "",
                    fields[-1],
                )
            for messages in ranges:
                if any(may_have(messages, place) for place in self._places):
                    brought = Brought(position, group, messages, RecordKind(kind), attempt, reason, now_us, letter)
                    self.found.brought[group].append(brought)

    def _find_joins(self, piece: PullPiece) -> None:
        """Note the names of consumers: the last join at which a number was the next one made the consumer. A takeover
        may expire the session of the one before.
        """
        for offset in piece.offsets[piece.kinds == RecordKind.JOIN].tolist():
            fields, position, _ = self._decode(piece, offset)
            if fields is None:
                continue
            group, numbers, name, _, _, now_us, _, _, _, expired = fields[:10]
            self.found.names[group, numbers[0]] = name
            if expired:
                left = LostHold(position, 1 << 64, LeaveReason.EXPIRED, now_us, numbers[2])
                self.found.departed[group, expired].append(left)

    def _find_changes(self, piece: PullPiece) -> None:
        """Note which dead letters were redriven or deleted, and where groups were set to another place."""
        for offset in piece.offsets[_LETTERS[piece.kinds]].tolist():
            fields, position, kind = self._decode(piece, offset)
            if fields is not None:
                group, _, numbers, now_us = fields
                changed = ChangedLetters(position, RecordKind(kind), _compact(numbers), now_us)
                self.found.letters[group].append(changed)
        for offset in piece.offsets[piece.kinds == RecordKind.SEEK].tolist():
            fields, position, _ = self._decode(piece, offset)
            if fields is not None:
                group, start, _, clears, now_us = fields
                self.found.sought[group].append(Sought(position, start, clears, now_us))

    # --- what became of them -----------------------------------------------------------------------------------------

    def _of_consumers(self, keys: Numbers) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """Return which records are of a known consumer, and for each where that is among the known ones. *keys* are
        those of the records' consumers.
        """
        at = np.searchsorted(self._keys, keys)
        at[at == len(self._keys)] = 0
        return self._keys[at] == keys, at

    def _overlap(self, at: npt.NDArray[np.intp], start: Numbers, end: Numbers) -> npt.NDArray[np.bool_]:
        """Return which [start, end) have delivery sequences of a range of the consumer at *at*. Ranges do not overlap,
        so the first one that ends behind *start* decides.
        """
        places = at.astype(np.uint64)
        behind = np.searchsorted(self._highs, _ordered(places, start), "right")
        is_there = behind < len(self._lows)
        behind[~is_there] = 0
        found: npt.NDArray[np.bool_] = is_there & (self._places_of[behind] == places) & (self._lows[behind] < end)
        return found

    def _has(self, consumer: Consumer, start: int, end: int) -> bool:
        """Return whether [start, end) has delivery sequences of a range of a consumer."""
        return any(low < end and start < high for low, high in self._consumers.get(consumer, ()))

    def _of_ranges(self, piece: PullPiece, kinds: npt.NDArray[np.bool_]) -> list[int]:
        """Return the offsets of the records of these kinds whose heads are of the ranges that were found; those without
        a count are of all that their consumer has.
        """
        offsets, likely = with_heads(piece, kinds)
        start, count = piece.field(PULL_HEAD_DTYPE, "sequence", offsets), piece.field(PULL_HEAD_DTYPE, "count", offsets)
        end = np.where((count == 0) | (count == PULL_MANY), _LAST_SEQUENCE, start + count)
        start[count == 0] = 0
        # Most acks are of other messages than any of the ranges that were found, whoever has them.
        near = np.flatnonzero((start < self._last_sequence) & (end > self._first_sequence))
        known, at = self._of_consumers(consumers_of(piece, offsets[near]))
        near, at = near[known], at[known]
        likely += offsets[near[self._overlap(at, start[near], end[near])]].tolist()
        return sorted(likely)

    def _find_acks(self, piece: PullPiece) -> list[tuple[Consumer, int, int]]:
        """Find the acks of these ranges; return what they had of whom."""
        acked = list[tuple[Consumer, int, int]]()
        for offset in self._of_ranges(piece, _ACKS):
            fields, position, _ = self._decode(piece, offset)
            if fields is None:
                continue
            group, consumer, now_us, numbers = fields
            for first, behind in zip(numbers[::2], numbers[1::2], strict=True):
                if self._has((group, consumer), first, behind):
                    self.found.settled[group, consumer].append(Settled(position, first, behind, None, "", now_us))
                    acked.append(((group, consumer), first, behind))
        return acked

    def _settle(self, acked: list[tuple[Consumer, int, int]]) -> None:
        """Look no more for delivery sequences [start, end) of consumers: no later record ends what was acked."""
        for consumer, start, end in acked:
            left = list[tuple[int, int]]()
            for low, high in self._consumers.get(consumer, ()):
                left += [(one, two) for one, two in ((low, min(high, start)), (max(low, end), high)) if one < two]
            if left:
                self._consumers[consumer] = left
            else:
                self._settled += self._consumers.pop(consumer, None) is not None
        if self._settled > len(self._consumers):  # half of them: making columns again pays
            self._make_columns()

    def _find_returns(self, piece: PullPiece) -> None:
        """Find what consumers handed back, and which of them left."""
        for offset in self._of_ranges(piece, _RETURNS):
            fields, position, kind = self._decode(piece, offset)
            if fields is None:
                continue
            who = fields[0], fields[2]
            if kind == RecordKind.BACK:
                rows, reasons, now_us = fields[3:]
                letter = before = fields[1][2]
                for first, behind, disposition, _, reason in rows:
                    how = Disposition(disposition)
                    if self._has(who, first, behind):
                        numbers = (letter, before) if how in _MAY_BURY else (0, 0)
                        settled = Settled(position, first, behind, how, reasons[reason], now_us, *numbers)
                        self.found.settled[who].append(settled)
                    if how in _MAY_BURY:
                        before += behind - first  # as many letters at most
                        letter += behind - first if how == Disposition.REJECT else 0
            elif kind == RecordKind.LEAVE:
                self.found.departed[who].append(LostHold(position, 1 << 64, fields[3], fields[4], fields[1][2]))
            else:
                self.found.departed[who].append(LostHold(position, fields[4], fields[3], fields[5], fields[1][2]))


def _compact(numbers: list[int] | None) -> Sequence[int]:
    """Return ascending numbers in little memory; None stands for all of them."""
    if numbers is None:
        return range(1, 1 << 62)
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return range(numbers[0], numbers[-1] + 1)
    return array("Q", numbers)


def _ordered(places: Numbers, sequences: Numbers) -> Numbers:
    """Return numbers that are in order of the places, then of the delivery sequences."""
    return (places << _SEQUENCE_BITS) | np.minimum(sequences, _LAST_SEQUENCE)


def _key(consumer: Consumer) -> int:
    return (consumer[0] << 32) | consumer[1]
