"""The state of a group's messages, and the changes of it, which follow the table in message_life.py.

Each change is a record of the pull log. A method stages a record and applies the change (an ack the other way round);
a start applies the records that it reads, by the same ``_apply_...`` methods. Times are wall-clock microseconds;
monotonic times, such as a consumer's last call, are not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final

import msgpack

from qmq.broker.error_log.dead_letters import letters_of
from qmq.broker.error_log.error_log import Failure, Retries, TakenRetry, from_record, packed
from qmq.broker.groups.counts import GroupCounts
from qmq.broker.groups.in_flight import InFlightPull
from qmq.broker.groups.member import Consumers, Member
from qmq.broker.groups.order_slots import OrderSlots
from qmq.broker.groups.resends import GroupResends, ResendProgress
from qmq.broker.groups.returning import NoSlots, Returning
from qmq.broker.groups.settings import ResolvedSettings
from qmq.broker.groups.totals import MessageTotals
from qmq.broker.journal.record_bytes import pack, pack_rest
from qmq.broker.journal.record_types import (
    LEAVING_RANGES,
    MOST_RANGES_A_RECORD,
    PARTITIONS,
    InFlightRange,
    LeaveReason,
    MessageRange,
    RecordKind,
    flat,
    unflat,
)
from qmq.broker.ports.commands import DispositionRange
from qmq.errors import Fenced
from qmq.format.batch import made
from qmq.format.layout import PULL_HANDED, PULL_HEAD
from qmq.intervals import Intervals
from qmq.net.protocol.types import Disposition, KnownConsumer
from qmq.storage.store import ItemLog, ItemLogClaim, Schedule

#: The reason of dead letters of messages that could not be carried forward.
_LOST: Final = "it cannot be read any more"
#: The reason of dead letters of messages whose time to live is over.
EXPIRED_REASON: Final = "expired"

#: Handovers whose names are remembered, so that a repeat has no effect, and the bytes of a name.
MOST_HANDED: Final = 10_000
HANDED_SIZE: Final = 24


#: The field of a record RESENT, without the numbers, that has dead letters.
_RESENT_LETTERS: Final = 4

_pack_handed: Final = PULL_HANDED.pack
_pack_head: Final = PULL_HEAD.pack
#: Makes a range in flight of its fields, in a third of the time of a call of the class.
_MAKE_IN_FLIGHT: Final = partial(tuple.__new__, InFlightRange)
#: The common kinds, at hand: an enum looks its members up by name.
_PULL: Final = RecordKind.PULL
_ACK: Final = RecordKind.ACK


class Ledger:
    """The state of one group: its settings, consumers, retries and dead letters."""

    def __init__(
        self, number: int, schedule: Schedule, dead: ItemLog, record: Callable[[tuple[int, bytes]], None],
        *, keeps_absent: bool = False, rank: Callable[[MessageRange], int] | None = None,
    ) -> None:  # fmt: skip
        """*keeps_absent*: forget a transient consumer only when it leaves by itself, not when its session expires.
        *rank* returns the rank of messages in a group that heeds priorities.
        """
        self.number = number
        self.keeps_absent = keeps_absent
        self.settings = ResolvedSettings()
        self._consumers = Consumers()
        self.members = self._consumers.by_number
        self.by_name = self._consumers.by_name
        self.retries = Retries(schedule) if rank is None else Retries(schedule, rank)
        self.dead = dead
        #: What became of its messages in all.
        self.totals = MessageTotals()
        #: The events since the broker's start, which begins them anew once it has replayed all records.
        self.counts = GroupCounts(self.totals)
        self._returning = Returning(self.retries, dead, self.counts, self.totals)
        #: What befell its consumers of late.
        self.setbacks = self._returning.setbacks
        #: The names of handovers from other brokers, the oldest first.
        self.handed: dict[bytes, None] = {}
        #: The messages that restores to this group alone have brought.
        self.restored = RestoredRuns()
        #: How far the resends to this group are.
        self.resends = GroupResends()
        #: The slots of order keys, once a consumer follows a subject that has some; None: there are none.
        self.order: OrderSlots | None = None
        self._slots: OrderSlots | NoSlots = self._returning.slots
        self._there = -1, 0  # how many consumers are there, at a version
        #: The last answer to a pull had retries.
        self.was_again = False
        self._write = record
        #: Counts the changes of consumers, retries and settings, but not pulls of new messages and acks.
        self.version = 0
        self.changed = True  # since the last packed_bytes
        self._bytes = b""

    @property
    def filtered(self) -> int:
        """How many messages no consumer gets, or gets again, since they have none of the group's tags."""
        return self._returning.filtered

    def consumers_there(self) -> int:
        """Return how many consumers have a client."""
        if self._there[0] != self.version:
            self._there = self.version, sum(member.is_there for member in self.members.values())
        return self._there[1]

    def held(self) -> int:
        """Return how many messages are in flight, in retry and dead."""
        in_flight = sum(member.in_flight.count for member in self.members.values())
        return in_flight + self.retries.counted() + len(self.dead)

    def use_order(self, order: OrderSlots) -> None:
        """Keep the order of slots from now on."""
        self.order = self._slots = self._returning.slots = order

    # --- consumers ---------------------------------------------------------------------------------------------------

    def join(
        self,
        name: str,
        nonce: bytes,
        transient: bool,
        now_us: int,
        client: bytes = b"",
        known: KnownConsumer | None = None,
        program: str = "",
        session: int = 0,
    ) -> Member:
        """Return the consumer of that name: go on as it (with the same nonce), take it over, or make it. *program* is
        the name of its program, *session* counts the sessions of its client.

        Raise TooManyConsumers; raise Fenced if another program, or a later session of the client, has taken the
        consumer over meanwhile.
        """
        self._consumers.check_room(name)
        member = self.by_name.get(name)
        least = expected = 0
        if member is not None and member.client == client and 0 < session < member.session:
            raise Fenced(
                f"a later subscription of this client is consumer {name!r} now; subscribe again to take it over"
            )
        if member is not None and known is not None and known.since_us == member.since_us:
            if member.nonce != nonce and 0 < known.epoch < member.epoch:
                raise Fenced(f"another program has taken over as consumer {name!r}; this one does not come back")
            least, expected = known.epoch, known.expected
            self.handled_before(member, known.handled, now_us)
        is_there = member is not None and not member.closed and not member.leaving
        if member is None or not is_there or member.nonce != nonce or expected > member.in_flight.next_sequence:
            expires = member is not None and is_there and member.nonce != nonce and member.expires_at_takeover
            expired = member.number if member is not None and expires else 0
            self._do(RecordKind.JOIN, [name, nonce, transient, now_us, client, least, expected, expired, program])
            member = self.by_name[name]
        member.session = session
        return member

    def handled_before(self, member: Member, handled: tuple[int, ...], now_us: int) -> None:
        """Ack what a client remembers as acked: some acks may have been lost on the way."""
        end = member.in_flight.next_sequence
        intervals = [min(number, end) for number in handled]
        pairs = [pair for pair in zip(intervals[::2], intervals[1::2], strict=True) if pair[0] < pair[1]]
        if pairs and not member.closed and not member.leaving:
            self.ack(member, [number for pair in pairs for number in pair], now_us)

    def _apply_join(
        self, name: str, nonce: bytes, transient: bool, now_us: int, client: bytes, least: int, expected: int,
        expired: int, program: str = "",
    ) -> None:  # fmt: skip
        # *expired* is the number of the consumer whose session this takeover expires, or 0.
        member = self.by_name.get(name)
        if member is None:
            member = self._consumers.make(name, transient, now_us)
        elif not member.closed and not member.leaving and member.nonce != nonce:
            member.takeovers = member.next_takeovers
            if expired:
                self._expire_at_takeover(member, now_us)
        if member.leaving:
            member = self._consumers.follow_on(member)
        # Numbers that a client has seen do not occur again, even if a loss of power took their records.
        member.epoch = max(member.epoch, least) + 1
        member.in_flight.skip_to(expected)
        member.nonce = nonce
        member.client = client
        member.program = program
        member.closed = False
        member.progress = False

    def _expire_at_takeover(self, member: Member, now_us: int) -> None:
        """Expire the session of the consumer that was taken over; with many messages over several turns."""
        if member.in_flight.end_of_first(LEAVING_RANGES[LeaveReason.EXPIRED]) < member.in_flight.next_sequence:
            member.leaving = LeaveReason.EXPIRED
            return
        self._returning.expire_session(member, member.in_flight.next_sequence, now_us)
        self._emptied(member)

    def leave(self, member: Member, why: LeaveReason, now_us: int) -> None:
        """Let a consumer leave: its messages become retries, or (CLOSED) are dropped."""
        if not member.closed:
            self._do(RecordKind.LEAVE, [member.number, int(why), now_us])

    def _apply_leave(self, number: int, why: int, now_us: int) -> None:
        member = self.members.get(number)
        if member is None:
            return
        self._returning.let_go(member, why, member.in_flight.next_sequence, now_us)
        if why == LeaveReason.CLOSED:
            self.totals.dropped += member.in_flight.count
            for start, end in member.in_flight.unhandled():
                self._slots.settled(member.number, start, end)
        member.leaving = 0
        self._emptied(member)
        member.closed = True
        member.left_us = now_us
        if member.transient and (
            why == LeaveReason.LEFT or not self.keeps_absent or self.by_name.get(member.name) is not member
        ):
            self._consumers.forget(member)

    def _emptied(self, member: Member) -> None:
        member.emptied()
        self._slots.left(member.number)

    def leave_in_part(self, member: Member, why: LeaveReason, end: int, now_us: int) -> None:
        """Make retries of the messages before that delivery sequence; the consumer is leaving."""
        self._do(RecordKind.PART, [member.number, int(why), end, now_us])

    def _apply_part(self, number: int, why: int, end: int, now_us: int) -> None:
        member = self._consumers.there(number)
        if member is not None:
            self._returning.let_go(member, why, end, now_us)
            member.in_flight.let_go(end)
            member.leaving = why

    def member(self, number: int, epoch: int) -> Member:
        """Return the consumer that calls. Raise Fenced if the call is of another epoch, or it is gone."""
        return self._consumers.caller(number, epoch)

    # --- pulls -------------------------------------------------------------------------------------------------------

    def pulled(
        self, member: Member, ranges: list[MessageRange], size: int, now_us: int, where: list[Any]
    ) -> InFlightPull:
        """Put new messages in flight. *where* is how far the group has come by that: [prefix, positions] each."""
        sequence, (log, first, run, skip, total, end) = member.in_flight.next_sequence, ranges[0]
        if run or skip or len(ranges) > 1 or (end != first and (end or log >= PARTITIONS)):
            payload = pack(_PULL, (self.number, member.number, sequence, size, now_us, flat(ranges), where))
            given = _in_flight(ranges)
        else:  # what ``pack`` does, by hand: each message may come alone
            payload = _pack_handed(self.number, now_us, member.number, sequence, total, size, first, log, 0)
            if where:
                payload += pack_rest((where,))
            given = [made(InFlightRange, (ranges[0], 1, 0))]
        self.changed = True
        self._write((_PULL, payload))
        return self._apply_pull(member, given, size, now_us)

    def _apply_pull(self, member: Member, given: list[InFlightRange], size: int, now_us: int) -> InFlightPull:
        self.was_again = False
        member.pulled_us = now_us
        pull = member.in_flight.add(given, size, now_us)
        self.totals.handed += pull.total
        return pull

    def passed(
        self, member: Member | None, ranges: list[MessageRange], size: int, now_us: int, given: list[MessageRange],
        filtered: int, skipped: int, where: list[Any],
    ) -> None:  # fmt: skip
        """Note that a pull has passed the messages of *ranges*: the consumer has those of *given* in flight, and nobody
        gets the others. *where* as in ``pulled``.
        """
        consumer, first = (0, 0) if member is None else (member.number, member.in_flight.next_sequence)
        fields = [self.number, consumer, first, size, now_us, flat(ranges), flat(given), filtered, skipped, where]
        self._record(RecordKind.PASSED, fields)
        self._apply_passed(member, _in_flight(given), size, now_us, filtered, skipped)

    def _apply_passed(
        self, member: Member | None, given: list[InFlightRange], size: int, now_us: int, filtered: int, skipped: int
    ) -> None:
        self._returning.filtered += filtered
        self.totals.filtered += filtered
        self.totals.skipped += skipped
        if member is not None and given:
            self._apply_pull(member, given, size, now_us)

    def pulled_again(self, member: Member, taken: list[TakenRetry], size: int, now_us: int) -> InFlightPull:
        """Put retries in flight that were chosen."""
        self.version += 1
        quarantined = taken[0].retry.quarantined
        which = [[one.retry.number, *one.in_flight.flat()] for one in taken]
        first = member.in_flight.next_sequence
        self._record(RecordKind.AGAIN, [self.number, member.number, first, size, now_us, quarantined, which])
        given = [(one.retry.number, one.in_flight) for one in taken]
        return self._apply_again(member, given, size, now_us, quarantined)

    def _apply_again(
        self, member: Member, given: list[tuple[int, InFlightRange]], size: int, now_us: int, quarantined: bool
    ) -> InFlightPull:
        # *given* are ranges, each with the number of its retry.
        self.retries.take(given)
        member.quarantined, member.pulled_us = quarantined, now_us
        pull = member.in_flight.add([in_flight for _, in_flight in given], size, now_us, quarantined)
        self.counts.redelivered += pull.total
        return pull

    # --- dispositions -------------------------------------------------------------------------------------------------

    def ack(self, member: Member, intervals: list[int], now_us: int) -> int:
        """Ack messages [start, end), ...; return how many had to be refused."""
        if len(intervals) == 2 and member.in_flight.is_next(*intervals):  # one after another, as most are
            self.ack_next(member, intervals[0], intervals[1], now_us)
            return 0
        new, refused = self._apply_ack(member, intervals, now_us)
        for at in range(0, len(intervals) if new else 0, 2 * MOST_RANGES_A_RECORD):
            part = intervals[at : at + 2 * MOST_RANGES_A_RECORD]
            self._record(_ACK, [self.number, member.number, now_us, part])
        return refused

    def ack_next(self, member: Member, start: int, end: int, now_us: int) -> None:
        """Ack messages [start, end), for which ``InFlight.is_next`` is true."""
        self.changed = True
        self._write((_ACK, _pack_head(self.number, now_us, member.number, start, end - start)))
        self._apply_ack_next(member, start, end, now_us)

    def _apply_ack(self, member: Member, intervals: list[int], now_us: int) -> tuple[int, int]:
        """Return how many messages are newly acked, and how many are refused."""
        if len(intervals) == 2 and member.in_flight.is_next(*intervals):
            self._apply_ack_next(member, intervals[0], intervals[1], now_us)
            return intervals[1] - intervals[0], 0
        if self.order is not None:
            named = Intervals()  # a message may be named twice
            for start, end in zip(intervals[::2], intervals[1::2], strict=True):
                named.add(start, min(end, member.in_flight.next_sequence))
            for start, end in named:
                for low, high in member.in_flight.unhandled(start, end):
                    self.order.settled(member.number, low, high)
        new, refused = member.in_flight.ack(intervals, now_us)
        member.handled_us = now_us
        self.totals.acked += new
        member.progressed(new)
        return new, refused

    def _apply_ack_next(self, member: Member, start: int, end: int, now_us: int) -> None:
        if self.order is not None:
            self.order.settled(member.number, start, end)
        member.in_flight.move_ack_floor(end, now_us)
        self.totals.acked += end - start
        member.progress = True
        member.handled_us = now_us
        if member.quarantined:
            member.progressed(end - start)

    def hand_back(self, member: Member, backs: Sequence[DispositionRange], now_us: int) -> list[int]:
        """Hand ranges back, each by itself; return the numbers of those that change nothing, since some of their
        messages are not in flight.
        """
        refused = list[int]()
        taken = member.in_flight.in_flight(backs, refused)
        if self.order is not None:
            taken = self.order.with_followers(member, taken, self.settings)
        for at in range(0, len(taken), MOST_RANGES_A_RECORD):
            some = taken[at : at + MOST_RANGES_A_RECORD]
            reasons = {back.reason: None for back in some}
            numbers = {reason: number for number, reason in enumerate(reasons)}
            rows = [(*back[:4], numbers[back.reason]) for back in some]
            self._do(RecordKind.BACK, [member.number, rows, list(reasons), now_us])
        return refused

    def expire(self, member: Member, intervals: list[tuple[int, int]], now_us: int) -> None:
        """Make dead letters of messages in flight, delivery sequences [start, end) each, whose time to live is over."""
        backs = [DispositionRange(start, end, Disposition.REJECT, None, EXPIRED_REASON) for start, end in intervals]
        before = self.counts.rejected
        self.hand_back(member, backs, now_us)
        self.counts.expired += self.counts.rejected - before
        self.counts.rejected = before

    def _apply_back(self, number: int, rows: list[list[Any]], reasons: list[str], now_us: int) -> None:
        member = self._consumers.there(number)
        if member is not None:
            self._returning.back(member, rows, reasons, now_us)

    def take_over(
        self, messages: MessageRange, attempt: int, disposition: Disposition, reason: str, delay_us: int | None,
        now_us: int, name: bytes,
    ) -> None:  # fmt: skip
        """Take over a message that a consumer of another broker handed back; *name* is that of the handover."""
        self._do(RecordKind.OVER, [list(messages), attempt, int(disposition), reason, delay_us, now_us, name])

    def _apply_over(
        self, messages: list[int], attempt: int, disposition: int, reason: str, delay_us: int | None, now_us: int,
        name: bytes,
    ) -> None:  # fmt: skip
        self.handed[name] = None
        if len(self.handed) > MOST_HANDED:
            del self.handed[next(iter(self.handed))]
        in_flight = InFlightRange(MessageRange(*messages), attempt, 0)
        is_reject = disposition == Disposition.REJECT
        self.totals.handed_over += in_flight.messages.total
        failed = list(self._returning.failed(0, 0, [in_flight], is_reject, delay_us, reason, now_us))
        if failed:
            self._slots.came([in_flight.messages])
        self.retries.add_each(failed, False)

    def bring_back(self, messages: list[MessageRange], run: bytes, start: int, end: int, now_us: int) -> None:
        """Add messages [start, end) of a restore as retries of the first attempt."""
        self._do(RecordKind.RESTORED, [flat(messages), run, start, end, now_us])

    def _apply_restored(self, fields: list[int], run: bytes, start: int, end: int, now_us: int) -> None:
        self.restored.add(run, start, end)
        several = unflat(fields)
        self._slots.came(several)
        failure = Failure("restored", 0, 0, now_us, now_us)
        self.totals.restored += sum(messages.total for messages in several)
        self.retries.add_all([(messages, 1, 0) for messages in several], False, failure)

    def resend(
        self, run: bytes, progress: ResendProgress, letters: list[int], ranges: list[MessageRange], now_us: int
    ) -> None:
        """Hand out these messages again, as if for the first time, with dead letters that go; note how far the resend
        *run* is by that.
        """
        self._do(RecordKind.RESENT, [run, *progress, letters, flat(ranges), now_us])

    def _apply_resent(
        self, run: bytes, selection: dict[str, Any] | None, upto: list[int], counts: list[int], letters: list[int],
        fields: list[int], now_us: int,
    ) -> None:  # fmt: skip
        self.resends.note(run, ResendProgress(selection, tuple(upto), tuple(counts)))
        for number in letters:
            self.totals.deleted += self.dead.take_out(number, number + 1)
        several = unflat(fields)
        self._slots.came(several)
        failure = Failure("resent", 0, 0, now_us, now_us)
        self.totals.resent += sum(messages.total for messages in several)
        self.retries.add_all([(messages, 1, 0) for messages in several], False, failure)

    # --- dead letters ------------------------------------------------------------------------------------------------

    def redrive(self, numbers: list[int], now_us: int) -> int:
        """Make retries of dead letters, as if for the first time; return how many."""
        count = len(self.dead)
        self._do(RecordKind.REDRIVE, [numbers, now_us])
        return count - len(self.dead)

    def forget_dead(self, numbers: list[int] | None, now_us: int) -> int:
        """Delete these dead letters (None: all); return how many."""
        count = len(self.dead)
        self._do(RecordKind.FORGET, [numbers, now_us])
        return count - len(self.dead)

    def _apply_forget(self, numbers: list[int] | None, now_us: int) -> None:
        if numbers is None:
            self.totals.deleted += self.dead.take_out(1, 1 << 62)
        for number in numbers or ():
            self.totals.deleted += self.dead.take_out(number, number + 1)

    # --- carrying forward, seeking -------------------------------------------------------------------------------

    def forward(self, retries: list[Any], letters: list[Any], in_flight: list[Any], now_us: int) -> None:
        """Let copies replace messages that are about to be dropped, wherever the group points at them; retries that
        could not be copied are dead. For the lists see ``_apply_forward``.
        """
        self._do(RecordKind.FORWARD, [retries, letters, in_flight, now_us])

    def _apply_forward(
        self, retries: list[Any], letters: list[Any], in_flight: list[Any], now_us: int
    ) -> None:  # fmt: skip
        # *retries*: [as an item, whole (see Retries.replace), ranges that replace it, ranges that cannot be read];
        # *letters*: [as an item, range]; *in_flight*: [consumer, delivery sequence, ranges]. Fields of ranges are flat.
        for item, whole, parts, lost in retries:
            retry = from_record(item)
            self.retries.replace(retry, unflat(parts), whole=whole)
            for messages in unflat(lost):
                one = InFlightRange(messages, max(retry.attempt - 1, 1), retry.session_expiries)
                self.dead.add(letters_of(retry.consumer, retry.delivery_sequence, one, _LOST, now_us))
                self.counts.died += messages.total
        for item, fields in letters:
            letter = from_record(item)
            if self.dead.take_out(letter.number, letter.number + 1):
                self.dead.add(packed([letter._replace(messages=MessageRange(*fields))]))
        for number, start, parts in in_flight:
            member, ranges = self.members.get(number), unflat(parts)
            end = start + sum(messages.total for messages in ranges)
            if member is None or not member.in_flight.holds(start, end):
                continue  # the record of that pull is lost
            before = list(member.in_flight.between(start, end))
            if len(before) == 1:
                member.in_flight.replace(start, [before[0]._replace(messages=messages) for messages in ranges])
        self._slots.is_stale = True

    def skip_sequences(self, count: int) -> None:
        """Skip *count* delivery sequences of each consumer, which may have seen them in lost records."""
        self.version += 1
        self.changed = True
        for member in self.members.values():
            member.in_flight.skip_to(member.in_flight.next_sequence + count)

    def drop_in_flight(self, now_us: int, *, clear_retries: bool) -> None:
        """Drop all messages in flight, and with *clear_retries* all retries: the group is sought elsewhere."""
        self.version += 1
        self.changed = True
        self.resends.stop()
        for member in list(self.members.values()):
            self._apply_leave(member.number, LeaveReason.CLOSED, now_us)
        if clear_retries:
            self.retries.clear()
            self.totals.begin(self.held())
        self._slots.is_stale = True

    # --- checkpoint --------------------------------------------------------------------------------------------------

    def is_changed(self) -> bool:
        """Return whether the state has changed since ``packed_bytes``."""
        return self.changed or self.retries.changed

    def packed_bytes(self) -> bytes:
        """Return ``packed`` as bytes; made anew only after a change, since there may be many groups."""
        if self.is_changed():
            self._bytes = msgpack.packb(self.packed())
            self.changed = self.retries.changed = False
        return self._bytes

    def packed(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        dead = self.dead.claim()
        return {
            "settings": list(self.settings),
            "next_member": self._consumers.next_number,
            "members": self._consumers.packed(),
            "retries": self.retries.packed(),
            "dead": list(dead),
            "handed": b"".join(self.handed),
            "restored": self.restored.packed(),
            "resends": self.resends.packed(),
            "filtered": self.filtered,
            "totals": self.totals.packed(),
        }

    def restore(self, fields: dict[str, Any]) -> None:
        """Take over a state from ``packed``."""
        self._apply_settings(*fields["settings"])
        self._consumers.restore(fields["members"], fields["next_member"])
        self.retries.restore(fields["retries"])
        self.dead.restore(ItemLogClaim(*fields["dead"]))
        self.restored.restore(fields["restored"])
        self.resends.restore(fields["resends"])
        self._returning.filtered = fields["filtered"]
        names = fields["handed"]
        self.handed = {names[at : at + HANDED_SIZE]: None for at in range(0, len(names), HANDED_SIZE)}
        if "totals" in fields:
            self.totals.restore(fields["totals"])
        else:  # an older program has written it
            self.totals.begin(self.held())

    # --- records -----------------------------------------------------------------------------------------------------

    def set(self, settings: ResolvedSettings) -> None:
        """Change the settings."""
        self._do(RecordKind.SETTINGS, list(settings))

    def begin_with(self, settings: Iterable[Any]) -> None:
        """Take the settings of a new group, which the record that makes it has."""
        self.version += 1
        self.changed = True
        self._apply_settings(*settings)

    def _apply_settings(self, *fields: Any) -> None:
        self.settings = self._returning.settings = ResolvedSettings.kept(fields)

    @property
    def is_plain(self) -> bool:
        """Whether consumers get all new messages, in order, and nothing else."""
        settings = self.settings
        chooses = settings.tags or settings.expire_after_us or settings.ack_deadline_us
        return not chooses and self.retries.is_blank

    def _do(self, kind: RecordKind, fields: list[Any]) -> None:
        self.version += 1
        numbers = [self._consumers.next_number, self.retries.next_number, self.dead.next_number]
        self._record(kind, [self.number, numbers, *fields])
        self._apply(kind, fields)

    def _record(self, kind: RecordKind, fields: list[Any]) -> None:
        self.changed = True
        self._write((kind, pack(kind, fields)))

    def replay(self, kind: int, fields: list[Any]) -> bool:
        """Apply a record; return False if it is of a consumer whose join is lost."""
        self.version += 1
        self.changed = True
        if kind in (RecordKind.PULL, RecordKind.PASSED, RecordKind.AGAIN, RecordKind.ACK):
            return self._replay_delivery(kind, fields)
        (member, retry, dead), *fields = fields
        self._consumers.next_number = max(self._consumers.next_number, member)
        self.retries.skip_to(retry)
        self.dead.skip_to(dead)
        is_sure = dead == self.dead.next_number  # else a number may be another letter's
        if kind == RecordKind.RESENT and not is_sure:
            fields[_RESENT_LETTERS] = []
        if kind != RecordKind.FORGET or is_sure:
            self._apply(kind, fields)
        return True

    def _replay_delivery(self, kind: int, fields: list[Any]) -> bool:
        member = self._consumers.there(fields[0])
        if kind == RecordKind.PASSED:
            _, first, size, now_us, _, given, filtered, skipped, _ = fields
            if given:
                if member is None:
                    return False
                member.in_flight.skip_to(first)
            self._apply_passed(member, _in_flight(unflat(given)), size, now_us, filtered, skipped)
            return True
        if member is None:
            return False
        if kind == RecordKind.ACK:
            self._apply_ack(member, fields[2], fields[1])
            return True
        _, first, size, now_us, *rest = fields
        member.in_flight.skip_to(first)
        if kind == RecordKind.PULL:
            self._apply_pull(member, _in_flight(unflat(rest[0])), size, now_us)
            return True
        quarantined, which = rest
        taken = [(retry[0], InFlightRange.of(retry[1:])) for retry in which]
        self._apply_again(member, taken, size, now_us, quarantined)
        return True

    def _apply(self, kind: int, fields: list[Any]) -> None:
        match kind:
            case RecordKind.JOIN:
                self._apply_join(*fields)
            case RecordKind.LEAVE:
                self._apply_leave(*fields)
            case RecordKind.PART:
                self._apply_part(*fields)
            case RecordKind.BACK:
                self._apply_back(*fields)
            case RecordKind.OVER:
                self._apply_over(*fields)
            case RecordKind.RESTORED:
                self._apply_restored(*fields)
            case RecordKind.RESENT:
                self._apply_resent(*fields)
            case RecordKind.REDRIVE:
                self._returning.redrive(*fields)
            case RecordKind.FORGET:
                self._apply_forget(*fields)
            case RecordKind.SETTINGS:
                self._apply_settings(*fields)
            case RecordKind.FORWARD:
                self._apply_forward(*fields)
            case _:
                raise AssertionError(kind)


def _in_flight(ranges: list[MessageRange]) -> list[InFlightRange]:
    """Return ranges that are handed out for the first time."""
    return list(map(_MAKE_IN_FLIGHT, zip(ranges, repeat(1), repeat(0), strict=False)))


#: Runs of restores to remember, the last ones; a run has ended when as many have come after it.
MOST_RUNS: Final = 1_000


class RestoredRuns:
    """The messages that restores have brought to one group, so that none is brought twice.

    A run numbers its messages; a message that it sends again, since its answer was lost, has another number. So a run
    has one interval here, and one more for each time that the broker stopped in the middle.
    """

    def __init__(self) -> None:
        self._runs: dict[bytes, Intervals] = {}

    def add(self, run: bytes, start: int, end: int) -> None:
        """Add messages [start, end) of a run."""
        intervals = self._runs.pop(run, None) or Intervals()
        intervals.add(start, end)
        self._runs[run] = intervals
        if len(self._runs) > MOST_RUNS:
            del self._runs[next(iter(self._runs))]

    def has(self, run: bytes, number: int) -> bool:
        """Return whether that message of a run is there."""
        return number in self._runs.get(run, ())

    def end(self, run: bytes) -> int:
        """Return the number behind the last message of the run."""
        return max((end for _, end in self._runs.get(run, ())), default=0)

    def packed(self) -> list[Any]:
        """Return the state for the checkpoint: [run, [start, end, ...]] each."""
        return [[run, [one for pair in intervals for one in pair]] for run, intervals in self._runs.items()]

    def restore(self, packed: list[Any]) -> None:
        """Take over a state from ``packed``."""
        for run, numbers in packed:
            for start, end in zip(numbers[::2], numbers[1::2], strict=True):
                self.add(run, start, end)
