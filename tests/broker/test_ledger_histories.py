"""A group's ledger in random histories: every message is in one place, and a restart changes nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.in_flight import MessageRange
from qmq.broker.groups.member import Member
from qmq.broker.groups.settings import GroupSettings
from qmq.broker.journal.record_types import Leaving, Verdict
from qmq.broker.ports.commands import Back
from qmq.errors import Fenced
from tests.broker.groups.test_group_state import NEVER, Driven, everything_else, held_ids, ids_of

#: What befalls is what other tests try one by one: here no lines are counted.
pytestmark = pytest.mark.no_cover

NAMES = ("ann", "bob", "cid")


class History:
    """What befalls a group, from a seed: a step is one event. What is so is known here message by message."""

    def __init__(self, path: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.driven, self.now = Driven(path), 1_000_000
        self.given = 0
        self.acked: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.sequence_of: dict[tuple[str, int], int] = {}  # the message by consumer and pull sequence

    @property
    def ledger(self) -> Ledger:
        return self.driven.ledger

    def step(self) -> None:
        self.now += self.chance.randrange(20)
        name = self.chance.choice(NAMES)
        member = self.ledger.by_name.get(name)
        what = self.chance.random()
        if member is None or member.closed or what < 0.03:
            self.join(name, member)
        elif what < 0.25:
            self.pull(member)
        elif what < 0.45 and self.ledger.retries.load(self.now):
            self.pull_again(member)
        elif what < 0.65:
            self.ack(member)
        elif what < 0.85 and held_ids(member):
            self.hand_back(member)
        elif what < 0.92:
            self.ledger.leave(member, self.chance.choice([Leaving.LEFT, Leaving.LAPSED]), self.now)
            with pytest.raises(Fenced):
                self.ledger.member(member.number, member.incarnation)
        elif what < 0.96:
            self.driven.checkpoint()
        else:
            self.restart()

    def join(self, name: str, member: Member | None) -> None:
        held = held_ids(member) if member is not None and not member.closed else []
        joined = self.ledger.join(name, bytes([self.chance.randrange(3)]), transient=False, now_us=self.now)
        assert held_ids(joined) in (held, [])

    def pull(self, member: Member) -> None:
        ranges = []
        for _ in range(self.chance.randrange(1, 4)):
            total = self.chance.randrange(1, 12)
            ranges.append(MessageRange(3, self.given, 0, 0, total))
            self.given += total
        pull = self.ledger.pulled(member, ranges, 10, self.now, [])
        fresh = [message for messages in ranges for message in ids_of(messages)]
        self.sequence_of |= {(member.name, pull.first + at): message for at, message in enumerate(fresh)}
        self.attempts |= dict.fromkeys(fresh, 1)

    def pull_again(self, member: Member) -> None:
        retries = self.ledger.retries
        if retries.is_due_alone and not member.held.count:
            taken = [retries.take_alone(NEVER)]
        elif not member.alone:
            taken = retries.take(self.chance.randrange(1, 20))
        else:
            taken = []
        if self.chance.random() < 0.2:
            retries.put_back(taken)
        elif taken:
            pull = self.ledger.pulled_again(member, taken, 10, self.now)
            again = [(message, one.held.attempt) for one in taken for message in ids_of(one.held.messages)]
            self.sequence_of |= {(member.name, pull.first + at): message for at, (message, _) in enumerate(again)}
            assert not self.acked & {message for message, _ in again}
            assert again == [(message, self.attempts[message]) for message, _ in again]

    def ack(self, member: Member) -> None:
        start = self.chance.randrange(member.held.next_sequence + 1)
        end = start + self.chance.randrange(1, 10)
        open_ones = {number for low, high in member.held.unhandled() for number in range(low, high)}
        self.ledger.ack(member, [start, end])
        self.acked |= {self.sequence_of[member.name, number] for number in range(start, end) if number in open_ones}

    def hand_back(self, member: Member) -> None:
        start, end = self.chance.choice(member.held.unhandled())
        start = self.chance.randrange(start, end)
        end = min(end, start + self.chance.randrange(1, 5))
        verdict = self.chance.choice(list(Verdict))
        messages = [self.sequence_of[member.name, number] for number in range(start, end)]
        delay_us = self.chance.choice([None, 0, 30])
        back = Back(start, end, verdict, delay_us, "broke")
        refused = self.ledger.hand_back(member, [back, Back(end - 1, end + 1, verdict, None, "twice")], self.now)
        assert refused == [1]
        if verdict == Verdict.NACK:
            self.attempts |= {message: min(self.attempts[message] + 1, 4) for message in messages}
        assert self.ledger.hand_back(member, [back], self.now) == [0]

    def restart(self) -> None:
        before = self.ledger
        held = {name: held_ids(member) for name, member in before.by_name.items()}
        self.driven.restart()
        assert {name: held_ids(member) for name, member in self.ledger.by_name.items()} == held
        assert self.ledger.retries.count == before.retries.count
        assert len(self.ledger.dead) == len(before.dead)

    def held(self) -> list[int]:
        """What anybody holds: each message once, and none that is acknowledged."""
        held = [message for member in self.ledger.members.values() for message in held_ids(member)]
        assert len(held) == len(set(held)), "held twice"
        assert not self.acked & set(held)
        return held


@pytest.mark.parametrize("seed", range(60))
def test_every_message_is_in_one_place(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path, seed)
    history.ledger.set(GroupSettings(max_attempts=4, max_lapses=2, retry_delays_us=(50, 100)))
    for _ in range(150):
        history.step()
        history.held()
    held, count = history.held(), history.ledger.retries.count
    waiting, dead = everything_else(history.ledger)
    assert count == len(waiting)
    assert sorted([*held, *waiting, *dead, *history.acked]) == list(range(history.given)), f"seed {seed}"
