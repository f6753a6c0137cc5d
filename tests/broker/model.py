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
- A group with tags is through with messages that have none of them: such a message is filtered where a pull comes to
  it, as a new message or a retry, or a consumer asks for it again. A message that has expired is handed out then as
  well, and is a dead letter at once. Which of them a pull comes to is left to the broker: its records say so.
- A nack or release takes back what its consumer has behind it in the slot of its order key, as releases with its delay;
  also the nack of a last attempt, without a delay.
- Pulls of messages with priorities and order keys follow the rules of model_pull.py.
- Calls of a consumer that expired, left or was taken over from are refused, and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Final, NamedTuple

from qmq.broker.groups.message_life import MessageEvent, MessageState
from qmq.broker.ports.commands import DispositionRange
from qmq.net.protocol.types import Disposition, KnownConsumer
from tests.broker.model_log import HIGH, NORMAL, Log, Message, Slot
from tests.broker.model_pull import PullCheck, Slots


class Step(NamedTuple):
    """An event changed the state of one message."""

    before: MessageState
    event: MessageEvent
    after: MessageState


class Refusal(Exception):
    """The broker must refuse the call, and nothing changes."""


class Given(NamedTuple):
    """One message of an answer; *session_expiries* as the broker counts them. Messages of one *part* are one range."""

    sequence: int
    message: Message
    attempt: int
    session_expiries: int
    part: int = 0


class Handed(NamedTuple):
    """What one record of a pull says: the messages that the consumer has since then, those that it does not get among
    them, and new messages that were filtered. *is_again*: they are retries.
    """

    given: tuple[Given, ...]
    filtered: tuple[Message, ...]
    is_again: bool


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


def shown(several: Iterable[Waiting], now_us: int) -> list[Waiting]:
    """Return retries without their due times if they are due: since when does not matter. Those with order keys come
    one by one: into which parts the pulls of consumers that may have only some cut them does not matter either.
    """
    dated = [one if one.due_us > now_us else one._replace(due_us=0) for one in several]
    return sorted(
        part
        for one in dated
        for part in (
            [one] if one.messages[0].slot is None else [one._replace(messages=(message,)) for message in one.messages]
        )
    )


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


_NOTHING: Final = Handed((), (), is_again=False)


