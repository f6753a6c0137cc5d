"""Compare what was received with what was sent: as many messages, with the same bodies, in any order if brokers keep
none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final

from qmq.bench.raw import bodies_of
from qmq.bench.values import BenchFailed

#: The number of different bodies, which are sent over and over.
BODIES: Final = 1_000
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def bodies(size: int) -> list[bytes]:
    """Return the bodies of *size* bytes, in the order in which they are sent."""
    return bodies_of(BODIES, size)


def text_of(size: int) -> str:
    """Return a body of *size* bytes without a zero, for tools that send one text over and over."""
    return (LETTERS * (size // len(LETTERS) + 1))[:size]


class Tally:
    """The messages to receive, the bodies over and over. Messages in order are compared by a slice.

    With *there*, so many were sent, and *messages* of them or a few more are to be received. With *text*, every message
    has this body.
    """

    def __init__(self, size: int, messages: int, there: int | None = None, text: str = "") -> None:
        self.came = 0
        self.messages = messages
        self._there = messages if there is None else there
        self._partly = there is not None
        self._size = size
        self._bodies = [text.encode()] if text else bodies(size)
        self._in_order = 0
        self._others: Counter[bytes] = Counter()

    def add(self, found: Sequence[bytes]) -> None:
        """Add messages that were received."""
        start = self._in_order % len(self._bodies)
        expected = self._expected(start, len(found))
        if list(found) == expected:
            self._in_order += len(found)
        else:
            self._others.update(map(bytes, found))
        self.came += len(found)

    def _expected(self, start: int, count: int) -> list[bytes]:
        if start + count <= len(self._bodies):
            return self._bodies[start : start + count]
        return list(islice(cycle(self._bodies), start, start + count))

    def check(self) -> None:
        """Raise BenchFailed unless all messages were received, each as often as it was sent."""
        if not self.messages <= self.came <= self._there:
            raise BenchFailed(f"{self.came} messages came, {self.messages} were sent")
        wanted = Counter(dict(enumerate_counts(self._bodies, self._there)))
        wanted.subtract(dict(enumerate_counts(self._bodies, self._in_order)))
        wanted.subtract(self._others)
        for body, count in wanted.items():
            if count < 0 or (count and not self._partly):
                raise BenchFailed(f"{body!r:.60} came {-count:+} times more than it was sent")


def enumerate_counts(parts: Sequence[bytes], messages: int) -> list[tuple[bytes, int]]:
    """Return how often each body is among *messages* that are sent over and over."""
    whole, rest = divmod(messages, len(parts))
    return [(body, whole + (place < rest)) for place, body in enumerate(parts)]
