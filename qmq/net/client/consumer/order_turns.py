"""The order keys that the workers of one run have in hand, and the messages that wait for them. No I/O; time is an
argument.

A worker takes only messages whose slot of order keys is free. Those of a busy slot are set aside for the worker that
has it, about as many as it handles in a second. The rest goes back for a while: the broker then hands out other slots.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final, Generic

from qmq.format.lanes import slot_of
from qmq.net.client.consumer.in_flight import Slot
from qmq.net.client.consumer.message import M

#: Seconds of work that is set aside for a slot, and messages at most.
ASIDE_SECONDS: Final = 1.0
MAX_ASIDE: Final = 1_000
#: Seconds that a handler of a slot is thought to take before one has ended.
FIRST_GUESS: Final = 1 / 16
#: Bounds of the seconds for which messages of a busy slot go back.
LEAST_BACK: Final = 0.05
MOST_BACK: Final = 1.0


class _Turn(Generic[M]):
    """A slot that a worker has in hand."""

    __slots__ = ("aside", "since", "takes")

    def __init__(self, now: float) -> None:
        self.aside: deque[M] | tuple[()] = ()  # a deque once a message waits, as few do
        #: When the handler of the slot began, and how long one takes.
        self.since = now
        self.takes: float | None = None

    def ended(self, now: float) -> None:
        took = now - self.since
        self.takes = took if self.takes is None else (self.takes + took) / 2
        self.since = now

    def expected(self, now: float) -> float:
        """Return how many seconds a handler takes."""
        return max(FIRST_GUESS if self.takes is None else self.takes, now - self.since, 1e-6)


class OrderTurns(Generic[M]):
    """The slots in hand. Workers may be threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[Slot, _Turn[M]] = {}

    def begin(self, message: M, now: float, *, goes_back: bool) -> float | None:
        """[any thread] Return None if a worker may handle *message* now, as no other has its slot. Else return 0 if it
        was set aside, or, where it is one too many, for how many seconds it has to go back. If it cannot go back, it is
        set aside all the same.
        """
        slot = slot_of_message(message)
        with self._lock:
            turn = self._turns.get(slot)
            if turn is None:
                self._turns[slot] = _Turn(now)
                return None
            fits, seconds = _fits(turn, now)
            is_one_too_many = len(turn.aside) >= fits
            if not (is_one_too_many and goes_back):
                turn.aside = turn.aside or deque()
                turn.aside.append(message)
            return seconds if is_one_too_many else 0.0

    def end(self, message: M, now: float) -> M | None:
        """[any thread] Note that the handler of *message* has ended; return the next one of its slot, None if the slot
        is free.
        """
        slot = slot_of_message(message)
        with self._lock:
            turn = self._turns[slot]
            if not turn.aside:
                del self._turns[slot]
                return None
            turn.ended(now)
            return turn.aside.popleft()

    def surplus(self, now: float) -> list[tuple[M, float]]:
        """[any thread] Remove the messages that have to wait for long; return the first one of each slot, behind which
        the others come, and for how many seconds they go back.
        """
        late = list[tuple[M, float]]()
        with self._lock:
            for turn in self._turns.values():
                fits, seconds = _fits(turn, now)
                if turn.aside and len(turn.aside) > fits:
                    late.append((turn.aside[fits], seconds))
                    while len(turn.aside) > fits:
                        turn.aside.pop()
        return late

    def take(self) -> list[M]:
        """[any thread] Remove and return all messages that were set aside."""
        with self._lock:
            taken = [message for turn in self._turns.values() for message in turn.aside]
            for turn in self._turns.values():
                turn.aside = ()
        return taken

    @property
    def count(self) -> int:
        """[any thread] How many messages are set aside."""
        with self._lock:
            return sum(len(turn.aside) for turn in self._turns.values())


def _fits(turn: _Turn[Any], now: float) -> tuple[int, float]:
    """Return how many messages may be set aside, and for how many seconds further ones go back."""
    expected = turn.expected(now)
    fits = min(int(ASIDE_SECONDS / expected), MAX_ASIDE)
    seconds = fits * expected / 2 if fits else MOST_BACK
    return fits, min(max(seconds, LEAST_BACK), MOST_BACK)


def slot_of_message(message: Any) -> Slot:
    """Return the slot of a message with an order key."""
    return slot_of(message._run.lane)
