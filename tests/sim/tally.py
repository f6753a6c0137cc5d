"""What the clients of a simulated broker know of each message of a group: the record that every answer is held to.

All of it comes from what clients sent and were told. After a loss of power the broker may have forgotten what no
checkpoint knows, and the record is widened by that; nothing else widens it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.sim.order import OrderTally

#: An epoch of a consumer: group, name, epoch, generation of the pull log, life of the process.
Key = tuple[str, str, int, int, int]

MAX_ATTEMPTS: Final = 4
MAX_SESSION_EXPIRIES: Final = 3


class Holder(NamedTuple):
    """Who was given a message, and as what."""

    key: Key
    sequence: int


@dataclass(slots=True)
class Letter:
    """One message, as a group's clients know it."""

    #: The attempts that the next delivery may have.
    possible: set[int] = field(default_factory=lambda: {1})
    #: The wall clock before which it must not come.
    not_before_us: int = 0
    holder: Holder | None = None
    deliveries: int = 0
    #: An acknowledgement was confirmed: it must not come again; ever: it counts as handled.
    confirmed: bool = False
    handled: bool = False
    #: Acknowledgements of it that may have been taken, though nobody was told so.
    unanswered: int = 0
    #: It was rejected, or nacked at its last attempt; the broker said so, or was asked only.
    dead: bool = False
    may_be_dead: bool = False
    #: It was dead when the group began anew: it is handed out from there, and again as a dead letter.
    is_twofold: bool = False
    #: As of the last checkpoint; the most attempts at any time since.
    kept_confirmed: bool = False
    kept_dead: bool = False
    kept_attempt: int = 1
    kept_most: int = 1

    @property
    def is_settled(self) -> bool:
        """It was handled, or is dead; maybe."""
        return self.handled or self.unanswered > 0 or self.dead or self.may_be_dead


