"""What a consumer gets that has been handed out before: what it holds, and what waits to be handed out again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from qmq.broker.delivery.eligibility import share_of
from qmq.broker.delivery.encode import PIECE_BYTES, Carrier, RangeLookup, answer_bytes
from qmq.broker.delivery.filters import EXPIRED, MessageFilter
from qmq.broker.error_log.error_log import MOST_TAKEN, Retries, Split, Taken
from qmq.broker.groups.group import Subscription
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.in_flight import InFlight
from qmq.broker.groups.member import Member
from qmq.broker.groups.membership import Offer, What
from qmq.broker.groups.message_ranges import Many, Parts, Some, parts_of
from qmq.broker.journal.record_types import InFlightRange, MessageRange
from qmq.broker.ports.commands import DispositionRange, Pull
from qmq.broker.ports.effects import Buffer
from qmq.errors import QmqError
from qmq.format.private import is_private, origin_subject
from qmq.names import MAX_NAME_BYTES, MAX_SUBJECT_BYTES
from qmq.net.protocol.types import Disposition
from qmq.storage.store import NotAtHand, Store

#: Ranges of delivery sequences that one answer has, at most.
MOST_RANGES: Final = 1_000
#: Messages that one answer has of those that are handed out again, at most.
MOST_AGAIN: Final = 4_096
#: Places that are looked for before an answer is made of what was found (about 50 us each): all others wait meanwhile.
MOST_LOOKS: Final = 64
#: Why messages are dead whose subject the group follows no more.
NOT_FOLLOWED: Final = "its subject is not followed any more"
#: What the disk refuses to read is tried again after so long.
_READ_AGAIN_US: Final = 1_000_000


class Redelivery:
    """Of all groups."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: Messages that could not be read when they were to be handed out, and are passed.
        self.lost = 0
        self.damaged: list[QmqError] = []  # what could not be read of late

    def give_again(self, subscription: Subscription, offer: Offer, pull: Pull, now_us: int) -> PullAnswer | None:
        """What a pull gets that has been handed out before; None when there is nothing. Raises NotAtHand."""
        ledger, member = ledger_and_member(subscription)
        max_count, max_bytes = min(pull.max_count, offer.max_count), min(pull.max_bytes, offer.max_bytes)
        if offer.what is What.IN_FLIGHT:
            assert pull.expected is not None
            if subscription.group.ended:
                in_flight = member.in_flight
                several = (
                    one for low, high in in_flight.unhandled(pull.expected) for one in _ranges_of(in_flight, low, high)
                )
                ranges = list(islice(several, MOST_RANGES))  # no answer has more
                if self._bury_not_followed(subscription, RangeLookup(self._store, subscription.group), ranges, now_us):
                    return None
            finding, end = RangeLookup(self._store, subscription.group), member.in_flight.next_sequence
            return self._carry(
                subscription, finding, pull.expected, end, max_count, max_bytes, now_us, checks=pull.checks
            )
        finding = RangeLookup(self._store, subscription.group)
        share = share_of(self._store, subscription)
        split = None if share is None else partial(share.share_ranges, finding)
        ledger.retries.load(now_us, min(max_count, MOST_TAKEN))
        taken = _take(ledger.retries, offer.what, max_count, split)
        try:
            fits, size = self._fitting(finding, taken, max_bytes)
        except NotAtHand:
            ledger.retries.put_back(taken)
            raise
        if not taken:
            return None
        if offer.what is What.AGAIN and fits < sum(one.total for one in taken):
            ledger.retries.put_back(taken)
            taken = _take(ledger.retries, offer.what, fits, split)
            if not taken:
                return None
        ledger.was_again = True
        given = ledger.pulled_again(member, taken, size, now_us)
        if subscription.group.ended:
            ranges, sequence = list[tuple[int, MessageRange]](), given.first
            for one in taken:
                ranges.append((sequence, one.in_flight.messages))
                sequence += one.total
            self._bury_not_followed(subscription, finding, ranges, now_us)
        self._bury_expired(subscription, finding, given.first, taken, now_us)
        end = given.first + given.total
        return self._carry(subscription, finding, given.first, end, given.total, max_bytes, now_us, checks=pull.checks)

    def _bury_not_followed(
        self, subscription: Subscription, finding: RangeLookup, ranges: list[tuple[int, MessageRange]], now_us: int
    ) -> bool:
        """What lies in subjects that the group follows no more is dead, of these ranges from a delivery sequence on
        each; whether there was any.
        """
        ledger, member = ledger_and_member(subscription)
        backs, ended = list[DispositionRange](), dict[int, bool]()
        for start, messages in ranges:
            rows = [row for part in finding.parts(messages) for row in _subjects_of(part)]
            if sum(count for _, count in rows) != messages.total:
                continue  # where some is missing who is who is found out later
            for number, count in rows:
                if number not in ended:
                    name = origin_subject(self._store.subject_name(number))
                    ended[number] = subscription.group.follows_no_more(name)
                if ended[number]:
                    backs.append(DispositionRange(start, start + count, Disposition.REJECT, None, NOT_FOLLOWED))
                start += count
        if backs:
            ledger.hand_back(member, backs, now_us)
        return bool(backs)

    def _bury_expired(
        self, subscription: Subscription, finding: RangeLookup, first: int, taken: list[Taken], now_us: int
    ) -> None:
        """What was taken is past its expiry by now: it is dead."""
        ledger, member = ledger_and_member(subscription)
        message_filter, sequence = MessageFilter(self._store, ledger.settings, now_us, tags=False), first
        for one in taken:
            parts = finding.parts(one.in_flight.messages)
            # Where some is missing who is who is found out later.
            if message_filter.has_work(parts) and sum(map(_count, parts)) == one.total:
                start = sequence
                for state, _, total in message_filter.state_ranges(parts):
                    if state == EXPIRED:
                        ledger.hand_back(
                            member,
                            [DispositionRange(start, start + total, Disposition.REJECT, None, "expired")],
                            now_us,
                        )
                    start += total
            sequence += one.total

    def _fitting(self, finding: RangeLookup, taken: list[Taken], max_bytes: int) -> tuple[int, int]:
        """How many messages of these an answer has room for, one at least, and their bytes. Raises NotAtHand."""
        count = size = 0
        for one in taken:
            if finding.looks > MOST_LOOKS:
                return count, size
            for part in finding.parts(one.in_flight.messages):
                messages, more = _count(part), self._bytes(part)
                if size + more > max_bytes:
                    return max(count + int(messages * (max_bytes - size) / more), 1), max_bytes
                count, size = count + messages, size + more
        return max(count, 1), size

    def _bytes(self, part: Some | Many) -> int:
        """About how many bytes a part adds to an answer, with the names of its subjects: hardly ever more."""
        if isinstance(part, Some):
            size, runs = part.entry[9] * _count(part) // part.entry[4] + PIECE_BYTES, 1
            numbers = [part.entry[3]]
        else:
            size, runs = int(answer_bytes(part.rows).sum()), len(part.rows)
            numbers = part.rows["subject"].tolist() if self._store.has_private else []
        if self._store.has_private and any(is_private(self._store.subject_name(number)) for number in numbers):
            size += runs * (MAX_SUBJECT_BYTES - MAX_NAME_BYTES)
        return size

    def carry(
        self, subscription: Subscription, start: int, end: int, max_count: int, max_bytes: int, now_us: int
    ) -> PullAnswer:
        """The messages that a consumer holds of the delivery sequences [start, end), as many as fit. Raises NotAtHand.

        Those that cannot be read any more are rejected: they go to the dead letters. What the disk does not read now is
        given back, for a while.
        """
        finding = RangeLookup(self._store, subscription.group)
        return self._carry(subscription, finding, start, end, max_count, max_bytes, now_us)

    def _carry(
        self, subscription: Subscription, finding: RangeLookup, start: int, end: int, max_count: int, max_bytes: int,
        now_us: int, *, checks: bool = False,
    ) -> PullAnswer:  # fmt: skip
        several = list(self._wanted(subscription, finding, start, end, max_count, max_bytes))
        damaged = self.damaged if checks else []  # else who wanted them first has told of it
        answer, carrier = PullAnswer([], 0, []), Carrier(self._store, damaged, finding.batches, checks)
        buffers = carrier.carry([part for one in several for part in one.parts])
        if not carrier.left_out and all(one.is_whole() for one in several):
            for sequence, in_flight, _ in several:
                answer.add([], sequence, in_flight.messages.total, in_flight.attempt)
            answer.fill(buffers)
            return answer
        for sequence, in_flight, parts in several:
            self._carry_range(subscription, finding, answer, sequence, in_flight, parts, now_us)
        return answer

    def _wanted(
        self, subscription: Subscription, finding: RangeLookup, start: int, end: int, max_count: int, max_bytes: int
    ) -> Iterator[_Wanted]:
        """What there is room for."""
        _, member = ledger_and_member(subscription)
        size = sequence_ranges = 0
        behind = -1, 0  # where the last range ends, and its attempt
        for low, high in member.in_flight.unhandled(start):
            sequence = low
            for in_flight in member.in_flight.between(low, min(high, end)):
                if max_count <= 0 or size >= max_bytes or sequence_ranges >= MOST_RANGES:
                    return
                part = in_flight.part(0, min(in_flight.messages.total, max_count))
                parts = finding.parts(part.messages)
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
                sequence_ranges += behind != (sequence, in_flight.attempt)
                size, max_count, sequence = size + more, max_count - total, sequence + total
                behind = sequence, in_flight.attempt

    def _carry_range(
        self, subscription: Subscription, finding: RangeLookup, answer: PullAnswer, sequence: int,
        in_flight: InFlightRange, parts: Parts, now_us: int,
    ) -> None:  # fmt: skip
        """Add what can be read of it. Where that is not all, look at either half."""
        messages = in_flight.messages
        carrier = Carrier(self._store, [], finding.batches)
        buffers = carrier.carry(parts)
        is_whole = not carrier.left_out and sum(map(_count, parts)) >= messages.total
        if is_whole or (messages.total == 1 and buffers):
            answer.add(buffers, sequence, messages.total, in_flight.attempt)
            return
        if messages.total == 1:
            self._pass_over(subscription, sequence, carrier if parts else None, now_us)
            return
        middle = messages.total // 2
        for start, end in ((0, middle), (middle, messages.total)):
            part = messages.part(start, end)
            at_hand = parts_of(self._store, subscription.group, part)
            half = in_flight._replace(messages=part)
            self._carry_range(subscription, finding, answer, sequence + start, half, at_hand, now_us)

    def _pass_over(self, subscription: Subscription, sequence: int, carrier: Carrier | None, now_us: int) -> None:
        """A message cannot be read: it is dead; or comes again soon, where the disk may change its mind."""
        ledger, member = ledger_and_member(subscription)
        self.lost += 1
        if carrier is None:  # it went with the power, before it was on disk
            ledger.ack(member, [sequence, sequence + 1])
            return
        reason = str(carrier.failed) if carrier.failed is not None else "it cannot be read any more"
        disposition = Disposition.RELEASE if carrier.failed is not None else Disposition.REJECT
        ledger.hand_back(
            member, [DispositionRange(sequence, sequence + 1, disposition, _READ_AGAIN_US, reason)], now_us
        )


