"""What the clients of several simulated brokers know of each message: what every answer is held to.

A message may be at several brokers: where nobody knew what had become of a send, and where a consumer has handed it
over because its broker was gone. Each place it was stored in is a copy; its records are those of one broker. All of it
comes from what clients did and were told; a loss of power widens what is known of the copies at that broker.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from qmq.format.layout import MESSAGE_ID
from tests.sim.slots import Copy, Hand, Order, Slot, Slots, lane_of

MAX_ATTEMPTS: Final = 4
MAX_SESSION_EXPIRIES: Final = 3
#: Partitions of messages that are to be delivered later are numbered from here.
_DELAYED: Final = 0x8000


class Holder(NamedTuple):
    """Who was given a message, and as what."""

    consumer: str
    epoch: int
    generation: int
    sequence: int

    @property
    def hand(self) -> Hand:
        """Who that is, whatever was given."""
        return Hand(self.consumer, self.epoch, self.generation)


class Brokers(Protocol):
    """What the brokers themselves know; nobody else is asked of it."""

    def power_lost_at(self, copy: Copy) -> float:
        """When its broker has lost power last."""

    def is_in_flight(self, group: str, copy: Copy, holder: Holder) -> bool:
        """Its broker is there, and would take that one's acknowledgement."""

    def is_dead(self, group: str, place: tuple[str, int, int], store: bytes) -> bool:
        """A broker has a dead letter of that subject, lane and sequence."""


@dataclass(slots=True)
class Sent:
    """A message as its sender knows it."""

    subject: str
    priority: str = "normal"
    order_key: str | None = None
    is_delayed: bool = False
    #: By its receipt; and whether another broker may have it too.
    id: str | None = None
    maybe_duplicate: bool = False
    #: What the sender was told: acknowledged, refused, unknown; or "" as long as it was told nothing.
    outcome: str = ""

    @property
    def kind(self) -> str:
        """What histories count it as."""
        return f"of {self.priority} priority" if self.order_key is None else "with an order key"


@dataclass(slots=True)
class Letter:
    """One copy, as a group's consumers know it."""

    message: int
    possible: set[int]
    holder: Holder | None = None
    deliveries: int = 0
    #: Whose acknowledgement was confirmed, and when.
    confirmed_by: Holder | None = None
    confirmed_at: float = 0.0
    order: Order = field(default_factory=Order)


class Book:
    """All that producers know, and where messages with order keys lie."""

    def __init__(self, home_of: Callable[[str], bytes]) -> None:
        """*home_of* returns the store that has the messages of an order key, by the rule for it."""
        self.sent: list[Sent] = []
        self.count = Counter[str]()
        self.slots = Slots()
        self._home_of = home_of
        #: Where those with an order key lie, by message.
        self._only: dict[int, Copy] = {}

    def begin(
        self, subject: str, priority: str = "normal", order_key: str | None = None, *, is_delayed: bool = False
    ) -> int:
        """A new message; its number."""
        self.sent.append(Sent(subject, priority, order_key, is_delayed))
        self.count[self.sent[-1].kind] += 1
        self.count["delayed"] += is_delayed
        return len(self.sent) - 1

    def acknowledged(self, message: int, receipt_id: str, sequence: int | None, *, maybe_duplicate: bool) -> None:
        """Its sender has a receipt."""
        sent = self.sent[message]
        sent.id, sent.maybe_duplicate, sent.outcome = receipt_id, maybe_duplicate, "acknowledged"
        self.count["acknowledged"] += 1
        self.count["maybe duplicate"] += maybe_duplicate
        if sent.order_key is None:
            return
        assert not maybe_duplicate, f"{message} has an order key, and may be at two brokers"
        copy = Copy(*MESSAGE_ID.unpack(bytes.fromhex(receipt_id)))
        self._check_home(message, copy.store)
        if not sent.is_delayed:
            self._lies(message, copy, sequence)

    def failed(self, message: int, outcome: str) -> None:
        """Its sender was told so."""
        self.sent[message].outcome = outcome
        self.count[f"send {outcome}"] += 1

    def _check_home(self, message: int, store: bytes) -> None:
        sent = self.sent[message]
        assert sent.order_key is not None
        home = self._home_of(sent.order_key)
        assert store == home, f"{message} has the order key {sent.order_key}, and is at {store.hex()}, not {home.hex()}"

    def _lies(self, message: int, copy: Copy, sequence: int | None) -> None:
        """A message with an order key has one place at its broker, for good."""
        sent = self.sent[message]
        self._check_home(message, copy.store)
        only = self._only.setdefault(message, copy)
        assert only == copy, f"{message} has an order key, and is at {only} and {copy}"
        if sequence is not None:
            self.slots.stored(copy, Slot(copy.store, sent.subject, lane_of(sent.priority, sent.order_key)), sequence)

    def check(self, message: int, found_id: str, copy: Copy, lane: int, sequence: int) -> None:
        """A message came with that id, from there."""
        sent = self.sent[message]
        assert lane == lane_of(sent.priority, sent.order_key), f"{message} came in lane {lane:#x}: {sent}"
        if sent.order_key is not None:
            self._lies(message, copy, sequence)
        assert sent.outcome != "refused", f"{message} was refused, and came"
        if sent.outcome == "acknowledged" and not sent.maybe_duplicate:
            assert sent.id == found_id, f"{message} is stored twice, and its receipt does not say so"


