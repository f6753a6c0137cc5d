"""Random histories of consumers that ack, fail, die and come back, and of a broker that is killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest

from qmq.broker.ports.commands import Heartbeat, Unsubscribe
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import Fenced
from qmq.net.protocol.types import Disposition
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, killed
from tests.effort import part_of

#: Other tests try the same events one by one, so no covered lines are counted here.
pytestmark = pytest.mark.no_cover

SETTINGS: Final = {
    "retry_delays_us": (1_000, 2_000),
    "max_attempts": 1_000,
    "max_session_expiries": 255,
    "max_unacked": 40,
}
SUBJECTS: Final = ("a.x", "a.y", "b", "c")


class History:
    """A history of three consumers of a group, by a seed. ``holds`` is what each has in flight by its own count."""

    def __init__(self, path: Path, seed: int, partitions: int) -> None:
        self.chance = random.Random(seed)
        self.driven = Driven(path, BrokerLimits(session_timeout_ms=1_000), partitions=partitions)
        self.prefixes = self.chance.choice([("",), ("a.",), ("a.x", "a.y"), ("a.", "b")])
        self.consumers = [
            Consumer(self.driven, f"c{number}", *self.prefixes, connection=number, **SETTINGS) for number in range(1, 4)
        ]
        self.holds: dict[str, dict[int, bytes]] = {one.name: {} for one in self.consumers}
        self.sent = 0
        self.matching: set[bytes] = set()
        self.done: set[bytes] = set()

    def step(self, number: int) -> None:
        """Let one event happen; late in the history, one that empties the group."""
        one = self.chance.choice(self.consumers)
        what = self.chance.random() if number < 150 else 0.3 + self.chance.random() / 3
        self.driven.advance(self.chance.randrange(100))
        try:
            self.befall(one, what)
            beating = [each.name.encode() for each in self.consumers if self.chance.random() < 0.5]
            self.driven.do(*[Heartbeat(9, self.driven.request(), client, 0) for client in beating])
        except Fenced:
            one.join()
            one.got.clear()
            self.holds[one.name].clear()
            one.expected = one.consumer_state.ack_floor

    def befall(self, one: Consumer, what: float) -> None:
        mine = self.holds[one.name]
        if what < 0.25:
            self.send()
        elif what < 0.5:
            self.pull(one)
        elif what < 0.75 and mine:
            self.ack(one)
        elif what < 0.85 and mine:
            number = self.chance.choice(sorted(mine))
            one.back(number, number + 1, self.chance.choice([Disposition.NACK, Disposition.RELEASE]))
            del mine[number]
        elif what < 0.9:
            self.driven.do(Unsubscribe(one.connection, self.driven.request(), one.subscription))
            mine.clear()
            one.join()
        elif what < 0.93:
            one.nonce = self.chance.randbytes(4)
            one.join()
            one.got.clear()
            mine.clear()  # it gets its messages in flight again
        elif what < 0.97:
            self.chance.choice([self.driven.restart, self.driven.checkpoint, lambda: killed(self.driven)])()
            self.join_again()

    def send(self) -> None:
        contents: dict[str, list[bytes]] = {}
        for _ in range(self.chance.randrange(1, 12)):
            subject, body = self.chance.choice(SUBJECTS), b"%d" % self.sent
            contents.setdefault(subject, []).append(body)
            if any(self.is_followed(subject, prefix) for prefix in self.prefixes):
                self.matching.add(body)
            self.sent += 1
        self.driven.change_producer()
        self.driven.do(self.driven.send_command(contents))

    @staticmethod
    def is_followed(subject: str, prefix: str) -> bool:
        return subject == prefix or ((prefix.endswith(".") or not prefix) and subject.startswith(prefix))

    def pull(self, one: Consumer) -> None:
        before = set(one.got)
        one.pull(self.chance.randrange(1, 30))
        for number in set(one.got) - before:
            body = one.got[number][0]
            assert body not in self.done, f"{body!r} came again after its acknowledgement was confirmed"
            for other, held in self.holds.items():
                assert body not in held.values() or other == one.name, f"{other} holds {body!r} too"
            self.holds[one.name][number] = body

    def ack(self, one: Consumer) -> None:
        mine = self.holds[one.name]
        numbers = self.chance.sample(sorted(mine), self.chance.randrange(len(mine)) + 1)
        assert one.ack(*numbers) == 0
        self.done |= {mine.pop(number) for number in numbers}

    def join_again(self) -> None:
        for each in self.consumers:
            each.join()
            each.got = {number: got for number, got in each.got.items() if number < each.expected}
            each.expected = each.consumer_state.next_sequence if each.nonce == b"n" else each.expected

    def drain(self) -> None:
        """Restart all consumers, and ack messages until all that was sent is acked, for a bounded time."""
        for _ in range(300):
            self.driven.advance(500)
            for one in self.consumers:
                one.join()
                one.got.clear()
                while one.pull():
                    self.done |= {body for body, _ in one.got.values()}
                    one.ack()
                    one.got.clear()
            if self.done >= self.matching:
                break


@pytest.mark.parametrize("seed", range(part_of(30)))
@pytest.mark.parametrize("partitions", [1, 3])
def test_everything_is_handled_once_whatever_happens(tmp_path: Path, seed: int, partitions: int) -> None:
    """No acked message comes again, no message is in flight twice, and all are acked in the end."""
    history = History(tmp_path, seed, partitions)
    for number in range(200):
        history.step(number)
    history.drain()
    assert history.done == history.matching, f"seed {seed}: lost {sorted(history.matching - history.done)}"
    history.driven.close()
