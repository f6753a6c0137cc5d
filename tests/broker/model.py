"""The model of a group in plain lists and dicts: the rules, without the parts that make them fast.

A message is ready, in flight at a consumer, a retry, a dead letter, or done. Only a seek makes it more than one of
these: it makes messages ready again, and retries and dead letters stay.

- A message is ready until it is handed out for the first time, as attempt 1, in the order of the log.
- A consumer has pulled messages in flight, by delivery sequence, until it acks them or hands them back; never more than
  the window, and no other consumer gets them meanwhile. A repeated pull gets the same, without handled messages.
- A nack counts: the message comes again as the next attempt, after the delay asked for or else the group's delay for
  the failed attempt; it is dead after the last one. A release does not count, and is prompt. A rejected message is dead
  at once.
- A session that expires, or is taken over, fails no attempt. Its messages become retries in up to ten pieces a range,
  each quarantined: it goes to a consumer that has nothing in flight, which gets nothing else until that is handled.
  Only a message that was quarantined as the only one comes nearer to max_session_expiries.
- Another epoch resumes what the one before had in flight, if that did not leave. The second takeover in a row without a
  handled message expires the session; with quarantined messages each takeover does.
- A resend makes retries of the first attempt of all messages that have none of these lives; dead ones among them are
  dead no more.
- Calls of a consumer that expired, left or was taken over from are refused, and change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.broker.groups.group_state import MessageEvent, MessageState
from qmq.net.protocol.types import KnownConsumer

Message = tuple[str, int]  # subject, sequence


class Step(NamedTuple):
    """An event changed the state of one message."""

    before: MessageState
    event: MessageEvent
    after: MessageState


class Refusal(Exception):
    """The broker must refuse the call, and nothing changes."""


class Given(NamedTuple):
    """One message of an answer; *session_expiries* as the broker counts them."""

    sequence: int
    message: Message
    attempt: int
    session_expiries: int


class InFlightMessage(NamedTuple):
    """A message in flight; messages of one *part* were one range when they were handed out."""

    message: Message
    attempt: int
    session_expiries: int
    part: int
    is_single: bool = False  # it was handed out alone as one message


class Waiting(NamedTuple):
    """A retry: messages in a row, with their due time."""

    messages: tuple[Message, ...]
    due_us: int
    attempt: int
    session_expiries: int
    quarantined: bool

    @property
    def state(self) -> MessageState:
        return MessageState.QUARANTINED_RETRY if self.quarantined else MessageState.RETRYING


class Letter(NamedTuple):
    """A dead letter."""

    message: Message
    attempt: int
    session_expiries: int
    reason: str


class Place(NamedTuple):
    """The state of a consumer; ``in_flight``: message, attempt and session expiries by delivery sequence."""

    is_there: bool
    epoch: int
    ack_floor: int
    next_sequence: int
    is_quarantined: bool
    in_flight: dict[int, tuple[Message, int, int]]


class GroupContent(NamedTuple):
    """The state of a group at a moment."""

    ready: int
    places: dict[str, Place]
    waiting: list[Waiting]
    dead: list[Letter]


def undated(waiting: Waiting, now_us: int) -> Waiting:
    """Return a retry without its due time if it is due: since when does not matter."""
    return waiting if waiting.due_us > now_us else waiting._replace(due_us=0)


@dataclass
class Consumer:
    """One consumer of a group."""

    name: str
    transient: bool
    since_us: int
    epoch: int = 0
    nonce: bytes = b""
    is_there: bool = False
    seen_us: int = 0
    in_flight: dict[int, InFlightMessage] = field(default_factory=dict)
    #: Delivery sequences that it has handed back: to acknowledge one of them is refused.
    returned: set[int] = field(default_factory=set)
    next_sequence: int = 0
    is_quarantined: bool = False
    has_progress: bool = False
    takeovers: int = 0

    @property
    def state(self) -> MessageState:
        """The state of its messages."""
        return MessageState.QUARANTINED_IN_FLIGHT if self.is_quarantined else MessageState.IN_FLIGHT

    @property
    def ack_floor(self) -> int:
        """The delivery sequence below which all messages are handled."""
        return min(self.in_flight, default=self.next_sequence)

    def consumer_state(self) -> Place:
        """Return its state."""
        in_flight = {number: one[:3] for number, one in sorted(self.in_flight.items())}
        numbers = self.epoch, self.ack_floor, self.next_sequence
        return Place(self.is_there, *numbers, self.is_quarantined, in_flight)

    def drop(self) -> None:
        """Drop all messages in flight."""
        self.in_flight, self.returned, self.is_quarantined, self.takeovers = {}, set(), False, 0

    def parts(self, start: int, end: int) -> list[dict[int, InFlightMessage]]:
        """Return what is in flight of [start, end): neighbours that were one range go together."""
        found = list[dict[int, InFlightMessage]]()
        before = None
        for sequence in sorted(number for number in self.in_flight if start <= number < end):
            key = sequence, self.in_flight[sequence].part
            if before != (sequence - 1, key[1]):
                found.append({})
            found[-1][sequence] = self.in_flight[sequence]
            before = key
        return found


class Group:
    """One group, from when it is made until it is deleted."""

    def __init__(self, messages: Iterable[Message], session_timeout_us: int) -> None:
        self.ready: list[Message] = []
        #: The changes to messages, one for each message.
        self.steps: list[Step] = []
        self.consumers: dict[str, Consumer] = {}
        self.waiting: list[Waiting] = []
        self.dead: list[Letter] = []
        #: The state in which the last life of a message has ended.
        self.ended: dict[Message, MessageState] = {}
        self.max_attempts = 16
        self.max_session_expiries = 3
        self.max_unacked = 10_000
        self.delays_us: tuple[int, ...] = (1,)
        self.session_timeout_us = session_timeout_us
        self._parts = 0
        #: The last answer had retries: it is the turn of new messages.
        self.was_again = False
        #: The consumer that gets nothing until it has nothing in flight, and then quarantined retries.
        self.clearing: Consumer | None = None
        self.send(messages)

    def send(self, messages: Iterable[Message]) -> None:
        """Messages of the log become ready."""
        for message in messages:
            self.ready.append(message)
            self.steps.append(Step(MessageState.STORED, MessageEvent.VISIBLE, MessageState.READY))

    def content(self, now_us: int) -> GroupContent:
        """Return the whole state."""
        places = {one.name: one.consumer_state() for one in self.consumers.values()}
        waiting = [undated(one, now_us) for one in self.waiting]
        return GroupContent(len(self.ready), places, sorted(waiting), sorted(self.dead))

    # --- who is there ------------------------------------------------------------------------------------------------

    def hello(
        self, name: str, nonce: bytes, *, transient: bool, monotonic_us: int, now_us: int, known: KnownConsumer | None
    ) -> Consumer:
        """Join as that consumer. Raise Refusal for one that another program has taken over from."""
        one = self.consumers.get(name)
        least = 0
        if one is not None and known is not None and known.since_us == one.since_us:
            if one.nonce != nonce and 0 < known.epoch < one.epoch:
                raise Refusal
            least = known.epoch
            if one.is_there:
                self.ack(one, known.handled)
        if one is None:
            one = self.consumers[name] = Consumer(name, transient, now_us)
        elif one.is_there and one.nonce == nonce:
            one.seen_us = monotonic_us
            return one
        elif one.is_there:
            one.takeovers = 0 if one.has_progress or not one.in_flight else one.takeovers + 1
            if one.takeovers > 1 or one.is_quarantined:
                self._expire_session(one, now_us)
        one.epoch = max(one.epoch, least) + 1
        one.nonce, one.is_there, one.has_progress, one.seen_us = nonce, True, False, monotonic_us
        return one

    def check(self, one: Consumer, epoch: int) -> None:
        """Raise Refusal if a call of that epoch is not of the current consumer."""
        if self.consumers.get(one.name) is not one or not one.is_there or one.epoch != epoch:
            raise Refusal

    def leave(self, one: Consumer, now_us: int) -> None:
        """Leave: what is in flight becomes retries."""
        for part in one.parts(0, one.next_sequence):
            self._wait(part.values(), now_us, one.state, MessageEvent.LEAVE)
        self._gone(one)

    def tick(self, monotonic_us: int, now_us: int) -> None:
        """Expire silent consumers."""
        for one in list(self.consumers.values()):
            if one.is_there and monotonic_us >= one.seen_us + self.session_timeout_us:
                self._expire_session(one, now_us)
                self._gone(one)

    def _expire_session(self, one: Consumer, now_us: int) -> None:
        for part in one.parts(0, one.next_sequence):
            in_flight = list(part.values())
            attempt, session_expiries = in_flight[0].attempt, in_flight[0].session_expiries + in_flight[0].is_single
            if session_expiries >= self.max_session_expiries:
                reason = f"its consumer fell silent {session_expiries} times"
                several = [each._replace(session_expiries=session_expiries) for each in in_flight]
                self._bury(several, reason, one.state, MessageEvent.LAST_SESSION_EXPIRY)
                continue
            size = -(-len(in_flight) // 10)
            for start in range(0, len(in_flight), size):
                messages = tuple(each.message for each in in_flight[start : start + size])
                waiting = Waiting(messages, now_us, attempt, session_expiries, quarantined=True)
                self._add(waiting, one.state, MessageEvent.SESSION_EXPIRY)
        one.drop()

    def _gone(self, one: Consumer) -> None:
        one.drop()
        one.is_there = False
        if self.clearing is one:
            self.clearing = None
        if one.transient:
            del self.consumers[one.name]

    # --- pulls -------------------------------------------------------------------------------------------------------

    def give(self, one: Consumer, expected: int, max_count: int, given: Sequence[Given], now_us: int) -> str:
        """Take the answer to a pull; fail unless it is one that the rules allow. Return its kind."""
        again = [(number, *in_flight[:3]) for number, in_flight in sorted(one.in_flight.items()) if number >= expected]
        if again:
            assert list(given) == again[: min(max_count, self.max_unacked)]
            return "in_flight"
        assert [one.sequence for one in given] == list(range(one.next_sequence, one.next_sequence + len(given)))
        due = [waiting.quarantined for waiting in self.waiting if waiting.due_us <= now_us]
        room = self.max_unacked - len(one.in_flight)
        if one.is_quarantined or room <= 0:
            assert not given, "it was to be given nothing"
            return "nothing"
        if any(due):
            self.clearing = self.clearing or one
            if not one.in_flight:
                if self.clearing is one:
                    self.clearing = None
                self._give_alone(one, given, min(max_count, self.max_unacked), now_us)
                return "quarantined"
            if self.clearing is one:
                assert not given, "it is to hold nothing first"
                return "nothing"
        else:
            self.clearing = None
        if not all(due) and (not self.was_again or not self.ready):
            self._give_again(one, given, min(max_count, room), now_us)
            return "again"
        self._give_fresh(one, given, min(max_count, room))
        return "fresh" if given else "nothing"

    def _give_fresh(self, one: Consumer, given: Sequence[Given], limit: int) -> None:
        assert [each.message for each in given] == self.ready[: len(given)]
        assert len(given) <= limit
        assert bool(given) == bool(self.ready)
        if given:
            del self.ready[: len(given)]
            self.was_again = False
            self.steps += [Step(MessageState.READY, MessageEvent.PULL, MessageState.IN_FLIGHT)] * len(given)
            self._hold(one, given, Waiting((), 0, 1, 0, quarantined=False))

    def _give_again(self, one: Consumer, given: Sequence[Given], limit: int, now_us: int) -> None:
        """Whole ranges in any order, maybe only the beginning of the last."""
        due = [waiting for waiting in self.waiting if waiting.due_us <= now_us and not waiting.quarantined]
        assert len(given) == min(limit, sum(len(waiting.messages) for waiting in due))
        while given:
            waiting, count = self._found(given, quarantined=False, now_us=now_us)
            assert count == len(waiting.messages) or count == len(given), "the rest of a range was passed over"
            self._take(one, given[:count], waiting)
            given = given[count:]

    def _give_alone(self, one: Consumer, given: Sequence[Given], limit: int, now_us: int) -> None:
        """One range, or the beginning of it."""
        waiting, count = self._found(given, quarantined=True, now_us=now_us)
        assert len(given) == count == min(limit, len(waiting.messages))
        one.is_quarantined = True
        self._take(one, given, waiting)

    def _found(self, given: Sequence[Given], *, quarantined: bool, now_us: int) -> tuple[Waiting, int]:
        """Return the due retry that these messages begin, and how many of them it has."""
        assert given, "something is due, and did not come"
        for waiting in self.waiting:
            count = min(len(waiting.messages), len(given))
            if (
                waiting.due_us <= now_us
                and waiting.quarantined == quarantined
                and waiting[2:4] == given[0][2:]
                and waiting.messages[:count] == tuple(one.message for one in given[:count])
            ):
                return waiting, count
        raise AssertionError(f"nothing is due that {given} might be")

    def _take(self, one: Consumer, given: Sequence[Given], waiting: Waiting) -> None:
        at = self.waiting.index(waiting)
        rest = waiting.messages[len(given) :]
        self.waiting[at : at + 1] = [waiting._replace(messages=rest)] if rest else []
        self.was_again = True
        self.steps += [Step(waiting.state, MessageEvent.PULL, one.state)] * len(given)
        self._hold(one, given, waiting)

    def _hold(self, one: Consumer, given: Sequence[Given], waiting: Waiting) -> None:
        self._parts += 1
        single = waiting.quarantined and len(given) == 1
        for each in given:
            assert (each.attempt, each.session_expiries) == (waiting.attempt, waiting.session_expiries), (
                "attempts and expires are exact"
            )
            one.in_flight[each.sequence] = InFlightMessage(
                each.message, each.attempt, each.session_expiries, self._parts, single
            )
        one.next_sequence += len(given)

    # --- dispositions -------------------------------------------------------------------------------------------------

    def ack(self, one: Consumer, pairs: Sequence[int]) -> int:
        """Ack [start, end), ...; return how many are refused."""
        refused = 0
        for start, end in zip(pairs[::2], pairs[1::2], strict=True):
            for sequence in range(start, end):
                if (in_flight := one.in_flight.pop(sequence, None)) is not None:
                    self.ended[in_flight.message] = MessageState.ACKED
                    self.steps.append(Step(one.state, MessageEvent.ACK, MessageState.ACKED))
                    self._handled(one)
                refused += sequence in one.returned or sequence >= one.next_sequence
        return refused

    def _handled(self, one: Consumer) -> None:
        one.has_progress = True
        one.is_quarantined = one.is_quarantined and bool(one.in_flight)

    def nack(self, one: Consumer, start: int, end: int, delay_us: int | None, reason: str, now_us: int) -> None:
        """Nack these. Raise Refusal, as do release and reject, if one of them is not in flight."""
        state = one.state
        for part in self._back(one, start, end):
            attempt = next(iter(part.values())).attempt
            if attempt >= self.max_attempts:
                self._bury(part.values(), reason or "out of attempts", state, MessageEvent.LAST_NACK)
                continue
            delay = self.delays_us[min(attempt, len(self.delays_us)) - 1] if delay_us is None else delay_us
            messages = tuple(in_flight.message for in_flight in part.values())
            session_expiries = next(iter(part.values())).session_expiries
            waiting = Waiting(messages, now_us + delay, attempt + 1, session_expiries, quarantined=False)
            self._add(waiting, state, MessageEvent.NACK)

    def release(self, one: Consumer, start: int, end: int, delay_us: int | None, now_us: int) -> None:
        """Release these: their handling did not begin."""
        state = one.state
        for part in self._back(one, start, end):
            self._wait(part.values(), now_us + (delay_us or 0), state, MessageEvent.RELEASE)

    def reject(self, one: Consumer, start: int, end: int, reason: str) -> None:
        """Reject these: they can never be handled."""
        state = one.state
        for part in self._back(one, start, end):
            self._bury(part.values(), reason or "rejected", state, MessageEvent.REJECT)

    def _back(self, one: Consumer, start: int, end: int) -> list[dict[int, InFlightMessage]]:
        if start >= end or any(sequence not in one.in_flight for sequence in range(start, end)):
            raise Refusal
        parts = one.parts(start, end)
        for sequence in range(start, end):
            del one.in_flight[sequence]
            one.returned.add(sequence)
        self._handled(one)
        return parts

    def _wait(
        self, in_flight: Iterable[InFlightMessage], due_us: int, state: MessageState, event: MessageEvent
    ) -> None:
        """Make a retry with the same attempt."""
        several = list(in_flight)
        messages = tuple(each.message for each in several)
        quarantined = state is MessageState.QUARANTINED_IN_FLIGHT
        waiting = Waiting(messages, due_us, several[0].attempt, several[0].session_expiries, quarantined)
        self._add(waiting, state, event)

    def _add(self, waiting: Waiting, state: MessageState, event: MessageEvent) -> None:
        self.waiting.append(waiting)
        self.steps += [Step(state, event, waiting.state)] * len(waiting.messages)

    def _bury(
        self, in_flight: Collection[InFlightMessage], reason: str, state: MessageState, event: MessageEvent
    ) -> None:
        self.steps += [Step(state, event, MessageState.DEAD)] * len(in_flight)
        self.dead += [Letter(each.message, each.attempt, each.session_expiries, reason) for each in in_flight]

    # --- from outside ------------------------------------------------------------------------------------------------

    def seek(self, messages: Iterable[Message], *, clear_retries: bool) -> None:
        """Seek: nothing is in flight any more, and all consumers are gone."""
        before, self.ready = set(self.ready), list(messages)
        back, past = set(self.ready) - before, before - set(self.ready)
        self.steps += [Step(MessageState.STORED, MessageEvent.SEEK_BACK, MessageState.READY)] * len(back)
        self.steps += [Step(MessageState.READY, MessageEvent.SEEK_PAST, MessageState.SKIPPED)] * len(past)
        self.ended.update(dict.fromkeys(past, MessageState.SKIPPED))
        for one in list(self.consumers.values()):
            self.ended.update((each.message, MessageState.DROPPED) for each in one.in_flight.values())
            self.steps += [Step(one.state, MessageEvent.SEEK, MessageState.DROPPED)] * len(one.in_flight)
            self._gone(one)
        if clear_retries:
            for waiting in self.waiting:
                step = Step(waiting.state, MessageEvent.CLEAR_RETRIES, MessageState.DROPPED)
                self.steps += [step] * len(waiting.messages)
                self.ended.update(dict.fromkeys(waiting.messages, MessageState.DROPPED))
            self.waiting.clear()

    def redrive(self, letters: Iterable[Letter], now_us: int) -> None:
        """Redrive these dead letters."""
        for letter in letters:
            self.dead.remove(letter)
            waiting = Waiting((letter.message,), now_us, 1, 0, quarantined=False)
            self._add(waiting, MessageState.DEAD, MessageEvent.REDRIVE)

    def delete_dead(self, letters: Iterable[Letter]) -> None:
        """Delete these dead letters."""
        for letter in letters:
            self.dead.remove(letter)
            self.ended[letter.message] = MessageState.DELETED
            self.steps.append(Step(MessageState.DEAD, MessageEvent.DELETE, MessageState.DELETED))

    def resend(self, messages: Iterable[Message], now_us: int) -> int:
        """Hand out again those of these messages that are settled, neighbours in one range; return how many."""
        busy = {*self.ready, *(message for waiting in self.waiting for message in waiting.messages)}
        busy |= {each.message for one in self.consumers.values() for each in one.in_flight.values()}
        ranges = list[list[Message]]()
        for message in sorted(set(messages) - busy):
            dead = [letter for letter in self.dead if letter.message == message]
            self.dead = [letter for letter in self.dead if letter.message != message]
            state = MessageState.DEAD if dead else self.ended[message]
            self.steps.append(Step(state, MessageEvent.RESEND, MessageState.RETRYING))
            if ranges and ranges[-1][-1] == (message[0], message[1] - 1):
                ranges[-1].append(message)
            else:
                ranges.append([message])
        self.waiting += [Waiting(tuple(one), now_us, 1, 0, quarantined=False) for one in ranges]
        return sum(map(len, ranges))

    def start(self, monotonic_us: int) -> None:
        """Start the broker again: every consumer has the full session timeout. All else stays."""
        for one in self.consumers.values():
            one.seen_us = monotonic_us
        self.was_again, self.clearing = False, None
