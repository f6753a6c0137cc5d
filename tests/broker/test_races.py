"""Two events happen to a message in either order: how the second is answered, and what becomes of the message.

Consumer ``one`` has a message in flight, and ``two`` waits for work. For each pair the table says how the broker
answers the second event (+ taken, r a refused ack, F Fenced, U an unknown subscription) and then the state of the
message, also after the broker was killed: H one has it, T two does, D it is done, X it is a dead letter, 1 or 2 it
comes again as that attempt (X1 both: it was dead when the group went back to its beginning).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Heartbeat, Subscribe, Unsubscribe
from qmq.broker.ports.effects import Effect, Refused, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import Fenced, UnknownSubscription
from qmq.net.protocol.types import Disposition, KnownConsumer
from tests.broker.group_state import ledger_of
from tests.broker.test_admin import ask
from tests.broker.test_consuming import Consumer, filled, killed

SESSION_TIMEOUT_MS = 1_000
DELAY_US = 300_000

SECOND = "       ack  nack release reject leave expire reconnect takeover repull due  seek"
TABLE = {
    "ack": "+D   FD   FD      FD     +D    +D    +D        +D       +D     +D   +1",
    "nack": "r2   F2   F2      F2     +2    +2    +2        +2       +2     +2   +1",
    "release": "r1   F1   F1      F1     +1    +1    +1        +1       +H     +1   +1",
    "reject": "rX   FX   FX      FX     +X    +X    +X        +X       +X     +X   +X1",
    "leave": "U1   U1   U1      U1     U1    +1    +1        +1       U1     +1   +1",
    "expire": "F1   F1   F1      F1     +1    +1    +1        +1       F1     +1   +1",
    "reconnect": "+D   +2   +1      +X     +1    +1    +H        +H       +H     +H   +1",
    "takeover": "FH   FH   FH      FH     +H    +1    FH        +1       FH     +H   +1",
    "repull": "+D   +2   +1      +X     +1    +1    +H        +H       +H     +H   +1",
    "due": "r2   F2   F2      F2     +2    +2    +2        +2       +H     +2   +1",
    "two has it": "rT   FT   FT      FT     +T    +T    +T        +T       +T     +T   +1",
    "seek": "F1   F1   F1      F1     +1    +1    +1        +1       F1     +1   +1",
}
EVENTS = SECOND.split()


class Race:
    """Consumers one and two, and the events that may happen to them."""

    def __init__(self, directory: Path) -> None:
        self.driven = filled(directory, 1, BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS))
        self.one = Consumer(self.driven, "one", nonce=b"n", retry_delays_us=(DELAY_US,), max_session_expiries=3)
        self.two = Consumer(self.driven, "two", connection=2)
        assert self.one.pull() == [b"0"]
        self.connections = 2
        self.is_there = True  # one beats

    def beat(self, milliseconds: int) -> None:
        """Let time pass, with heartbeats of two and of one's process."""
        names = [b"one", b"two"] if self.is_there else [b"two"]
        self.driven.do(*[Heartbeat(9, self.driven.request(), name, 0) for name in names])
        self.driven.advance(milliseconds)

    def ack(self) -> str:
        return "r" if self.one.ack(0) else "+"

    def nack(self) -> str:
        self.one.back(0, 1)
        return "+"

    def release(self) -> str:
        self.one.back(0, 1, Disposition.RELEASE)
        return "+"

    def reject(self) -> str:
        self.one.back(0, 1, Disposition.REJECT)
        return "+"

    def leave(self) -> str:
        command = Unsubscribe(self.one.connection, self.driven.request(), self.one.subscription)
        return self.answered(self.driven.do(command)[0])

    def answered(self, answer: Effect) -> str:
        if isinstance(answer, Refused):
            raise answer.error
        return "+"

    def expire(self) -> str:
        """Silence the process that is consumer one now."""
        self.is_there = False
        for _ in range(2):
            self.beat(SESSION_TIMEOUT_MS // 2 + 1)
        return "+"

    def reconnect(self) -> str:
        """Connect the first process of consumer one again."""
        self.connections += 1
        consumer_state = self.one.consumer_state
        generation = self.driven.store.groups.generation
        known = KnownConsumer(consumer_state.since_us, generation, consumer_state.epoch, 1, ())
        start = self.connections, self.driven.request(), "g", ("",), "one", None, b"n", b"one"
        answer = self.driven.do(Subscribe(*start, known=known))[0]
        if isinstance(answer, Subscribed):
            self.one.connection, self.one.subscription = self.connections, answer.subscription
        return self.answered(answer)

    def takeover(self) -> str:
        """Start another process under the same id; the calls that follow come from the one before."""
        self.connections += 1
        nonce = b"%d" % self.connections
        start = self.connections, self.driven.request(), "g", ("",), "one", None, nonce, b"one"
        assert isinstance(self.driven.do(Subscribe(*start))[0], Subscribed)
        return "+"

    def repull(self) -> str:
        """Pull again as if the answer was lost."""
        self.one.expected = 0
        self.one.pull()
        return "+"

    def due(self) -> str:
        """Let time pass until retries are due."""
        self.beat(DELAY_US // 1_000)
        return "+"

    def seek(self) -> str:
        ask(self.driven, "seek_group", group="g", to="first", clear_retries=True)
        return "+"

    def first(self, name: str) -> None:
        """Let the first of the two events happen."""
        if name in ("due", "two has it"):
            self.nack()
        if name == "two has it":
            self.due()
            assert self.two.pull() == [b"0"]
        else:
            self.event(name)

    def event(self, name: str) -> str:
        """Let any event happen, and return how it was answered."""
        call: Callable[[], str] = getattr(self, name)
        try:
            return call()
        except Fenced:
            return "F"
        except UnknownSubscription:
            return "U"

    def outcome(self) -> str:
        """Return the state of the message."""
        killed(self.driven)
        ledger = ledger_of(self.driven)
        dead = "X" * len(ledger.dead)
        for name, letter in (("one", "H"), ("two", "T")):
            if ledger.by_name[name].in_flight.count:
                return dead + letter
        self.two.join()
        self.two.expected = self.two.consumer_state.next_sequence
        for _ in range(4):
            self.is_there = False
            self.beat(SESSION_TIMEOUT_MS // 4)
            if self.two.pull():
                return f"{dead}{self.two.got[max(self.two.got)][1]}"
        return dead or "D"


@pytest.mark.parametrize("first", TABLE)
def test_what_becomes_of_a_message_when_two_things_happen_to_it(tmp_path: Path, first: str) -> None:
    expected = dict(zip(EVENTS, TABLE[first].split(), strict=True))
    found = {}
    for second in EVENTS:
        race = Race(tmp_path / second)
        race.first(first)
        found[second] = race.event(second) + race.outcome()
        race.driven.close()
    assert found == expected
