"""The short way: one small batch from its bytes to the pull that waits for it, or an ack and the next pull, at once.

Each method decides first, by guards that change nothing, and then has the owners of the state make the change: the
methods that the general way calls in a turn. Where one guard says no, the method returns that, and the caller takes the
general way, which finds everything as it was. Files and answers are the same both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from qmq.broker.delivery.encode import PIECE_BYTES
from qmq.broker.delivery.pull import Delivery
from qmq.broker.groups.group import Subscription, Waiting
from qmq.broker.groups.member import Member
from qmq.broker.groups.membership import MessageKind, Offer
from qmq.broker.groups.message_ranges import range_of_run
from qmq.broker.journal.write_gate import LATER_US, WriteGate
from qmq.broker.ports.commands import QUIET_US, Now, Pull
from qmq.broker.ports.effects import Acked, Effect, PulledMessages, Sent, SyncWanted
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.publish.publish import Intake
from qmq.errors import InternalError, StorageError
from qmq.format.batch import EntryRow, made
from qmq.storage.store import Store

#: The answers that follow from one small batch at once: to its sender, unless a sync comes first; to pulls; and to the
#: acks that are answered with those.
Answers = tuple[Sent | None, list[PulledMessages], list[Acked]]
_NO_PULLS: Final[list[PulledMessages]] = []
_NO_ACKS: Final[list[Acked]] = []
#: Pulls with a shorter timeout take the general way, since nobody looks at timers before.
LEAST_TIMEOUT_MS: Final = QUIET_US // 1_000
assert LATER_US >= QUIET_US


class ShortWay:
    """The short way of a broker whose store has one partition. It is called between turns: nothing is staged."""

    def __init__(
        self, store: Store, limits: BrokerLimits, intake: Intake, delivery: Delivery, gate: WriteGate,
        effects: list[Effect],
    ) -> None:  # fmt: skip
        self._store = store
        self._consumer_log = store.partitions[0].consumer_log
        self._most_count, self._most_bytes = limits.max_pull_count, limits.max_pull_bytes
        self._intake = intake
        self._arrivals = delivery.arrivals
        self._waiting_pulls = delivery.waiting
        self._find: Callable[[tuple[int, int]], Subscription | None] = delivery.subscriptions.by_number.get
        self._gate = gate
        self._effects = effects
        self._is_open = True
        self._tracker = delivery.tracker
        self._server = delivery.server
        #: Whether something was left to a turn since a caller last set this to False.
        self.is_unfinished = False
        #: Whether batches wait for a sync: ``take_syncs`` has to follow.
        self.is_sync_wanted = False

    def close(self) -> None:
        """Take nothing more: the broker stops."""
        self._is_open = False

    # --- a batch ------------------------------------------------------------------------------------------------------

    def send(
        self, connection: int, request: int, batch: memoryview, size: int, flush: bool, now: Now
    ) -> Answers | None:  # fmt: skip
        """Store a batch, of *size* bytes, and hand it to the pulls that wait for it; return the answers.

        Return None, with nothing changed, where that is not simple. The view is writable, and free again on return.
        """
        if not self._is_open:
            return None
        consumer_log, arrivals = self._consumer_log, self._arrivals
        row = consumer_log.end_row
        entry = self._intake.take_one(connection, request, batch, size, flush, now)
        if entry is None:
            return None
        if flush:
            self.is_sync_wanted = True
            return None, _NO_PULLS, _NO_ACKS
        sent = made(Sent, (connection, request, entry[1], entry[2], 0, entry[0]))
        if consumer_log.visible_row <= row:
            return sent, _NO_PULLS, _NO_ACKS  # the turn of a sync makes it visible
        if not self._waiting_pulls.count:
            arrivals.pass_over(row)
            return sent, _NO_PULLS, _NO_ACKS
        watching = arrivals.see(row, entry)
        if watching is None:
            self.is_unfinished = True
            return sent, _NO_PULLS, _NO_ACKS
        handed = list[PulledMessages]()
        for subject_filter in watching:
            if subject_filter.waiting:
                given = None
                if not self.is_unfinished:  # where a pull is left to the turn, none of its group comes before it
                    given = self._hand(next(iter(subject_filter.waiting.values())), batch, row, entry, now)
                if given is None:
                    arrivals.wake(subject_filter, 0, entry)
                    self.is_unfinished = True
                else:
                    handed.append(given)
        if not handed:
            return sent, handed, _NO_ACKS
        acks = self._write(handed)
        return (sent, _NO_PULLS, _NO_ACKS) if acks is None else (sent, handed, acks)

    def next_deadline_us(self, now_us: int) -> int | None:
        """Return when something is due that the short way may have made: acks to be answered, or a pull's timeout."""
        deadlines = self._gate.next_deadline_us(now_us), self._waiting_pulls.next_deadline_us()
        return min((one for one in deadlines if one is not None), default=None)

    def take_syncs(self) -> list[SyncWanted]:
        """Return the sync that batches wait for: one for all that were read together. There is none while one runs."""
        self.is_sync_wanted = False
        effects = self._effects
        before = len(effects)
        self._intake.want_sync()
        wanted = effects[before:]
        del effects[before:]
        return wanted  # type: ignore[return-value]  # want_sync asks for nothing else

    def _hand(
        self, waiting: Waiting, batch: memoryview, row: int, entry: EntryRow, now: Now
    ) -> PulledMessages | None:  # fmt: skip
        """Give the pull that has waited longest for a filter all of a *batch*, which was just written; None, with
        nothing changed, where that is not simple.
        """
        connection, request, _, most, least, most_bytes, _, expected, checks = waiting.pull
        subscription = waiting.subscription
        ledger, member = subscription.group.ledger, subscription.member
        if ledger is None or member is None or subscription.plain_at != ledger.version:
            return None
        first, _, _, number, count, _, _, _, _, run_size, size = entry
        subject_filter, in_flight, settings = subscription.filters[0], member.in_flight, ledger.settings
        start, answer = in_flight.next_sequence, run_size + PIECE_BYTES
        if answer < size:
            answer = size
        monotonic_us, wall_us = now
        if (
            not least <= count <= most
            or count > self._most_count
            or answer > most_bytes
            or answer > self._most_bytes
            or (expected is not None and expected != start)
            or start + count - in_flight.ack_floor > settings.max_unacked
            or in_flight.size + answer > settings.max_unacked_bytes
            or checks
            or subject_filter.reading
            or not self._gate.is_clear(monotonic_us)
        ):
            return None
        messages = range_of_run(self._store, 0, entry, subject_filter)
        if not subject_filter.pass_run(number, first, first + count, row, messages.total):
            return None
        where = []
        if not subject_filter.exact:
            where = [[subject_filter.prefix, subject_filter.positions_now(self._store, [self._intake.visible(0)])]]
        ledger.pulled(member, [messages], size, wall_us, where)
        member.seen_us = monotonic_us
        self._waiting_pulls.remove(waiting)
        subject_filter.reads.clear()
        return made(PulledMessages, (connection, request, [batch], size, count, None, ((start, count, 1),), ()))

    # --- an ack, and the next pull ------------------------------------------------------------------------------------

    def ack(
        self, connection: int, request: int, number: int, start: int, end: int, pull: Pull | None, now: Now
    ) -> tuple[int, Answers | None]:  # fmt: skip
        """Ack the delivery sequences [start, end) of a subscription, with an answer that may wait; then do its next
        *pull*, if there is one, as ``pull`` does.

        Return how many of the two were done: fewer, with nothing changed for the others, where that is not simple; and
        the answer to the pull, unless it waits.
        """
        subscription = self._find((connection, number))
        if subscription is None or not self._is_open:
            return 0, None
        ledger, member = subscription.group.ledger, subscription.member
        if (
            ledger is None
            or member is None
            or subscription.plain_at != ledger.version
            or connection in self._waiting_pulls.by_connection
            or not member.in_flight.is_next(start, end)
            or not self._gate.is_clear(now.monotonic_us)
        ):
            return 0, None
        monotonic_us, wall_us = now
        member.seen_us = monotonic_us
        ledger.ack_next(member, start, end, wall_us)
        self._gate.answer_later(made(Acked, (connection, request, 0, True)), monotonic_us)
        if pull is None or pull.subscription != number:
            return 1, None
        done, answers = self._pull(pull, subscription, now)
        return 1 + done, answers

    def pull(self, pull: Pull, now: Now) -> tuple[int, Answers | None]:
        """Let a pull wait for messages, or answer it with all that are ready.

        Return 1, and the answer unless it waits; or 0, with nothing changed, where that is not simple.
        """
        subscription = self._find((pull.connection, pull.subscription))
        if (
            subscription is None
            or not self._is_open
            or pull.connection in self._waiting_pulls.by_connection
            or subscription.group.ledger is None
            or subscription.plain_at != subscription.group.ledger.version
            or not self._gate.is_clear(now.monotonic_us)
        ):
            return 0, None
        return self._pull(pull, subscription, now)

    def _pull(self, pull: Pull, subscription: Subscription, now: Now) -> tuple[int, Answers | None]:
        """Do a pull as ``pull``; its connection has none that waits, its subscription is plain, the gate is clear."""
        _, _, _, most, least, most_bytes, timeout_ms, expected, checks = pull
        member = subscription.member
        if (
            member is None
            or not 1 <= most >= least
            or not most_bytes
            or timeout_ms < LEAST_TIMEOUT_MS
            or checks
            or (expected is not None and expected != member.in_flight.next_sequence)
        ):
            return 0, None
        if subscription.filters[0].has_more(self._store):
            return self._answer(pull, subscription, member, now)
        member.seen_us = now.monotonic_us
        self._waiting_pulls.add(Waiting(pull, subscription, now.monotonic_us + timeout_ms * 1_000))
        return 1, None

    def _answer(
        self, pull: Pull, subscription: Subscription, member: Member, now: Now
    ) -> tuple[int, Answers | None]:  # fmt: skip
        """Answer a pull with the messages that are ready, if there are enough of them, in memory."""
        ledger, in_flight = subscription.group.ledger, member.in_flight
        assert ledger is not None
        settings = ledger.settings
        room = settings.max_unacked - (in_flight.next_sequence - in_flight.ack_floor)
        room_bytes = settings.max_unacked_bytes - in_flight.size
        if room <= 0 or room_bytes <= 0:
            return 0, None
        most, size = min(pull.max_count, self._most_count, room), min(pull.max_bytes, self._most_bytes, room_bytes)
        self._tracker.now = now
        try:
            answer = self._server.answer_at_once(pull, subscription, made(Offer, (MessageKind.FRESH, most, size, ())))
        except InternalError:  # the general way finds out, and says so
            answer = None
        if answer is None:
            return 0, None
        member.seen_us = now.monotonic_us
        handed = [answer]
        acks = self._write(handed)
        return 1, (None, [], []) if acks is None else (None, handed, acks)

    def _write(self, handed: list[PulledMessages]) -> list[Acked] | None:
        """Write the records of pulls; return the answers to acks that go with them. Return None where that is left to
        the turn: one of the pulls of the batch is, so all records are written at once; or the disk takes nothing, and
        the turn keeps back the answers until it does.
        """
        acks = self._gate.take_later(handed)
        if not self.is_unfinished:
            try:
                self._store.groups.write()
                return acks
            except StorageError:
                self.is_unfinished = True
        # The buffer that a batch was received into is used again, as soon as this returns.
        kept = [one._replace(buffers=[bytes(buffer) for buffer in one.buffers]) for one in handed]
        self._effects += [*acks, *kept]
        return None
