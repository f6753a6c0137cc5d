"""Decides what becomes of messages that come back from a consumer: retries, dead letters, or neither."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from qmq.broker.error_log.dead_letters import chosen, letters_of
from qmq.broker.error_log.error_log import Failure, Retries, split, unpacked
from qmq.broker.groups.counts import GroupCounts
from qmq.broker.groups.member import Member
from qmq.broker.groups.order_slots import OrderSlots
from qmq.broker.groups.setbacks import Setbacks
from qmq.broker.groups.settings import ResolvedSettings
from qmq.broker.groups.totals import MessageTotals
from qmq.broker.journal.record_types import InFlightRange, LeaveReason, MessageRange
from qmq.net.protocol.types import Disposition
from qmq.storage.store import ItemLog


class NoSlots:
    """Stands for the slots of order keys while a group keeps no order: whatever is applied changes nothing."""

    def __init__(self) -> None:
        self.is_stale = False

    def settled(self, consumer: int, start: int, end: int) -> None:
        """See ``OrderSlots``, also for the others."""

    returned = settled

    def left(self, consumer: int) -> None:
        """Change nothing."""

    def came(self, several: Sequence[MessageRange]) -> None:
        """Change nothing."""


class Returning:
    """Decides for one group whether messages that come back from a consumer become retries or dead letters."""

    def __init__(self, retries: Retries, dead: ItemLog, counts: GroupCounts, totals: MessageTotals) -> None:
        self.settings = ResolvedSettings()
        self.slots: OrderSlots | NoSlots = NoSlots()
        #: Messages that have none of the group's tags: no consumer gets them, or gets them again.
        self.filtered = 0
        self._retries = retries
        self._dead = dead
        self._counts = counts
        self._totals = totals
        self.setbacks = Setbacks()

    def back(self, member: Member, rows: Iterable[list[Any]], reasons: list[str], now_us: int) -> None:
        """Hand back (start, end, disposition, delay, index of the reason) each, if it is in flight."""
        failed = list[tuple[MessageRange, int, int, Failure]]()
        for start, end, disposition, delay_us, reason in rows:
            is_handled = disposition != Disposition.RELEASE
            ranges = member.in_flight.give_back(start, end, now_us if is_handled else 0)
            if ranges is None:
                continue
            if is_handled:
                member.handled_us = now_us
                self.setbacks.failed(end - start, self._counts.acked, now_us)
            self._counts.handed_back(disposition, end - start)
            if disposition == Disposition.FILTER:
                self.filtered += end - start
                self._totals.filtered_later += end - start
                self.slots.settled(member.number, start, end)
            elif disposition == Disposition.RELEASE:
                self._retries.add_each(failed, False)  # retries get their numbers in order
                failed.clear()
                self._release(member, start, ranges, now_us, delay_us or 0, reasons[reason] or "released")
            else:
                is_reject = disposition == Disposition.REJECT
                failed += self.failed(member.number, start, ranges, is_reject, delay_us, reasons[reason], now_us)
            member.progressed(end - start)
        self._retries.add_each(failed, False)

    def failed(
        self, consumer: int, start: int, ranges: list[InFlightRange], is_reject: bool, delay_us: int | None,
        reason: str, now_us: int,
    ) -> Iterator[tuple[MessageRange, int, int, Failure]]:  # fmt: skip
        """Yield the retries of failed messages; make dead letters of those that are rejected or out of attempts."""
        end = start
        for messages, attempt, session_expiries in ranges:
            begin, end = end, end + messages.total
            if is_reject or attempt >= self.settings.max_attempts:
                in_flight = InFlightRange(messages, attempt, session_expiries)
                why = reason or ("rejected" if is_reject else "out of attempts")
                self._bury(consumer, start, in_flight, why, now_us)
                self.slots.settled(consumer, begin, end)
                continue
            self.slots.returned(consumer, begin, end)
            delay = self.settings.delay_us(attempt) if delay_us is None else delay_us
            yield messages, attempt + 1, session_expiries, Failure(reason, consumer, start, now_us, now_us + delay)

    def let_go(self, member: Member, why: int, end: int, now_us: int) -> None:
        """Make retries of the messages before *end* of a leaving consumer, or (CLOSED) drop them."""
        if why == LeaveReason.EXPIRED:
            self.expire_session(member, end, now_us)
        elif why == LeaveReason.LEFT:
            for start, stop in member.in_flight.unhandled(end=end):
                self._counts.released += stop - start
                self._release(member, start, list(member.in_flight.between(start, stop)), now_us)

    def _release(
        self, member: Member, start: int, ranges: Iterable[InFlightRange], now_us: int, delay_us: int = 0,
        reason: str = "released",
    ) -> None:  # fmt: skip
        ranges = list(ranges)
        self.slots.returned(member.number, start, start + sum(one.messages.total for one in ranges))
        failure = Failure(reason, member.number, start, now_us, now_us + delay_us)
        several = [(in_flight.messages, in_flight.attempt, in_flight.session_expiries) for in_flight in ranges]
        self._retries.add_all(several, member.quarantined, failure)

    def expire_session(self, member: Member, before: int, now_us: int) -> None:
        """Make quarantined retries of the messages before *before*: any of them may have stopped the consumer.

        A message that was in flight alone did stop it: its session expiries count, up to a dead letter.
        """
        is_single = member.quarantined and member.in_flight.count == 1 and member.in_flight.pulls[-1].total == 1
        self.setbacks.session_ended(member, now_us)
        for start, end in member.in_flight.unhandled(end=before):
            self._counts.session_expired += end - start
            failure = Failure("its consumer fell silent", member.number, start, now_us, now_us)
            ranges = list(member.in_flight.between(start, end))
            pieces = list[tuple[MessageRange, int, int]]()
            behind = start
            for in_flight in ranges:
                begin, behind = behind, behind + in_flight.messages.total
                session_expiries = in_flight.session_expiries + is_single
                if session_expiries >= self.settings.max_session_expiries:
                    reason = f"its consumer fell silent {session_expiries} times"
                    self._bury(
                        member.number, start, in_flight._replace(session_expiries=session_expiries), reason, now_us
                    )
                    self.slots.settled(member.number, begin, behind)
                    continue
                self.slots.returned(member.number, begin, behind)
                pieces += [(piece, in_flight.attempt, session_expiries) for piece in split(in_flight.messages)]
            self._retries.add_all(pieces, True, failure)

    def redrive(self, numbers: list[int], now_us: int) -> None:
        """Make retries of dead letters, as if for the first time."""
        for letter in unpacked(chosen(self._dead, numbers)):
            failure = Failure(letter.reason, letter.consumer, letter.delivery_sequence, now_us, now_us)
            self.slots.came([letter.messages])
            self._retries.add(letter.messages, 1, 0, False, failure)
            self._dead.take_out(letter.number, letter.number + 1)

    def _bury(self, consumer: int, start: int, in_flight: InFlightRange, reason: str, now_us: int) -> None:
        self._counts.died += in_flight.messages.total
        self._dead.add(letters_of(consumer, start, in_flight, reason, now_us))