class Copies:
    """What the consumers of one group know."""

    def __init__(self, group: str, book: Book, brokers: Brokers) -> None:
        self.group = group
        self.book = book
        self.brokers = brokers
        self.letters: dict[Copy, Letter] = {}
        self.count = book.count
        #: Messages that some consumer has handled; that somebody may have given up.
        self.handled: set[int] = set()
        self.may_be_dead: set[int] = set()
        #: By message the attempts at which it was taken elsewhere, or into the spool.
        self.taken: dict[int, list[int]] = defaultdict(list)
        self._moved: dict[tuple[bytes, int], set[Copy]] = defaultdict(set)
        self._ids: dict[Copy, str] = {}
        self._lost_power = set[bytes]()
        #: Messages of which somebody asked that they be handed out again though they are dead.
        self._redriven: set[int] = set()
        self._deliveries = 0

    def delivered(self, message: int, found_id: str, copy: Copy, holder: Holder, attempt: int, now: float) -> None:
        """A copy came to a consumer. Where it is not in flight, by its broker's word, it has come late: another may
        have it by now, or have handled it.
        """
        letter = self.letters.get(copy)
        if letter is None:
            letter = self._begin(message, found_id, copy)
        assert (letter.message, self._ids[copy]) == (message, found_id), (
            f"{copy} was {letter.message}, and is {message}"
        )
        if not self.brokers.is_in_flight(self.group, copy, holder):
            self.count["came late"] += 1
            letter.order.comes_late(holder.hand)
            return
        assert attempt in letter.possible, f"{message} came as attempt {attempt}, not one of {letter.possible}"
        assert not letter.confirmed_by, f"{message} came again after its acknowledgement was confirmed"
        before, letter.holder = letter.holder, holder
        letter.possible = {attempt}
        letter.deliveries += 1
        if letter.deliveries >= MAX_SESSION_EXPIRIES:
            self.may_be_dead.add(message)
        kind = "duplicated" if message in self.handled else "recovered" if letter.deliveries > 1 else "ok"
        self.count[kind] += 1
        if before is not None and before != holder:
            held = self.brokers.is_in_flight(self.group, copy, before)
            assert not held, f"{message} is held by two"
        self.count[f"again: {self.book.sent[message].kind}"] += letter.deliveries > 1
        self.count[f"redriven: {self.book.sent[message].kind}"] += letter.order.is_redriven
        self._check_order(message, copy, letter, holder)
        self._deliveries += 1
        letter.order.comes(holder.hand, holder.sequence, self._deliveries, now)

    def _check_order(self, message: int, copy: Copy, letter: Letter, holder: Holder) -> None:
        """It came when all before it in its slot were settled, or in the hands of the same consumer."""
        before, behind = self.book.slots.around(copy)
        for other in before:
            self.count["behind another of its slot"] += 1
            theirs = self.letters.get(other)
            order = theirs.order if theirs is not None else Order()
            self.count["behind another in the same hands"] += order.hands.get(holder.hand) is False
            confirmed = theirs is not None and theirs.confirmed_by is not None
            if confirmed or order.lets_through(holder.hand):
                continue
            self.count["behind a dead one"] += 1
            assert self.brokers.is_dead(self.group, self.book.slots.place(other), copy.store), (
                f"{message} came to {holder}, and {other} before it is not settled: {theirs}"
            )
        for other in (*before, *behind):
            theirs = self.letters.get(other)
            if theirs is not None and theirs.holder is not None and theirs.holder.hand != holder.hand:
                self.count["others of the slot looked at"] += 1
                held = self.brokers.is_in_flight(self.group, other, theirs.holder)
                assert not held, f"{message} came to {holder}, and {theirs.holder} has {other} of its slot"
        if letter.order.is_redriven:
            return
        since = self.brokers.power_lost_at(copy)
        for other in behind:  # it has been open since it was given last
            theirs = self.letters.get(other)
            order = theirs.order if theirs is not None else Order()
            if order.given > letter.order.given and order.given_at > since:
                assert order.given_to in letter.order.hands, (
                    f"{message} came to {holder}, and {other} behind it had come to {order.given_to} before: {letter}"
                )

    def _begin(self, message: int, found_id: str, copy: Copy) -> Letter:
        self._ids[copy] = found_id
        sent, (store, partition, _) = self.book.sent[message], MESSAGE_ID.unpack(bytes.fromhex(found_id))
        fell_due = partition >= _DELAYED and store == copy.store
        possible = {1} if fell_due or found_id == MESSAGE_ID.pack(*copy).hex() else set[int]()
        if partition >= _DELAYED:
            assert sent.is_delayed, f"{message} was delayed, which nobody asked for"
        if sent.order_key is None and (fell_due or not possible):
            possible |= {taken + 1 for taken in self.taken[message]}
            if copy.store in self._lost_power:
                possible.add(2)  # the record of the hand-over is lost: the message counts as failed once
            moved = self._moved[copy.store, message]
            moved.add(copy)
            most = len(self.taken[message]) + fell_due
            assert len(moved) <= most, f"{message} is there {len(moved)} times, and may be {most} times"
            if not fell_due:
                self.count["came from elsewhere"] += 1
                self.count[f"came from elsewhere: {sent.kind}"] += 1
        if message in self._redriven:
            possible.add(1)
        letter = self.letters[copy] = Letter(message, possible)
        return letter

    def acking(self, copy: Copy, holder: Holder) -> None:
        """Somebody acknowledges it; nobody knows yet whether its broker hears of it."""
        self.letters[copy].order.acks.add((holder.consumer, holder.generation, holder.sequence))

    def going_back(self, copy: Copy, holder: Holder) -> None:
        """Whoever has it gives it back, to be handed out again."""
        self.letters[copy].order.goes_back(holder.hand)

    def redriving(self, message_id: str) -> None:
        """Somebody asks that it be handed out again, though it is dead."""
        for copy, found_id in self._ids.items():
            if found_id == message_id:
                letter = self.letters[copy]
                self._redriven.add(letter.message)
                letter.order.is_redriven = True
                letter.possible = letter.possible | {1}

    def nacking(self, message: int, copy: Copy, attempt: int) -> None:
        """Somebody asks for another attempt."""
        if attempt >= MAX_ATTEMPTS:
            self.may_be_dead.add(message)
        self.letters[copy].possible = self.letters[copy].possible | {attempt + 1}

    def takes(self, message: int, attempt: int) -> None:
        """A client is about to hand it over, or to keep it in its spool."""
        assert self.book.sent[message].order_key is None, f"{message} has an order key, and is handed over"
        self.taken[message].append(attempt)
        self.count["taken elsewhere"] += 1

    def nacked(self, copy: Copy, holder: Holder, attempt: int) -> None:
        """Its own broker has noted it. (If it had before, it may be with another by now.)"""
        letter = self.letters[copy]
        if letter.holder == holder:
            letter.holder = None
            letter.possible = {attempt + 1}

    def confirmed(self, copy: Copy, holder: Holder, now: float) -> None:
        """Its broker has that acknowledgement."""
        letter = self.letters[copy]
        assert letter.confirmed_by in (None, holder), f"{letter.message} was acknowledged by two"
        letter.confirmed_by, letter.confirmed_at = holder, now

    def power_lost(self, store: bytes, kept_at: float) -> None:
        """What that broker was told since may be forgotten there."""
        self._lost_power.add(store)
        for copy, letter in self.letters.items():
            if copy.store == store:
                letter.holder = None
                letter.possible = set(range(1, max(letter.possible) + 1))
                if letter.confirmed_at > kept_at:
                    letter.confirmed_by = None

    def check(self, dead: dict[str, str]) -> None:
        """Everything that was acknowledged to its sender is handled, or dead with a reason; *dead* by id."""
        assert all(dead.values()), "somebody is dead without a reason"
        for copy, found_id in self._ids.items():
            message = self.letters[copy].message
            if found_id in dead:
                assert message in self.may_be_dead, f"{message} is dead, and nobody has given it up: {dead[found_id]}"
        ids = {found_id: self.letters[copy].message for copy, found_id in self._ids.items()}
        buried = {ids[one] for one in dead if one in ids}
        lost = [
            number
            for number, sent in enumerate(self.book.sent)
            if sent.outcome == "acknowledged" and number not in self.handled and number not in buried
        ]
        self.count["dead"] += len(dead)
        assert not lost, f"group {self.group} has lost {lost}"