class Group:
    """One group, from when it is made until it is deleted."""

    def __init__(self, log: Log, session_timeout_us: int) -> None:
        self.log = log
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
        #: What lower ranks than the high and the normal one have coming.
        self.credit = [Fraction(0), Fraction(0)]
        self.priority_share = 0.0
        #: The group takes messages that have one of these tags, all without; and those that are not older than this.
        self.tags: frozenset[str] = frozenset()
        self.expire_after_us = 0
        #: Its tags or expiry have decided about a message.
        self.has_selected = False
        #: Messages that were filtered, by any of their lives.
        self.filtered = 0
        #: Subjects and slots of which something was handed out since the group was last sought.
        self.begun: set[tuple[str, Slot]] = set()
        #: The broker may forget rows of slots that it has passed, and find them in another order.
        self.forgets = False
        #: What happened of the rules of ranks and slots.
        self.seen = Counter[str]()
        self.send(log.messages)

    def send(self, messages: Iterable[Message]) -> None:
        """Messages of the log become ready."""
        for message in messages:
            self.ready.append(message)
            self.steps.append(Step(MessageState.STORED, MessageEvent.VISIBLE, MessageState.READY))

    def content(self, now_us: int) -> GroupContent:
        """Return the whole state."""
        places = {one.name: one.consumer_state() for one in self.consumers.values()}
        return GroupContent(len(self.ready), places, shown(self.waiting, now_us), sorted(self.dead))

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

    def fate(self, message: Message, now_us: int) -> MessageEvent:
        """Return what a pull makes of a message: PULL, FILTER or EXPIRE."""
        log = self.log
        if self.tags and self.tags.isdisjoint(log.tags.get(message, ())):
            return MessageEvent.FILTER
        is_over = message in log.expire_at_us and log.expire_at_us[message] <= now_us
        is_old = self.expire_after_us and log.stored_us[message] <= now_us - self.expire_after_us
        return MessageEvent.EXPIRE if is_over or is_old else MessageEvent.PULL

    def give(
        self, one: Consumer, expected: int, max_count: int, handed: Sequence[Handed], given: Sequence[Given],
        now_us: int,
    ) -> str:  # fmt: skip
        """Take the answer to a pull, and what its records say; fail unless they are as the rules allow. Return the kind
        of the answer.
        """
        self._settle(one, [number for number in one.in_flight if number >= expected], now_us)
        again = [(number, *in_flight[:3]) for number, in_flight in sorted(one.in_flight.items()) if number >= expected]
        if again:
            assert not handed
            assert [each[:4] for each in given] == again[: min(max_count, self.max_unacked)]
            return "in_flight"
        kind, wanted = "nothing", list[Given]()
        for number, each in enumerate(handed):
            assert not wanted, "an answer has the messages of one record"
            wanted = [each for each in each.given if self.fate(each.message, now_us) is MessageEvent.PULL]
            is_last = number == len(handed) - 1
            if not each.is_again and not wanted and not is_last:
                self._pass(one, each, now_us)  # it came to nothing, and went on
                continue
            kind = self._give(one, each, max_count, now_us)
        if not wanted and (not handed or handed[-1].is_again):
            kind = self._give(one, _NOTHING, max_count, now_us)
        assert [each[:4] for each in given] == [each[:4] for each in wanted], "it gets all that is left, and no more"
        return kind

    def _settle(self, one: Consumer, numbers: Iterable[int], now_us: int) -> None:
        """Filter or bury what is in flight with these delivery sequences, and is not wanted."""
        for number in sorted(numbers):
            in_flight, state = one.in_flight[number], one.state
            event = self.fate(in_flight.message, now_us)
            if event is MessageEvent.PULL:
                continue
            del one.in_flight[number]
            one.returned.add(number)
            self._handled(one)
            if event is MessageEvent.FILTER:
                self._filter([in_flight.message], state)
            else:
                own_us = self.log.expire_at_us.get(in_flight.message, now_us + 1)
                self.seen["expired at its time" if own_us <= now_us else "expired by age"] += 1
                self._bury([in_flight], "expired", state, event)

    def _filter(self, messages: Collection[Message], state: MessageState) -> None:
        self.has_selected = self.has_selected or bool(messages)
        self.filtered += len(messages)
        self.seen["filtered"] += len(messages)
        self.steps += [Step(state, MessageEvent.FILTER, MessageState.SKIPPED)] * len(messages)
        self.ended.update(dict.fromkeys(messages, MessageState.SKIPPED))

    def _pass(self, one: Consumer, handed: Handed, now_us: int) -> None:
        """Pass new messages: the consumer has some of them, and others are filtered."""
        for message in (*handed.filtered, *(each.message for each in handed.given)):
            self.ready.remove(message)
            if (slot := message.slot) is not None:
                self.begun.add((message.subject, slot))
        assert all(self.fate(message, now_us) is MessageEvent.FILTER for message in handed.filtered)
        assert all(self.fate(each.message, now_us) is not MessageEvent.FILTER for each in handed.given)
        self._filter(handed.filtered, MessageState.READY)
        if any(self.fate(each.message, now_us) is MessageEvent.EXPIRE for each in handed.given):
            self.has_selected = True
        if handed.given:
            self.was_again = False
        self.steps += [Step(MessageState.READY, MessageEvent.PULL, MessageState.IN_FLIGHT)] * len(handed.given)
        self._check_parts(handed.given)
        for part in dict.fromkeys(each.part for each in handed.given):
            several = [each for each in handed.given if each.part == part]
            self._hold(one, several, Waiting((), 0, 1, 0, quarantined=False))
        self._settle(one, [each.sequence for each in handed.given], now_us)

    def _give(self, one: Consumer, handed: Handed, max_count: int, now_us: int) -> str:
        """Take what one record says of a pull, the last one of it or one of retries. Return its kind."""
        given: Sequence[Given] = handed.given
        assert [one.sequence for one in given] == list(range(one.next_sequence, one.next_sequence + len(given)))
        room = self.max_unacked - len(one.in_flight)
        if one.is_quarantined or room <= 0:
            assert handed == _NOTHING, "it was to be given nothing"
            return "nothing"
        slots = Slots(self)
        alone = [waiting for waiting in self.waiting if waiting.due_us <= now_us and waiting.quarantined]
        mine = [waiting for waiting in alone if slots.is_any(one, waiting)]
        if mine:
            self.clearing = self.clearing or one
            if not one.in_flight:
                if self.clearing is one:
                    self.clearing = None
                assert handed.is_again
                self._give_alone(one, slots, mine, given, min(max_count, self.max_unacked))
                self._settle(one, [each.sequence for each in given], now_us)
                return "quarantined"
            if self.clearing is one:
                assert handed == _NOTHING, "it is to hold nothing first"
                return "nothing"
        elif not alone or self.clearing is one:
            self.clearing = None
        wanted = [each for each in given if self.fate(each.message, now_us) is MessageEvent.PULL]
        checked, unwanted = given, list[Message]()
        if not handed.is_again:
            checked = wanted
            unwanted = [*handed.filtered, *(each.message for each in given if each not in wanted)]
        pull = PullCheck(self, one, slots, checked, min(max_count, room), now_us, unwanted)
        pull.check()
        assert handed.is_again is bool(pull.again)
        if pull.again:
            if wanted:
                self._note_handed(given)
            self._give_again(one, given, pull.again)
            self._settle(one, [each.sequence for each in given], now_us)
            return "again"
        self._pass(one, handed, now_us)
        if wanted:
            self._note_handed(wanted)
            return "fresh"
        left = [each for each in self.ready if each.slot is None and self.fate(each, now_us) is not MessageEvent.PULL]
        assert not left, "a pull that gets nothing passes all that nobody wants"
        return "nothing"

    def _check_parts(self, given: Sequence[Given]) -> None:
        """Check the ranges of new messages: neighbours of one kind of lanes, as the log has them."""
        places = self.log.places
        for one, other in pairwise(given):
            between = self.log.messages[places[one.message] + 1 : places[other.message]]
            if one.part == other.part:
                assert one.message.kind == other.message.kind, "a range has one kind of lanes"
                assert places[one.message] < places[other.message]
                assert not [message for message in between if message.kind == one.message.kind], "a range has no holes"
            else:
                assert self.log.has_lanes or self.has_selected, "neighbours are one range"

    def _give_again(
        self, one: Consumer, given: Sequence[Given], taken: Sequence[tuple[Waiting, int, int]]
    ) -> None:  # fmt: skip
        at = 0
        cuts: dict[int, list[tuple[int, int]]] = {}
        for waiting, start, end in taken:
            cuts.setdefault(id(waiting), []).append((start, end))
            self._take(one, given[at : at + end - start], waiting)
            at += end - start
        left = list[Waiting]()
        for waiting in self.waiting:
            at = 0
            for start, end in [*sorted(cuts.get(id(waiting), [])), (len(waiting.messages),) * 2]:
                if messages := waiting.messages[at:start]:
                    left.append(waiting._replace(messages=messages))
                at = end
        self.waiting = left
        self.was_again = True

    def _give_alone(
        self, one: Consumer, slots: Slots, due: list[Waiting], given: Sequence[Given], limit: int
    ) -> None:  # fmt: skip
        """One range, or the beginning of it; of messages with order keys any part that the consumer may have."""
        assert given, "something is due, and did not come"
        messages = tuple(each.message for each in given)
        for waiting in due:
            for start, end in slots.runs_of(one, waiting, set()):
                is_keyed = waiting.messages[0].slot is not None
                counts = range(1, min(limit, end - start) + 1) if is_keyed else [min(limit, end - start)]
                starts = range(start, end) if is_keyed else [start]
                for at in starts:
                    if (
                        len(given) in counts
                        and waiting[2:4] == given[0][2:4]
                        and waiting.messages[at : at + len(given)] == messages
                        and all(slots.may_come_again(one, each, {*messages[:n]}) for n, each in enumerate(messages))
                    ):
                        one.is_quarantined = True
                        self._give_again(one, given, [(waiting, at, at + len(given))])
                        return
        raise AssertionError(f"nothing is due that {given} might be")

    def _take(self, one: Consumer, given: Sequence[Given], waiting: Waiting) -> None:
        self.steps += [Step(waiting.state, MessageEvent.PULL, one.state)] * len(given)
        self._hold(one, given, waiting)

    def coming(self, rank: int) -> int:
        """Return how many messages of lower ranks come before others of the high or the normal rank."""
        return int(self.credit[rank])

    def none_wait(self, rank: int) -> None:
        """Nothing of lower ranks waits: nothing is saved up for them."""
        self.credit[rank] = Fraction(0)

    def _note_handed(self, given: Sequence[Given]) -> None:
        """Count what was handed out for the share of lower ranks."""
        if not self.log.has_lanes:
            return
        share = Fraction(str(self.priority_share))
        for rank in (HIGH, NORMAL) if self.log.has_low else (HIGH,):
            lower = sum(each.message.rank > rank for each in given)
            others = sum(each.message.rank == rank for each in given)
            self.credit[rank] = max(Fraction(0), self.credit[rank] + share * (others + lower) - lower)

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

    def hand_back(self, one: Consumer, backs: Sequence[DispositionRange], now_us: int) -> tuple[int, ...]:
        """Hand these back; return the numbers of those that are refused, since a message of theirs is not in flight."""
        refused, taken, seen = list[int](), list[DispositionRange](), set[int]()
        for number, back in enumerate(backs):
            sequences = set(range(back.start, back.end))
            if sequences and sequences <= one.in_flight.keys() - seen:
                seen |= sequences
                taken.append(back)
            else:
                refused.append(number)
        stops, firsts = self._stops(one, taken)
        followers = [
            (sequence, firsts[slot][1] if slot in firsts else 0)
            for sequence, each in sorted(one.in_flight.items())
            if sequence not in seen
            and (slot := each.message.slot) is not None
            and any(
                self.log.places[each.message] > place and sequence > before for place, before in stops.get(slot, ())
            )
        ]
        for back in taken:
            self._hand_back(one, back, firsts, now_us)
        for sequence, delay_us in followers:
            state = one.state
            for part in self._back(one, sequence, sequence + 1):
                self._wait(part.values(), now_us + delay_us, state, MessageEvent.EARLIER_BACK)
        return tuple(refused)

    def _stops(
        self, one: Consumer, taken: Sequence[DispositionRange]
    ) -> tuple[dict[Slot, list[tuple[int, int]]], dict[Slot, tuple[int, int]]]:
        """Return by slot places and delivery sequences of the messages that are nacked or released; and the place of
        the first one that is to come again, with its delay.
        """
        stops, firsts = dict[Slot, list[tuple[int, int]]](), dict[Slot, tuple[int, int]]()
        for back in taken:
            for sequence in range(back.start, back.end):
                message, attempt = one.in_flight[sequence][:2]
                is_nack = back.disposition is Disposition.NACK
                if message.slot is None or back.disposition is Disposition.REJECT:
                    continue
                place = self.log.places[message]
                stops.setdefault(message.slot, []).append((place, sequence))
                if is_nack and attempt >= self.max_attempts:
                    continue
                if message.slot not in firsts or place < firsts[message.slot][0]:
                    delay_us = self._delay_us(attempt) if is_nack and back.delay_us is None else back.delay_us or 0
                    firsts[message.slot] = place, delay_us
        return stops, firsts

    def _delay_us(self, attempt: int) -> int:
        return self.delays_us[min(attempt, len(self.delays_us)) - 1]

    def _hand_back(
        self, one: Consumer, back: DispositionRange, firsts: dict[Slot, tuple[int, int]], now_us: int
    ) -> None:  # fmt: skip
        state = one.state
        for part in self._back(one, back.start, back.end):
            if back.disposition is Disposition.NACK:
                self._nack(part, back, state, now_us)
            elif back.disposition is Disposition.REJECT:
                self._bury(part.values(), back.reason or "rejected", state, MessageEvent.REJECT)
            elif (slot := next(iter(part.values())).message.slot) is None or back.delay_us:
                self._wait(part.values(), now_us + (back.delay_us or 0), state, MessageEvent.RELEASE)
            else:
                for each in part.values():
                    slot = each.message.slot
                    assert slot is not None
                    first, delay_us = firsts[slot]
                    behind = delay_us if self.log.places[each.message] > first else 0
                    self._wait([each], now_us + behind, state, MessageEvent.RELEASE)

    def _nack(self, part: dict[int, InFlightMessage], back: DispositionRange, state: MessageState, now_us: int) -> None:
        first = next(iter(part.values()))
        if first.attempt >= self.max_attempts:
            self._bury(part.values(), back.reason or "out of attempts", state, MessageEvent.LAST_NACK)
            return
        delay_us = self._delay_us(first.attempt) if back.delay_us is None else back.delay_us
        messages = tuple(in_flight.message for in_flight in part.values())
        waiting = Waiting(messages, now_us + delay_us, first.attempt + 1, first.session_expiries, quarantined=False)
        self._add(waiting, state, MessageEvent.NACK)

    def _back(self, one: Consumer, start: int, end: int) -> list[dict[int, InFlightMessage]]:
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
        self.begun.clear()
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
            if ranges and ranges[-1][-1] == message._replace(sequence=message.sequence - 1):
                ranges[-1].append(message)
            else:
                ranges.append([message])
        self.waiting += [Waiting(tuple(one), now_us, 1, 0, quarantined=False) for one in ranges]
        return sum(map(len, ranges))

    def start(self, monotonic_us: int) -> None:
        """Start the broker again: every consumer has the full session timeout. All else stays."""
        for one in self.consumers.values():
            one.seen_us = monotonic_us
        self.was_again, self.clearing, self.credit = False, None, [Fraction(0), Fraction(0)]
