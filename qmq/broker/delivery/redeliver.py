"""Redelivery: messages that a consumer has in flight and asks for again, and retries that are due."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from qmq.broker.delivery.eligibility import MOST_LOOKS, eligibility_of
from qmq.broker.delivery.encode import AnswerEncoder, RangeLookup, answer_bytes, piece_bytes
from qmq.broker.delivery.filters import EXPIRED, FILTERED, MessageFilter
from qmq.broker.delivery.order.places import ordered_runs
from qmq.broker.error_log.error_log import MOST_TAKEN, Retries, Split, TakenRetry, taken_of
from qmq.broker.groups.group import Group, Subscription
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.in_flight import InFlight
from qmq.broker.groups.member import Member
from qmq.broker.groups.membership import MessageKind, Offer
from qmq.broker.groups.message_ranges import MessageParts, RunPart, WholeRuns, parts_of
from qmq.broker.groups.priorities import RANKS
from qmq.broker.journal.record_types import InFlightRange, MessageRange
from qmq.broker.ports.commands import DispositionRange, Pull
from qmq.broker.ports.effects import Buffer
from qmq.errors import QmqError
from qmq.format.private import is_private, origin_subject
from qmq.intervals import Intervals
from qmq.names import MAX_NAME_BYTES, MAX_SUBJECT_BYTES
from qmq.net.protocol.types import Disposition
from qmq.storage.store import Store

#: Ranges of delivery sequences of one answer.
MOST_RANGES: Final = 1_000
#: Retries of one answer.
MOST_AGAIN: Final = 4_096
#: The reason of dead letters whose subject the group no longer follows.
NOT_FOLLOWED: Final = "its subject is not followed any more"
#: The reason of messages that are filtered when they were to come again.
WITHOUT_TAGS: Final = "it has none of the group's tags"
#: After a failed read, the message is delivered again this much later.
_READ_AGAIN_US: Final = 1_000_000


class Redelivery:
    """Makes answers from messages that were delivered before, for all groups."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: Messages that could not be read when they were to be delivered, and were passed.
        self.lost = 0
        self.damaged: list[QmqError] = []  # failed reads since the last take_damaged
        #: How many messages of each rank were among the last retries.
        self.by_rank = [0] * RANKS

    def redeliver(self, subscription: Subscription, offer: Offer, pull: Pull, now_us: int) -> PullAnswer | None:
        """Return the answer to a pull that *offer* allows to be delivered again; None for none. Raises NotInMemory."""
        ledger, member = ledger_and_member(subscription)
        max_count, max_bytes = offer.max_count, offer.max_bytes
        if offer.kind is MessageKind.IN_FLIGHT:
            assert pull.expected is not None
            lookup, end = RangeLookup(self._store, subscription.group), member.in_flight.next_sequence
            in_flight = member.in_flight
            several = (
                one for low, high in in_flight.unhandled(pull.expected) for one in _ranges_of(in_flight, low, high)
            )
            ranges = list(islice(several, MOST_RANGES))  # no answer has more
            if self._settle_unwanted(subscription, lookup, ranges, now_us):
                return None
            return self._encode(
                subscription, lookup, pull.expected, end, max_count, max_bytes, now_us, checks=pull.checks
            )
        lookup, retries = RangeLookup(self._store, subscription.group), ledger.retries
        retries.load(now_us, min(max_count, MOST_TAKEN))
        eligibility = eligibility_of(self._store, subscription)
        split: Split | None = None if eligibility is None else partial(eligibility.ranges, lookup)
        is_quarantined = offer.kind is MessageKind.QUARANTINED
        if not is_quarantined:
            max_count = min(max_count, MOST_AGAIN)
            if retries.has_ranks:
                split = _of_rank(retries, offer.ranks[0], split)
        taken = retries.choose(max_count, split, quarantined=is_quarantined)
        if not taken:
            return None
        fits, size = self._fitting(lookup, taken, max_bytes)
        if not is_quarantined and fits < sum(one.total for one in taken):
            taken = _first_of(taken, fits)
        ledger.was_again = True
        self.by_rank = [0] * RANKS
        for one in taken:
            self.by_rank[retries.rank(one.in_flight.messages)] += one.total
        given = ledger.pulled_again(member, taken, size, now_us)
        if ledger.order is not None:
            sequence = given.first
            for one in taken:
                parts = lookup.parts(one.in_flight.messages)
                ledger.order.given_again(member.number, ordered_runs(self._store, parts, sequence))
                sequence += one.total
        ranges, sequence = list[tuple[int, MessageRange]](), given.first
        for one in taken:
            ranges.append((sequence, one.in_flight.messages))
            sequence += one.total
        self._settle_unwanted(subscription, lookup, ranges, now_us)
        end = given.first + given.total
        return self._encode(subscription, lookup, given.first, end, given.total, max_bytes, now_us, checks=pull.checks)

    def _settle_unwanted(
        self, subscription: Subscription, lookup: RangeLookup, ranges: list[tuple[int, MessageRange]], now_us: int
    ) -> bool:
        """Settle messages in flight that the group does not want any more; return whether there were any. Those whose
        subject it no longer follows, and expired ones, become dead letters; those without one of its tags are filtered.

        *ranges* are (first delivery sequence, messages).
        """
        ledger, member = ledger_and_member(subscription)
        message_filter = MessageFilter(self._store, ledger.settings, now_us)
        backs, expired, ended = list[DispositionRange](), list[tuple[int, int]](), dict[int, bool]()
        for start, messages in ranges:
            parts = lookup.parts(messages)
            if not subscription.group.ended and not message_filter.has_work(parts):
                continue
            if sum(map(_count, parts)) != messages.total:
                continue  # messages are missing; _encode finds out which
            buried = Intervals()
            for low, high in self._not_followed(subscription.group, parts, ended, start):
                buried.add(low, high)
                backs.append(DispositionRange(low, high, Disposition.REJECT, None, NOT_FOLLOWED))
            for state, _, total in message_filter.state_ranges(parts):
                if state == EXPIRED:
                    expired += buried.missing(start, start + total)
                elif state == FILTERED:
                    several = buried.missing(start, start + total)
                    backs += [DispositionRange(*one, Disposition.FILTER, None, WITHOUT_TAGS) for one in several]
                start += total
        if backs:
            ledger.hand_back(member, backs, now_us)
        if expired:
            ledger.expire(member, expired, now_us)
        return bool(backs or expired)

    def _not_followed(
        self, group: Group, parts: MessageParts, ended: dict[int, bool], start: int
    ) -> Iterator[tuple[int, int]]:  # fmt: skip
        """Yield start and end of messages whose subject the group no longer follows, numbered from *start* on. *ended*
        is what was found out before, by subject.
        """
        if not group.ended:
            return
        for number, count in (row for part in parts for row in _subjects_of(part)):
            if number not in ended:
                ended[number] = group.follows_no_more(origin_subject(self._store.subjects.name(number)))
            if ended[number]:
                yield start, start + count
            start += count

    def _fitting(self, lookup: RangeLookup, taken: list[TakenRetry], max_bytes: int) -> tuple[int, int]:
        """Return how many of the taken messages fit into an answer, at least one, and their bytes. Raises
        NotInMemory.
        """
        count = size = 0
        for one in taken:
            if lookup.looks > MOST_LOOKS:
                return count, size
            for part in lookup.parts(one.in_flight.messages):
                messages, more = _count(part), self._bytes(part)
                if size + more > max_bytes:
                    return max(count + int(messages * (max_bytes - size) / more), 1), max_bytes
                count, size = count + messages, size + more
        return max(count, 1), size

    def _bytes(self, part: RunPart | WholeRuns) -> int:
        """Return about how many bytes a part adds to an answer, with the names of its subjects; rarely too few."""
        if isinstance(part, RunPart):
            size, runs = part.entry[9] * _count(part) // part.entry[4] + piece_bytes(part.entry), 1
            numbers = [part.entry[3]]
        else:
            size, runs = int(answer_bytes(part.rows).sum()), len(part.rows)
            numbers = part.rows["subject"].tolist() if self._store.subjects.has_private else []
        if self._store.subjects.has_private and any(
            is_private(self._store.subjects.name(number)) for number in numbers
        ):
            size += runs * (MAX_SUBJECT_BYTES - MAX_NAME_BYTES)
        return size

    def encode(
        self, subscription: Subscription, start: int, end: int, max_count: int, max_bytes: int, now_us: int
    ) -> PullAnswer:
        """Return the messages that a consumer has in flight in [start, end), as many as fit. Raises NotInMemory.

        Messages that can never be read become dead letters. Messages that the disk refuses to read now are released
        with a delay.
        """
        lookup = RangeLookup(self._store, subscription.group)
        return self._encode(subscription, lookup, start, end, max_count, max_bytes, now_us)

    def _encode(
        self, subscription: Subscription, lookup: RangeLookup, start: int, end: int, max_count: int, max_bytes: int,
        now_us: int, *, checks: bool = False,
    ) -> PullAnswer:  # fmt: skip
        several = list(self._wanted(subscription, lookup, start, end, max_count, max_bytes))
        answer = PullAnswer([], 0, [])
        # The first delivery may have sent a batch as it lies, where this one reads its header.
        encoder = AnswerEncoder(self._store, self.damaged, lookup.batches, checks, reports_reads=checks)
        buffers = encoder.encode([part for one in several for part in one.parts])
        if not encoder.left_out and all(one.is_whole() for one in several):
            for sequence, in_flight, _ in several:
                answer.add([], sequence, in_flight.messages.total, in_flight.marked_attempt)
            answer.fill(buffers)
            return answer
        for sequence, in_flight, parts in several:
            self._encode_range(subscription, lookup, answer, sequence, in_flight, parts, now_us)
        return answer

    def _wanted(
        self, subscription: Subscription, lookup: RangeLookup, start: int, end: int, max_count: int, max_bytes: int
    ) -> Iterator[_Wanted]:
        """Yield the messages in flight from *start* on that fit into the answer."""
        _, member = ledger_and_member(subscription)
        size = sequence_ranges = 0
        behind = -1, 0  # the end and the attempt of the last range
        for low, high in member.in_flight.unhandled(start):
            sequence = low
            for in_flight in member.in_flight.between(low, min(high, end)):
                if max_count <= 0 or size >= max_bytes or sequence_ranges >= MOST_RANGES:
                    return
                part = in_flight.part(0, min(in_flight.messages.total, max_count))
                parts = lookup.parts(part.messages)
                more = sum(map(self._bytes, parts))
                if size + more > max_bytes:
                    if size:
                        return
                    part = in_flight.part(0, max(part.messages.total * max_bytes // more, 1))
                    parts = parts_of(self._store, subscription.group, part.messages)
                yield _Wanted(sequence, part, parts)
                total = part.messages.total
                if total < in_flight.messages.total:
                    return
                sequence_ranges += behind != (sequence, in_flight.marked_attempt)
                size, max_count, sequence = size + more, max_count - total, sequence + total
                behind = sequence, in_flight.marked_attempt

    def _encode_range(
        self, subscription: Subscription, lookup: RangeLookup, answer: PullAnswer, sequence: int,
        in_flight: InFlightRange, parts: MessageParts, now_us: int,
    ) -> None:  # fmt: skip
        """Add what can be read of a range to the answer; where that is not all, try both halves."""
        messages = in_flight.messages
        encoder = AnswerEncoder(self._store, self.damaged, lookup.batches, reports_reads=False)
        buffers = encoder.encode(parts)
        is_whole = not encoder.left_out and sum(map(_count, parts)) >= messages.total
        if is_whole or (messages.total == 1 and buffers):
            answer.add(buffers, sequence, messages.total, in_flight.marked_attempt)
            return
        if messages.total == 1:
            self._pass_over(subscription, sequence, encoder if parts else None, now_us)
            return
        middle = messages.total // 2
        for start, end in ((0, middle), (middle, messages.total)):
            part = messages.part(start, end)
            at_hand = parts_of(self._store, subscription.group, part)
            half = in_flight._replace(messages=part)
            self._encode_range(subscription, lookup, answer, sequence + start, half, at_hand, now_us)

    def _pass_over(self, subscription: Subscription, sequence: int, encoder: AnswerEncoder | None, now_us: int) -> None:
        """Pass an unreadable message: reject it, or release it where the disk may read it later."""
        ledger, member = ledger_and_member(subscription)
        self.lost += 1
        if encoder is None:  # the message was lost with the power, before it was on disk
            ledger.ack(member, [sequence, sequence + 1], now_us)
            return
        reason = str(encoder.failed) if encoder.failed is not None else "it cannot be read any more"
        disposition = Disposition.RELEASE if encoder.failed is not None else Disposition.REJECT
        ledger.hand_back(
            member, [DispositionRange(sequence, sequence + 1, disposition, _READ_AGAIN_US, reason)], now_us
        )


def _first_of(taken: list[TakenRetry], most: int) -> list[TakenRetry]:
    """Return the first *most* of the taken messages."""
    first = list[TakenRetry]()
    for several in taken:
        if not most:
            break
        count = min(several.total, most)
        first.append(taken_of(several.retry, count))
        most -= count
    return first


class _Wanted(NamedTuple):
    """Messages in flight from a delivery sequence on, and their places in the message log."""

    sequence: int
    in_flight: InFlightRange
    parts: MessageParts

    def is_whole(self) -> bool:
        """Return whether all of the messages exist."""
        return sum(map(_count, self.parts)) >= self.in_flight.messages.total


class PullAnswer:
    """The answer to a pull: buffers, and the delivery sequences of the messages in them."""

    __slots__ = ("buffers", "ranges", "size")

    def __init__(self, buffers: list[Buffer], size: int, ranges: list[tuple[int, int, int]]) -> None:
        self.buffers = buffers
        self.size = size
        self.ranges = ranges

    def add(self, buffers: list[Buffer], sequence: int, count: int, attempt: int) -> None:
        """Add *count* messages from delivery sequence *sequence* on."""
        self.fill(buffers)
        if self.ranges and self.ranges[-1][0] + self.ranges[-1][1] == sequence and self.ranges[-1][2] == attempt:
            first, before, _ = self.ranges[-1]
            self.ranges[-1] = first, before + count, attempt
        else:
            self.ranges.append((sequence, count, attempt))

    def fill(self, buffers: list[Buffer]) -> None:
        """Add buffers of messages that were added before."""
        self.buffers += buffers
        self.size += sum(map(len, buffers))

    @property
    def messages(self) -> int:
        """How many messages the answer has."""
        return sum(count for _, count, _ in self.ranges)


def _of_rank(retries: Retries, rank: int, split: Split | None) -> Split:
    """Return a split that allows what *split* does (None: all) of the retries of one rank, and nothing of others."""

    def selected(messages: MessageRange) -> list[tuple[int, bool]] | None:
        if retries.rank(messages) != rank:
            return [(messages.total, False)]
        return [(messages.total, True)] if split is None else split(messages)

    return selected


def ledger_and_member(subscription: Subscription) -> tuple[Ledger, Member]:
    ledger, member = subscription.group.ledger, subscription.member
    assert ledger is not None
    assert member is not None
    return ledger, member


def _ranges_of(in_flight: InFlight, start: int, end: int) -> Iterator[tuple[int, MessageRange]]:
    """Yield the ranges in flight in [start, end), each with its first delivery sequence."""
    for one in in_flight.between(start, end):
        yield start, one.messages
        start += one.messages.total


def _subjects_of(part: RunPart | WholeRuns) -> list[tuple[int, int]]:
    """Return subject number and message count of each run of a part."""
    if isinstance(part, RunPart):
        return [(part.entry[3], part.stop - part.start)]
    return list(zip(part.rows["subject"].tolist(), part.rows["count"].tolist(), strict=True))


def _count(part: RunPart | WholeRuns) -> int:
    """Return how many messages a part has."""
    return part.stop - part.start if isinstance(part, RunPart) else int(part.rows["count"].sum())
