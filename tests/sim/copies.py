"""What the clients of several simulated brokers know of each message: what every answer is held to.

A message may be at several brokers: where nobody knew what had become of a send, and where a consumer has handed it
over because its broker was gone. Each place it was stored in is a copy; its records are those of one broker. All of it
comes from what clients did and were told; a loss of power widens what is known of the copies at that broker.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final, NamedTuple

from qmq.format.layout import MESSAGE_ID

MAX_ATTEMPTS: Final = 4
MAX_SESSION_EXPIRIES: Final = 3


class Copy(NamedTuple):
    """Where one lies."""

    store: bytes
    partition: int
    position: int


class Holder(NamedTuple):
    """Who was given a message, and as what."""

    consumer: str
    epoch: int
    generation: int
    sequence: int


@dataclass(slots=True)
class Sent:
    """A message as its sender knows it."""

    subject: str
    #: By its receipt; and whether another broker may have it too.
    id: str | None = None
    maybe_duplicate: bool = False
    #: What the sender was told: acknowledged, refused, unknown; or "" as long as it was told nothing.
    outcome: str = ""


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


class Book:
    """All that producers know."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.count = Counter[str]()

    def begin(self, subject: str) -> int:
        """A new message; its number."""
        self.sent.append(Sent(subject))
        return len(self.sent) - 1

    def acknowledged(self, message: int, receipt_id: str, *, maybe_duplicate: bool) -> None:
        """Its sender has a receipt."""
        sent = self.sent[message]
        sent.id, sent.maybe_duplicate, sent.outcome = receipt_id, maybe_duplicate, "acknowledged"
        self.count["acknowledged"] += 1
        self.count["maybe duplicate"] += maybe_duplicate

    def failed(self, message: int, outcome: str) -> None:
        """Its sender was told so."""
        self.sent[message].outcome = outcome
        self.count[f"send {outcome}"] += 1

    def check(self, message: int, found_id: str) -> None:
        """A message came with that id."""
        sent = self.sent[message]
        assert sent.outcome != "refused", f"{message} was refused, and came"
        if sent.outcome == "acknowledged" and not sent.maybe_duplicate:
            assert sent.id == found_id, f"{message} is stored twice, and its receipt does not say so"


class Copies:
    """What the consumers of one group know."""

    def __init__(self, group: str, book: Book) -> None:
        self.group = group
        self.book = book
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

    def delivered(
        self, message: int, found_id: str, copy: Copy, holder: Holder, attempt: int, *, is_in_flight: bool
    ) -> Holder | None:
        """A copy came to a consumer; *is_in_flight*: its broker says that it is that one's. Who had it before, if
        anyone.

        What it is not any more has come late: another may have it by now, or have handled it.
        """
        letter = self.letters.get(copy)
        if letter is None:
            letter = self._begin(message, found_id, copy)
        assert (letter.message, self._ids[copy]) == (message, found_id), (
            f"{copy} was {letter.message}, and is {message}"
        )
        if not is_in_flight:
            self.count["came late"] += 1
            return None
        assert attempt in letter.possible, f"{message} came as attempt {attempt}, not one of {letter.possible}"
        assert not letter.confirmed_by, f"{message} came again after its acknowledgement was confirmed"
        before, letter.holder = letter.holder, holder
        letter.possible = {attempt}
        letter.deliveries += 1
        if letter.deliveries >= MAX_SESSION_EXPIRIES:
            self.may_be_dead.add(message)
        kind = "duplicated" if message in self.handled else "recovered" if letter.deliveries > 1 else "ok"
        self.count[kind] += 1
        return before

    def _begin(self, message: int, found_id: str, copy: Copy) -> Letter:
        self.book.check(message, found_id)
        self._ids[copy] = found_id
        if found_id == MESSAGE_ID.pack(*copy).hex():
            possible = {1}
        else:
            possible = {taken + 1 for taken in self.taken[message]}
            if copy.store in self._lost_power:
                possible.add(2)  # the record of the hand-over is lost: the message counts as failed once
            moved = self._moved[copy.store, message]
            moved.add(copy)
            assert len(moved) <= len(self.taken[message]), f"{message} was handed over once, and is there twice"
            self.count["came from elsewhere"] += 1
        letter = self.letters[copy] = Letter(message, possible)
        return letter

    def nacking(self, message: int, copy: Copy, attempt: int) -> None:
        """Somebody asks for another attempt."""
        if attempt >= MAX_ATTEMPTS:
            self.may_be_dead.add(message)
        self.letters[copy].possible = self.letters[copy].possible | {attempt + 1}

    def takes(self, message: int, attempt: int) -> None:
        """A client is about to hand it over, or to keep it in its spool."""
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
