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

import msgpack
import numpy as np
import numpy.typing as npt

from qmq.broker.find.trace.columns import FieldWalk, Numbers, Offsets, PieceBytes
from qmq.broker.find.trace.places import MessagePlace, may_have
from qmq.broker.groups.message_ranges import PARTITIONS
from qmq.broker.journal.record_types import LeaveReason, MessageRange, RecordKind, unflat
from qmq.net.protocol.types import Disposition
from qmq.storage.store import PullLogScan, PullPiece

#: Records of one trace that are decoded; behind that it lacks events.
MOST_DECODED: Final = 200_000
#: Records that are looked at as columns: each operation on them takes less than the interpreter's switch interval.
AT_ONCE: Final = 8_192
#: Ranges of a record that are compared as columns; a record with more of them is decoded.
_RANGES_IN_STEP: Final = 4
#: Consumers whose ranges are compared as columns, and the bits of a delivery sequence in that.
_MOST_CONSUMERS: Final = 1 << 16
_SEQUENCE_BITS: Final = np.uint64(48)
_LAST_SEQUENCE: Final = np.uint64((1 << 48) - 1)
_RANGE_FIELDS: Final = 6


def _table(*kinds: RecordKind) -> npt.NDArray[np.bool_]:
    """Return which kinds of records these are: bool[256]."""
    table = np.zeros(256, np.bool_)
    table[list(kinds)] = True
    return table


