"""The short way: one small batch from its bytes to the pull that waits for it, or an ack and the next pull, at once.

Each method decides first, by guards that change nothing, and then has the owners of the state make the change: the
methods that the general way calls in a turn. Where one guard says no, the method returns that, and the caller takes the
general way, which finds everything as it was. Files and answers are the same both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from qmq.broker.delivery.encode import entry_bytes
from qmq.broker.delivery.pull import Delivery
from qmq.broker.groups.group import Subscription, Waiting
from qmq.broker.groups.message_ranges import range_of_run
from qmq.broker.journal.write_gate import WriteGate
from qmq.broker.ports.commands import Now, Pull
from qmq.broker.ports.effects import Acked, Effect, PulledMessages, Sent
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.publish.publish import Intake
from qmq.errors import StorageError
from qmq.format.batch import EntryRow, made
from qmq.storage.store import Store

#: What one small batch leads to at once: the answer to its sender, unless a sync comes first, and those to pulls, each
#: behind the answers to acks that go with it.
Answers = tuple[Sent | None, list[PulledMessages], list[Acked]]
_NOBODY: Final[list[PulledMessages]] = []
_NO_ACKS: Final[list[Acked]] = []


class ShortWay:
    """The short way of a broker whose store has one partition."""

    def __init__(
        self, store: Store, limits: BrokerLimits, intake: Intake, delivery: Delivery, gate: WriteGate,
        effects: list[Effect],
    ) -> None:  # fmt: skip
        self._store = store
        self._part = store.partitions[0]
        self._limits = limits
        self._intake = intake
        self._arrivals = delivery.arrivals
        self._waiting_pulls = delivery.waiting
        self._find: Callable[[tuple[int, int]], Subscription | None] = delivery.subscriptions.by_number.get
        self._gate = gate
        self._effects = effects
        self._is_open = True

    def close(self) -> None:
        """Take nothing more: the broker stops."""
        self._is_open = False

    @property
    def is_unfinished(self) -> bool:
        """Whether a turn has work that the short way has left to it."""
        return bool(self._effects or self._arrivals.ready)

    # --- a batch ------------------------------------------------------------------------------------------------------

    def send(
        self, connection: int, request: int, batch: memoryview, size: int, flush: bool, now: Now
    ) -> Answers | None:  # fmt: skip
        """Store a batch, of *size* bytes, and hand it to the pulls that wait for it; return the answers.

        Return None, with nothing changed, where that is not simple. The view is writable, and free again on return.
        """
        if not self._is_open:
            return None
        row = self._part.consumer_log.end_row
        entry = self._intake.take_one(connection, request, batch, size, flush, now)
        if entry is None:
            return None
        if flush:
            return None, _NOBODY, _NO_ACKS
        answer = made(Sent, (connection, request, entry[1], entry[2], 0, entry[0]))
        if not self._waiting_pulls.count or self._part.consumer_log.visible_row <= row:
            return answer, _NOBODY, _NO_ACKS  # a turn sees the row, should a pull come that waits for it
        handed, acks = self._hand_out(row, entry, now)
        return answer, handed, acks

    def _hand_out(self, row: int, entry: EntryRow, now: Now) -> tuple[list[PulledMessages], list[Acked]]:
        """Hand a visible batch to the pulls that wait for it; make ready those that are for the turn."""
        watching = self._arrivals.see(row, entry)
        handed = list[PulledMessages]()
        if not watching:
            return handed, _NO_ACKS
        is_clear = self._gate.is_clear(now.monotonic_us)
        for subject_filter in watching:
            if subject_filter.waiting:
                waiting = next(iter(subject_filter.waiting.values()))
                given = self._hand(waiting, row, entry, now) if is_clear else None
                if given is None:
                    self._arrivals.wake(subject_filter, 0, entry)
                else:
                    handed.append(given)
        if not handed:
            return handed, _NO_ACKS
        acks = self._gate.take_later(handed)
        try:
            self._store.groups.write()
        except StorageError:  # the turn tries again, and keeps back the answers until it can
            self._effects += [*acks, *handed]
            return [], _NO_ACKS
        return handed, acks

    def _hand(self, waiting: Waiting, row: int, entry: EntryRow, now: Now) -> PulledMessages | None:
        """Give the pull that has waited longest for a filter all of a batch; None, with nothing changed, where that is
        not simple.
        """
        subscription, pull = waiting.subscription, waiting.pull
        group, member = subscription.group, subscription.member
        ledger = group.ledger
        if ledger is None or member is None or subscription.plain_at != ledger.version or pull.checks:
            return None
        subject_filter, in_flight, settings = subscription.filters[0], member.in_flight, ledger.settings
        first, position, _, number, count, _, _, _, _, _, size = entry
        start, answer, limits = in_flight.next_sequence, entry_bytes(entry), self._limits
        if (
            subject_filter.reading
            or not subject_filter.is_next(number, first, row)
            or not pull.min_count <= count <= pull.max_count
            or count > limits.max_pull_count
            or answer > pull.max_bytes
            or answer > limits.max_pull_bytes
            or (pull.expected is not None and pull.expected != start)
            or start + count - in_flight.ack_floor > settings.max_unacked
            or in_flight.size + answer > settings.max_unacked_bytes
        ):
            return None
        subject_filter.move(number, first + count, row + 1)
        is_exact = subject_filter.exact
        visible = self._intake.visible(0)
        where = [] if is_exact else [[subject_filter.prefix, subject_filter.positions_now(self._store, [visible])]]
        messages = range_of_run(self._store, 0, entry, subject_filter)
        ledger.pulled(member, [messages], size, now.wall_us, where)
        member.seen_us = now.monotonic_us
        self._waiting_pulls.remove(waiting)
        subject_filter.reads.clear()
        body = self._part.message_log.view(position, size)
        return made(
            PulledMessages, (pull.connection, pull.request, [body], size, count, None, ((start, count, 1),), ())
        )

    # --- an ack, and the next pull ------------------------------------------------------------------------------------

    def ack(self, connection: int, request: int, number: int, start: int, end: int, now: Now) -> bool:
        """Ack the delivery sequences [start, end) of a subscription, with an answer that may wait; return False, with
        nothing changed, where that is not simple.
        """
        subscription = self._find((connection, number))
        if subscription is None or not self._is_open:
            return False
        ledger, member = subscription.group.ledger, subscription.member
        if (
            ledger is None
            or member is None
            or subscription.plain_at != ledger.version
            or connection in self._waiting_pulls
            or not member.in_flight.is_next(start, end)
            or not self._gate.is_clear(now.monotonic_us)
        ):
            return False
        member.seen_us = now.monotonic_us
        ledger.ack(member, [start, end])
        self._gate.answer_later(made(Acked, (connection, request, 0, True)), now.monotonic_us)
        return True

    def wait(self, pull: Pull, now: Now) -> bool:
        """Let a pull wait for messages, of which there are none; return False, with nothing changed, where that is not
        simple.
        """
        subscription = self._find((pull.connection, pull.subscription))
        if subscription is None or not self._is_open:
            return False
        ledger, member = subscription.group.ledger, subscription.member
        if (
            ledger is None
            or member is None
            or subscription.plain_at != ledger.version
            or not 1 <= pull.max_count >= pull.min_count
            or not pull.max_bytes
            or not pull.timeout_ms
            or (pull.expected is not None and pull.expected != member.in_flight.next_sequence)
            or pull.connection in self._waiting_pulls
            or not self._limits.max_waiting_pulls
            or subscription.filters[0].has_more(self._store)
        ):
            return False
        member.seen_us = now.monotonic_us
        self._waiting_pulls.add(Waiting(pull, subscription, now.monotonic_us + pull.timeout_ms * 1_000))
        return True
