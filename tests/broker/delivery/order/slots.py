"""A broker with messages of order keys and priorities, driven by hand, and what tests of order keys do with it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from qmq.broker.ports.commands import Heartbeat, Send, Subscribe, Unsubscribe
from qmq.broker.ports.effects import Effect, PulledMessages, Sent, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.format.build import RunContent, make_header
from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_NORMAL, LANE_ORDERED
from tests.broker.delivery.order.test_order import SESSION_MS, Session, Slots, attempts_of, numbers_of, texts
from tests.broker.harness import Driven

__all__ = ["SESSION_MS", "Keys", "Session", "answered", "attempts_of", "bodies_after", "numbers_of", "texts"]

#: The priorities of bodies that begin so; others begin with an order key.
PRIORITIES = {"high": LANE_HIGH, "normal": LANE_NORMAL, "low": LANE_LOW}


class Keys(Slots):
    """A broker with messages in slots and of priorities, whose bodies are "KEY NUMBER" or "PRIORITY NUMBER"."""

    def __init__(self, directory: Path, limits: BrokerLimits | None = None, **options: int) -> None:
        Driven.__init__(self, directory, limits or BrokerLimits(session_timeout_ms=SESSION_MS), **options)
        self.connections = 0
        self.numbers = defaultdict(int)

    def put(
        self, *keys: str, subject: str = "a.b", kind: int = LANE_ORDERED, tags: tuple[str, ...] = (),
        expires_us: int = 0, delay_us: int = 0,
    ) -> list[str]:  # fmt: skip
        """Send one message of each key, or priority, each in a batch of its own; return the bodies."""
        sent = []
        for key in keys:
            sent.append(f"{key} {self.numbers[key]}")
            self.numbers[key] += 1
            header = make_header(tags=tags, deliver_at=delay_us, expire_at=expires_us)
            self.send_runs(RunContent(subject, [sent[-1].encode()], [header], lane_of(key, kind)))
        return sent

    def send_delayed(self, key: str, delay_us: int, subject: str = "a.b") -> Sent:
        """Send one delayed message of a key; return where it lies."""
        body = f"{key} {self.numbers[key]}"
        self.numbers[key] += 1
        return self.send_runs(RunContent(subject, [body.encode()], [make_header(deliver_at=delay_us)], lane_of(key)))

    def command_of(self, key: str, subject: str = "a.b") -> Send:
        """Return a Send of the next message of a key, or a priority."""
        body = f"{key} {self.numbers[key]}"
        self.numbers[key] += 1
        return self.send_command({subject: [body.encode()]}, lane=lane_of(key))

    def rejoin(self, *sessions: Session, prefixes: tuple[str, ...] = ("a.",)) -> list[Session]:
        """Have the same programs connect again; return their sessions."""
        found = list[Session]()
        for who in sessions:
            nonce = who.name.encode().ljust(8, b"-") + b"%8d" % who.connection
            command = Subscribe(who.connection, self.request(), "g", prefixes, who.name, None, nonce, nonce)
            (answer,) = self.do(command) or self.sync_records()
            assert isinstance(answer, Subscribed), answer
            found.append(who._replace(subscription=answer.subscription))
        return found

    def wait(self, who: Session, timeout_ms: int = 600_000, **limits: int) -> list[Effect]:
        """Pull, and wait for messages; return the effects."""
        return self.do(self.pull_command(who.subscription, connection=who.connection, timeout_ms=timeout_ms, **limits))

    def drain(self, *sessions: Session, most: int = 1_000_000) -> list[str]:
        """Have consumers pull and ack in turn until none gets anything; return the bodies."""
        found, is_more = list[str](), True
        while is_more:
            is_more = False
            for who in sessions:
                answer = self.take(who, most)
                if answer.ranges:
                    self.ack(who, *numbers_of(answer))
                    found += texts(answer)
                    is_more = True
        return found

    def leave(self, who: Session) -> list[Effect]:
        """Have a consumer leave; return the effects."""
        return self.do(Unsubscribe(who.connection, self.request(), who.subscription))

    def kill(self) -> None:
        """Kill the broker's process, and start it again."""
        self.store.close(clean=False)
        self.wanted.clear()
        self.reads.clear()
        self.open()

    def expire(self, *others: Session) -> list[Effect]:
        """Let sessions expire, but for those of *others*; return the effects."""
        said = self.alive(*others)
        for _ in range(3):
            said += self.advance(SESSION_MS // 2)
            said += self.alive(*others)
        return said + self.do()

    def alive(self, *sessions: Session) -> list[Effect]:
        """Have the clients of consumers say that they live; return the effects."""
        said = list[Effect]()
        for who in sessions:
            client = who.name.encode().ljust(8, b"-") + b"%8d" % who.connection
            said += self.do(Heartbeat(who.connection, self.request(), client, 0))
        return said


def lane_of(key: str, kind: int = LANE_ORDERED) -> int:
    """Return the lane of a key, of one of ORDERED_KINDS, or of a priority."""
    return PRIORITIES.get(key, kind | sum(key.encode()) % 4_096)


def answered(said: list[Effect]) -> dict[int, list[str]]:
    """Return the bodies that pulls were answered with, by connection."""
    return {one.connection: texts(one) for one in said if isinstance(one, PulledMessages)}


def bodies_after(said: list[Effect], who: Session) -> list[str]:
    """Return the bodies that a consumer's pull was answered with; none where it waits on."""
    return answered(said).get(who.connection, [])