class Tally:
    """Of one group. *order* is what is known of slots; None for a group that keeps no order of keys."""

    def __init__(self, group: str, order: OrderTally | None = None) -> None:
        self.group = group
        self.order = order
        self.letters: dict[int, Letter] = {}
        self.counts = Counter[str]()
        self._snapshot: list[tuple[Letter, bool, bool, set[int]]] = []

    def letter(self, message: int) -> Letter:
        """Of that message."""
        return self.letters.setdefault(message, Letter())

    # --- what clients are told ---------------------------------------------------------------------------------------

    def delivered(self, message: int, holder: Holder, attempt: int, now_us: int) -> Holder | None:
        """It came to a consumer. Who had it before and must not hold it any more, if anyone."""
        letter = self.letter(message)
        before, letter.holder = letter.holder, holder
        if self.order is not None:
            self.order.check(message, holder, self)
        assert not letter.confirmed or letter.is_twofold, (
            f"{message} came again after its acknowledgement was confirmed"
        )
        assert attempt in letter.possible, f"{message} came as attempt {attempt}, not one of {letter.possible}"
        if before == holder:
            self.counts["given again after a lost answer"] += 1
            return None
        assert not letter.dead, f"{message} came again, and is dead"
        assert now_us >= letter.not_before_us, f"{message} came {letter.not_before_us - now_us} us early"
        letter.possible, letter.not_before_us = letter.possible if letter.is_twofold else {attempt}, 0
        letter.deliveries += 1
        letter.may_be_dead |= letter.deliveries >= MAX_SESSION_EXPIRIES
        self.counts["duplicated" if letter.handled else "recovered" if letter.deliveries > 1 else "ok"] += 1
        return None if letter.is_twofold else before

    def confirmed(self, messages: Iterable[int], key: Key) -> None:
        """The broker has taken all of these acknowledgements."""
        for message in messages:
            letter = self.letter(message)
            assert letter.holder is not None, message
            assert letter.holder.key == key or letter.confirmed or letter.is_twofold, (
                f"{message} was acknowledged by {key}, and {letter.holder.key[1]} has it"
            )
            letter.confirmed = letter.handled = True

    def acknowledging(self, messages: Iterable[int], change: int) -> None:
        """Acknowledgements are on the way (1), or were answered (-1)."""
        for message in messages:
            self.letter(message).unanswered += change

    def nacking(self, message: int, attempt: int) -> None:
        """Somebody asks for another attempt; nobody knows yet whether the broker has heard."""
        letter = self.letter(message)
        if attempt >= MAX_ATTEMPTS:
            letter.may_be_dead = True
        else:
            letter.possible = letter.possible | {attempt + 1}
            letter.kept_most = max(letter.kept_most, attempt + 1)

    def nacked(self, message: int, attempt: int, not_before_us: int, holder: Holder) -> None:
        """The broker has noted it. (If it had before, the message may be with another by now.)"""
        letter = self.letter(message)
        if letter.holder != holder:
            return
        letter.holder = None
        if attempt >= MAX_ATTEMPTS:
            letter.dead = not letter.is_twofold
        elif letter.is_twofold:  # of the other one nothing is said by this
            letter.possible = letter.possible | {attempt + 1}
        else:
            letter.possible, letter.not_before_us = {attempt + 1}, not_before_us

    def rejected(self, message: int) -> None:
        """The broker has buried it."""
        letter = self.letter(message)
        letter.dead = not letter.is_twofold

    def redriven(self) -> None:
        """Dead letters are handed out again, as if for the first time; maybe."""
        for letter in self.letters.values():
            if letter.may_be_dead or letter.dead:
                letter.confirmed = letter.kept_confirmed = letter.dead = letter.kept_dead = False
                letter.possible = letter.possible | {1}
                letter.kept_attempt = 1

    def sought(self) -> None:
        """The group goes on at the first message again, and nothing of before is held or waits; maybe."""
        for letter in self.letters.values():
            letter.confirmed = letter.kept_confirmed = letter.dead = letter.kept_dead = False
            letter.possible = letter.possible | {1}
            letter.kept_attempt, letter.not_before_us = 1, 0
            letter.is_twofold |= letter.may_be_dead

    def resent(self) -> None:
        """What the group is through with is handed out again, as if for the first time; maybe. What is in flight or
        waits is left alone. An acknowledgement that is on its way may still be of the time before, and one from before
        a loss of power may have outlived it.
        """
        for letter in self.letters.values():
            if letter.is_settled:
                letter.confirmed = letter.kept_confirmed = letter.dead = letter.kept_dead = False
                letter.possible = letter.possible | {1}
                letter.kept_attempt = 1
                letter.is_twofold |= letter.unanswered > 0

    def clock_set(self, before_us: int) -> None:
        """The wall clock is set: what was due by then has fallen due."""
        for letter in self.letters.values():
            if letter.not_before_us <= before_us:
                letter.not_before_us = 0

    # --- what the machine does ---------------------------------------------------------------------------------------

    def checkpoint_begins(self) -> None:
        """What is known now is in it."""
        self._snapshot = [
            (letter, letter.confirmed, letter.dead, set(letter.possible)) for letter in self.letters.values()
        ]

    def checkpoint_done(self) -> None:
        """It is on disk."""
        for letter, confirmed, dead, attempts in self._snapshot:
            letter.kept_confirmed, letter.kept_dead = confirmed, dead
            letter.kept_attempt, letter.kept_most = min(attempts), max(attempts)

    def power_lost(self) -> None:
        """All is as it was at some moment since the checkpoint; a seek or a hand-back since may be forgotten."""
        for letter in self.letters.values():
            letter.confirmed, letter.dead, letter.not_before_us = letter.kept_confirmed, letter.kept_dead, 0
            lowest, highest = min(letter.kept_attempt, *letter.possible), max(letter.kept_most, *letter.possible)
            letter.possible = set(range(lowest, highest + 1))
            letter.holder = None

    # --- the end -----------------------------------------------------------------------------------------------------

    def check_dead(self, dead: dict[int, str]) -> None:
        """Whoever is dead has a reason to be; whoever must be, is."""
        for message, reason in dead.items():
            assert reason, f"{message} is dead without a reason"
            assert self.letter(message).may_be_dead, f"{message} is dead, and nobody has given it up: {reason}"
        for message, letter in self.letters.items():
            assert not letter.dead or message in dead, f"{message} was given up, and is not among the dead letters"

    def _is_done(self, message: int) -> bool:
        letter = self.letter(message)
        return letter.handled or letter.unanswered > 0

    def check_all(self, sent: Iterable[int], dead: dict[int, str]) -> None:
        """Everything that was acknowledged to its sender is handled or dead."""
        lost = [message for message in sent if not self._is_done(message) and message not in dead]
        self.counts["lost"] += len(lost)
        assert not lost, f"group {self.group} has lost {lost}"