_BRINGS: Final = _table(RecordKind.OVER, RecordKind.RESTORED, RecordKind.RESENT)
_LETTERS: Final = _table(RecordKind.REDRIVE, RecordKind.FORGET)
#: Read whatever messages they are of.
_OTHERS: Final = _BRINGS | _LETTERS | _table(RecordKind.JOIN, RecordKind.SEEK)
_RETURNS: Final = _table(RecordKind.BACK, RecordKind.LEAVE, RecordKind.PART)

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
        self.decoded = 0
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
        data, self._so_far = PieceBytes(piece), _FactsSoFar()
        for start in range(0, len(piece.offsets), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            self._look(piece._replace(offsets=piece.offsets[some], kinds=piece.kinds[some]), data)
            if self.found.decoded > MOST_DECODED:
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

    def _look(self, piece: PullPiece, data: PieceBytes) -> None:
        """Look at some records of a file."""
        others = piece.offsets[_OTHERS[piece.kinds]]
        if len(others):
            self._so_far.others.append(others)
        self._find_given(piece, data)
        self._find_brought(piece)
        self._find_joins(piece)
        self._find_changes(piece)
        if self._consumers:
            acked = self._find_acks(piece, data)
            self._find_returns(piece, data)
            self._settle(acked)

    # --- ranges that were handed out ----------------------------------------------------------------------------------

    def _find_given(self, piece: PullPiece, data: PieceBytes) -> None:
        pulls = FieldWalk(data, piece.offsets[piece.kinds == RecordKind.PULL])
        pulls.pass_octets(1)
        pulls.pass_numbers(5)
        counts = pulls.counts() // _RANGE_FIELDS
        likely = self._brackets(pulls, counts, before=0, after=0)
        passed = FieldWalk(data, piece.offsets[piece.kinds == RecordKind.PASSED])
        passed.pass_octets(1)
        passed.pass_numbers(5)
        likely += self._brackets(passed, passed.counts() // _RANGE_FIELDS, before=0, after=0)
        again = FieldWalk(data, piece.offsets[piece.kinds == RecordKind.AGAIN])
        again.pass_octets(1)
        again.pass_numbers(5)
        again.pass_octets(1)  # quarantined
        likely += self._brackets(again, again.counts(), before=1, after=2)
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

    def _brackets(self, walk: FieldWalk, counts: npt.NDArray[np.int64], *, before: int, after: int) -> list[int]:
        """Return the offsets of the records of which a range may have the message. The list of ranges comes next; each
        has *before* and *after* so many other numbers; before the first of them are the headers of lists, if there are
        any.
        """
        likely: list[int] = walk.records[counts > _RANGES_IN_STEP].tolist()
        for number in range(_RANGES_IN_STEP):
            here = counts > number
            walk.keep(here)
            counts = counts[here]
            if not len(walk):
                break
            if before:
                walk.pass_octets(1)
                walk.pass_numbers(before)
            log, first = walk.numbers(), walk.numbers()
            by_position = log >= PARTITIONS
            self._so_far.add(first, log, by_position)
            may = by_position & (first <= self._last_position)
            if not by_position.all():
                may |= np.isin(log, self._subjects)
            some = walk.fork(np.flatnonzero(may))
            walk.pass_numbers(4 + after)
            if len(some):
                some.pass_numbers(1)
                numbers = log[may], first[may], some.numbers(), some.numbers(), some.numbers()
                likely += some.records[self._may_have(*numbers)].tolist()
        return likely

    def _may_have(
        self, log: Numbers, first: Numbers, skip: Numbers, total: Numbers, end: Numbers
    ) -> npt.NDArray[np.bool_]:
        """Return which ranges may have the message, by one of its places."""
        by_position = log >= PARTITIONS
        between = np.searchsorted(self._positions, end, "right") > np.searchsorted(self._positions, first, "left")
        found: npt.NDArray[np.bool_] = by_position & between
        mine = np.flatnonzero(~by_position & np.isin(log, self._subjects))
        for at in mine.tolist():
            start, behind = int(first[at]) + int(skip[at]), int(first[at]) + int(skip[at]) + int(total[at])
            number = int(log[at])
            found[at] = any(place.entry[3] == number and start <= place.sequence < behind for place in self._places)
        return found

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
        self.found.decoded += 1
        record = piece.record(offset) if self.found.decoded <= MOST_DECODED else None
        if record is None:
            return None, 0, 0
        return msgpack.unpackb(record.payload, strict_map_key=False), record.position, record.kind

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

    def _of_consumers(self, group: Numbers, consumer: Numbers) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """Return which records are of a known consumer, and for each where that is among the known ones."""
        keys = (group << np.uint64(32)) | consumer
        at = np.searchsorted(self._keys, keys)
        at[at == len(self._keys)] = 0
        return self._keys[at] == keys, at

    def _known_among(self, walk: FieldWalk) -> list[int]:
        """Return the offsets of the records that are of a known consumer."""
        if not len(walk):
            return []
        records = walk.records
        known, _ = self._of_consumers(walk.numbers(), walk.numbers())
        found: list[int] = records[known].tolist()
        return found

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

    def _find_acks(self, piece: PullPiece, data: PieceBytes) -> list[tuple[Consumer, int, int]]:
        """Find the acks of these ranges; return what they had of whom."""
        walk, acked = FieldWalk(data, piece.offsets[piece.kinds == RecordKind.ACK]), list[tuple[Consumer, int, int]]()
        if not len(walk):
            return acked
        walk.pass_octets(1)
        ends = walk.fork()
        ends.pass_numbers(3)
        counts = ends.counts()
        single = np.flatnonzero(counts == 2)
        likely = self._known_among(walk.fork(np.flatnonzero(counts > 2)))
        if len(single) < len(ends):
            ends.keep(single)
            walk.keep(single)
        start, end = ends.numbers(), ends.numbers()
        # Most acks are of other messages than any of the ranges that were found, whoever has them.
        near = np.flatnonzero((start < self._last_sequence) & (end > self._first_sequence))
        walk.keep(near)
        known, at = self._of_consumers(walk.numbers(), walk.numbers())
        near = near[known]
        likely += walk.records[known][self._overlap(at[known], start[near], end[near])].tolist()
        for offset in sorted(likely):
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

    def _find_returns(self, piece: PullPiece, data: PieceBytes) -> None:
        """Find what consumers handed back, and which of them left."""
        walk = FieldWalk(data, piece.offsets[_RETURNS[piece.kinds]])
        if not len(walk):
            return
        walk.pass_octets(1)
        group = walk.numbers()
        walk.pass_octets(1)
        walk.pass_numbers(3)
        known, at = self._of_consumers(group, walk.numbers())
        walk.keep(known)
        at = at[known]
        single = walk.fork()
        counts = single.counts()  # -1 for LEAVE and PART, which have a number here
        single.pass_octets(1)
        aside = (counts == 1) & ~self._overlap(at, single.numbers(), single.numbers())
        for offset in sorted(walk.records[~aside].tolist()):
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