class _Wanted(NamedTuple):
    """What a consumer holds from a delivery sequence on, and where that lies."""

    sequence: int
    in_flight: InFlightRange
    parts: Parts

    def is_whole(self) -> bool:
        """All of it is there."""
        return sum(map(_count, self.parts)) >= self.in_flight.messages.total


class PullAnswer:
    """What a pull is answered with: buffers, and the delivery sequences of what is in them."""

    __slots__ = ("buffers", "ranges", "size")

    def __init__(self, buffers: list[Buffer], size: int, ranges: list[tuple[int, int, int]]) -> None:
        self.buffers = buffers
        self.size = size
        self.ranges = ranges

    def add(self, buffers: list[Buffer], sequence: int, count: int, attempt: int) -> None:
        """So many messages more, from that delivery sequence on."""
        self.fill(buffers)
        if self.ranges and self.ranges[-1][0] + self.ranges[-1][1] == sequence and self.ranges[-1][2] == attempt:
            first, before, _ = self.ranges[-1]
            self.ranges[-1] = first, before + count, attempt
        else:
            self.ranges.append((sequence, count, attempt))

    def fill(self, buffers: list[Buffer]) -> None:
        """With those of messages that it has."""
        self.buffers += buffers
        self.size += sum(map(len, buffers))

    @property
    def messages(self) -> int:
        """How many it has."""
        return sum(count for _, count, _ in self.ranges)


