"""A consumer of a group, around the client's own record of what it holds (``qmq.net.client.consumer.in_flight``)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, NamedTuple, cast

from qmq.broker.ports.commands import Ack, Command, DispositionRange, HandBack, Heartbeat, Pull, Subscribe, Unsubscribe
from qmq.broker.ports.effects import (
    Acked,
    Effect,
    HandedBack,
    HeartbeatSeen,
    PulledMessages,
    Refused,
    Subscribed,
    Unsubscribed,
)
from qmq.errors import Fenced, QmqError
from qmq.format.lanes import slot_of
from qmq.format.layout import LANE_ORDERED
from qmq.format.pieces import read_answer
from qmq.net.client.consumer.in_flight import DispositionOwner, InFlightWindow
from qmq.net.protocol.types import ConsumerState, Disposition, KnownConsumer
from tests.sim.tally import MAX_ATTEMPTS, MAX_SESSION_EXPIRIES, Holder, Key, Tally

RETRY_DELAYS_US: Final = (300_000, 700_000, 1_500_000)
MAX_UNACKED: Final = 24
SETTINGS: Final = (
    ("max_attempts", MAX_ATTEMPTS),
    ("max_session_expiries", MAX_SESSION_EXPIRIES),
    ("max_unacked", MAX_UNACKED),
    ("retry_delays_us", RETRY_DELAYS_US),
)


class Got(NamedTuple):
    """A message as this consumer has it."""

    message: int
    attempt: int
    #: Subject and lane of a message with an order key.
    slot: int | None = None


class Worker:
    """One process that is a consumer, from its start to its end; connections come and go."""

    def __init__(self, name: str, group: str, prefixes: tuple[str, ...], tally: Tally, life: int, seed: int) -> None:
        self.name, self.group, self.prefixes, self.tally, self.life = name, group, prefixes, tally, life
        self.chance = random.Random(seed)
        self.nonce = self.chance.randbytes(8)
        self.client = self.chance.randbytes(8)
        self.in_flight: InFlightWindow | None = None
        #: As InFlightWindow wants of whom it belongs to.
        self.refused = 0
        self.has_left = False
        self.connection = 0
        self.subscription: int | None = None
        self.got: dict[int, Got] = {}
        #: Handed back, and not answered; and whether the broker may have taken it already.
        self.backs: list[DispositionRange] = []
        self.asked: dict[int, Command] = {}
        self.is_gone = False
        self.silent_until_us = 0

    @property
    def key(self) -> Key:
        """Who it is now."""
        assert self.in_flight is not None
        consumer_state = self.in_flight.consumer_state
        return self.group, self.name, consumer_state.epoch, consumer_state.generation, self.life

    def open_sequences(self) -> list[int]:
        """What it has, and has given no disposition on."""
        return [sequence for sequence in self.got if self.in_flight is not None and self.in_flight.is_open(sequence)]

    @property
    def unconfirmed(self) -> int:
        """Acknowledgements that the broker has not confirmed."""
        return self.in_flight.unconfirmed if self.in_flight is not None else 0

    def want_send(self) -> None:
        """There are acknowledgements: ``act`` sends them at some time."""

    def dropped(self, in_flight: InFlightWindow, sequence_ranges: list[tuple[int, int]]) -> None:
        """Messages are known by their numbers here: it still has them."""

    # --- what it asks ------------------------------------------------------------------------------------------------

    def act(self, request: int, connection: int) -> Command:
        """Its next command; *connection* is a fresh one, should it have none."""
        command = self._next(request, connection)
        self.asked[command.request] = command  # type: ignore[union-attr]
        return command

    def _next(self, request: int, connection: int) -> Command:
        if self.subscription is None:
            self.connection = self.connection or connection
            start = self.connection, request, self.group, self.prefixes, self.name, None
            return Subscribe(*start, self.nonce, self.client, False, SETTINGS, known=self._known())
        assert self.in_flight is not None
        kind, mine = self.chance.random(), self.open_sequences()
        if self.backs:
            return self._hand_back(request)
        if kind < 0.4 and mine:
            for sequence in self.chance.sample(mine, self.chance.randrange(len(mine)) + 1):
                self.in_flight.ack(sequence, sequence + 1)
        elif kind < 0.5 and mine:
            for sequence in self.chance.sample(mine, min(self.chance.choice((1, 1, 2, 20)), len(mine))):
                self._begin_back(sequence)
            if self.backs:
                return self._hand_back(request)
        if self.unconfirmed and (intervals := self.in_flight.take_acks()):
            self.tally.acknowledging(self._messages(intervals), 1)
            return Ack(self.connection, request, self.subscription, tuple(intervals))
        if any(isinstance(asked, Pull) for asked in self.asked.values()):  # one at a time
            return Heartbeat(self.connection, request, self.client, 0)
        return self._pull(request)

    def _known(self) -> KnownConsumer | None:
        if self.in_flight is None:
            return None
        consumer_state = self.in_flight.consumer_state
        return KnownConsumer(
            consumer_state.since_us, consumer_state.generation, consumer_state.epoch, self.in_flight.expected
        )

    def _pull(self, request: int) -> Pull:
        assert self.subscription is not None
        assert self.in_flight is not None
        chance = self.chance
        max_count, max_bytes = chance.choice((1, 3, 10, 100)), chance.choice((120, 1_000, 1 << 20, 1 << 20))
        wait_ms = chance.choice((0, 0, 50))
        limits = max_count, 1, max_bytes, wait_ms
        return Pull(self.connection, request, self.subscription, *limits, self.in_flight.expected)

    def _begin_back(self, sequence: int) -> None:
        disposition = self.chance.choice((Disposition.NACK, Disposition.NACK, Disposition.RELEASE, Disposition.REJECT))
        delay_us = None if disposition is Disposition.REJECT else self.chance.choice((None, None, 0, 200_000))
        if disposition is Disposition.REJECT and self.chance.random() < 0.7:
            disposition = Disposition.RELEASE
        assert self.in_flight is not None
        if not self.in_flight.is_open(sequence):
            return  # it goes back with an earlier one of its order key
        slot = self.got[sequence].slot
        if slot is not None and any(
            one.slot == slot and behind > sequence and self.in_flight.is_unconfirmed(behind, behind + 1)
            for behind, one in self.got.items()
        ):
            return  # the acknowledgement of that one would be refused
        self.in_flight.begin_disposition(sequence, sequence + 1)
        self.backs.append(DispositionRange(sequence, sequence + 1, disposition, delay_us, "it broke"))
        if disposition is Disposition.REJECT:
            return
        for start, end in self.in_flight.behind(sequence, sequence + 1):
            self.in_flight.begin_disposition(start, end)
            for follower in range(start, end):
                self.tally.counts["went back behind another"] += 1
                back = DispositionRange(follower, follower + 1, Disposition.RELEASE, None, "it follows")
                self.backs.append(back)

    def _hand_back(self, request: int) -> Command:
        assert self.subscription is not None
        for back in self.backs:
            got = self.got[back.start]
            if back.disposition == Disposition.NACK:
                self.tally.nacking(got.message, got.attempt)
            elif back.disposition == Disposition.REJECT:
                self.tally.letter(got.message).may_be_dead = True
        return HandBack(self.connection, request, self.subscription, tuple(self.backs))

    def leave(self, request: int) -> Command:
        """Stop cleanly: what it holds is handed out again."""
        assert self.subscription is not None
        self.is_gone = True
        command = Unsubscribe(self.connection, request, self.subscription)
        self.asked[request] = command
        return command

    def disconnected(self) -> None:
        """Nothing that was asked will be answered."""
        self.asked.clear()
        self.connection, self.subscription = 0, None

    # --- what it hears -----------------------------------------------------------------------------------------------

    def hear(self, effect: Effect, now_us: int) -> list[tuple[int, Holder]]:
        """An answer. What it was given that another had: by message, who."""
        command = self.asked.pop(effect.request, None)  # type: ignore[union-attr]
        match effect:
            case PulledMessages() if command is not None:
                return self._given(effect, now_us)
            case Subscribed(subscription=subscription, consumer_state=consumer_state) if command is not None:
                assert consumer_state is not None
                self.subscription = subscription
                self._joined(ConsumerState(*consumer_state))
            case Acked(refused=refused) if isinstance(command, Ack):
                self._acked(command.intervals, refused)
            case HandedBack(refused=refused) if isinstance(command, HandBack):
                self._handed_back(refused, now_us)
            case Refused(error=error):
                self._refused(command, error)
            case Unsubscribed() | HeartbeatSeen():
                pass
            case _:
                assert command is None, effect
        return []

    def _joined(self, consumer_state: ConsumerState) -> None:
        before = self.in_flight
        if before is not None and before.consumer_state.is_that_of(consumer_state) and before.fenced is None:
            before.rejoined(consumer_state)
            return
        self.in_flight = InFlightWindow(cast(DispositionOwner, self), consumer_state)
        self.got.clear()
        self.backs.clear()

    def _given(self, answer: PulledMessages, now_us: int) -> list[tuple[int, Holder]]:
        runs, damaged = read_answer(memoryview(b"".join(answer.buffers)))
        assert not damaged
        assert self.in_flight is not None
        had = []
        for run in self.in_flight.number(runs, [field for one in answer.ranges for field in one]):
            slot = slot_of(run.lane) if run.lane >= LANE_ORDERED else None
            for sequence, body in enumerate(run.bodies(), run.delivery_sequence):
                message = int(bytes(body).rstrip(b"."))
                assert any(run.subject.startswith(prefix) for prefix in self.prefixes), run.subject
                before = self.tally.delivered(message, Holder(self.key, sequence), run.attempt, now_us)
                if before is not None:
                    had.append((message, before))
                self.got[sequence] = Got(message, run.attempt, slot)
        if (
            self.in_flight.consumer_state.generation == 1
        ):  # else that it had left, and what it handed back, may be forgotten
            assert len(self.open_sequences()) <= MAX_UNACKED, "it has more than its window"
        return had

    def _acked(self, intervals: tuple[int, ...], refused: int) -> None:
        assert self.in_flight is not None
        self.in_flight.confirm(intervals, refused)
        self.tally.acknowledging(self._messages(intervals), -1)
        if refused:
            self.tally.counts["acknowledgements refused"] += refused
            return
        self.tally.confirmed(self._messages(intervals), self.key)

    def _messages(self, intervals: Sequence[int]) -> list[int]:
        pairs = zip(intervals[::2], intervals[1::2], strict=True)
        return [self.got[sequence].message for start, end in pairs for sequence in range(start, end)]

    def _handed_back(self, refused: tuple[int, ...], now_us: int) -> None:
        backs, self.backs = self.backs, []
        self.tally.counts["fenced"] += len(refused)  # the broker took them before, or holds them no more
        for number, back in enumerate(backs):
            if number in refused:
                continue
            got = self.got[back.start]
            holder = Holder(self.key, back.start)
            self.tally.counts[Disposition(back.disposition).name.lower()] += 1
            if back.disposition == Disposition.NACK:
                delays = RETRY_DELAYS_US[min(got.attempt, len(RETRY_DELAYS_US)) - 1]
                delay_us = delays if back.delay_us is None else back.delay_us
                self.tally.nacked(got.message, got.attempt, now_us + delay_us, holder)
            elif back.disposition == Disposition.REJECT:
                self.tally.rejected(got.message)

    def _refused(self, command: Command | None, error: QmqError) -> None:
        if command is None or not isinstance(error, Fenced):
            assert command is None or error.retryable, error
            return
        self.tally.counts["fenced"] += 1
        if isinstance(command, Ack):
            self.tally.acknowledging(self._messages(command.intervals), -1)
        if isinstance(command, HandBack):
            self.backs.clear()
        self.is_gone |= isinstance(command, Subscribe)  # another has taken over for good
        if isinstance(command, Ack | Pull):
            assert self.in_flight is not None
            self.in_flight.fence(error)
            self.subscription = None
            self.backs.clear()
            self.got.clear()