def _take(retries: Retries, what: What, max_count: int, split: Split | None) -> list[Taken]:
    """So many messages of what waits; with *split* those that it means. Raises what that does."""
    if what is What.QUARANTINED:
        return (
            [retries.take_quarantined(max_count)] if split is None else retries.take_quarantined_meant(max_count, split)
        )
    most = min(max_count, MOST_AGAIN)
    return retries.take(most) if split is None else retries.take_meant(most, split)


def ledger_and_member(subscription: Subscription) -> tuple[Ledger, Member]:
    ledger, member = subscription.group.ledger, subscription.member
    assert ledger is not None
    assert member is not None
    return ledger, member


def _ranges_of(in_flight: InFlight, start: int, end: int) -> Iterator[tuple[int, MessageRange]]:
    """What a consumer holds of the delivery sequences [start, end): from which one on each range."""
    for one in in_flight.between(start, end):
        yield start, one.messages
        start += one.messages.total


def _subjects_of(part: Some | Many) -> list[tuple[int, int]]:
    """The runs of a part: the number of the subject of each, and how many messages of it."""
    if isinstance(part, Some):
        return [(part.entry[3], part.stop - part.start)]
    return list(zip(part.rows["subject"].tolist(), part.rows["count"].tolist(), strict=True))


def _count(part: Some | Many) -> int:
    """How many messages a part has."""
    return part.stop - part.start if isinstance(part, Some) else int(part.rows["count"].sum())
