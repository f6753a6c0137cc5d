"""Random histories of order keys on a disk that forgets pages: choices end at reads, and other commands come before
these have ended.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Ack, Administer, HandBack, Heartbeat, Subscribe, Unsubscribe
from qmq.broker.ports.effects import (
    CheckpointWanted,
    CheckWanted,
    Effect,
    FetchWanted,
    PulledMessages,
    ReadWanted,
    Subscribed,
    SyncWanted,
)
from qmq.format.lanes import ORDERED_KINDS
from qmq.format.layout import LANE_ORDERED
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.test_order import (
    FOLLOWED,
    SESSION_MS,
    SUBJECTS,
    DispositionRange,
    Model,
    Session,
    Slots,
    attempts_of,
    texts,
)
from tests.fake_disk import FakeDisk

KEYS = ("k", "l", "m", "n", "o")
_WORK = SyncWanted | ReadWanted | CheckWanted | FetchWanted | CheckpointWanted


class ColdSlots(Slots):
    """A broker whose reads wait until ``read``."""

    def effects(self) -> list[Effect]:
        said: list[Effect] = []
        while effects := self.broker.take_effects():
            said += [effect for effect in effects if not isinstance(effect, _WORK)]
            self.fetches += [effect for effect in effects if isinstance(effect, FetchWanted)]
            self.wanted += [effect for effect in effects if isinstance(effect, SyncWanted)]
            self.reads += [effect for effect in effects if isinstance(effect, ReadWanted)]
            if self.wanted:
                self.sync(turn=False)
            self.fetch()
        return said


class ColdHistory:
    """Consumers, each with one pull at a time, whose answers may come in any later turn."""

    def __init__(self, directory: Path, seed: int, partitions: int) -> None:
        self.chance = random.Random(seed)
        self.disk = FakeDisk("boot-1", forgets=self.chance.choice((0.1, 0.2, 0.4)), seed=seed)
        self.driven = ColdSlots(
            directory, partitions=partitions, disk=self.disk, segment_bytes=64 << 10, max_frame_bytes=32 << 10
        )  # type: ignore[arg-type]  # a disk is no int
        self.model = Model()
        self.has_kinds = bool(seed % 2)
        self.prefixes = self.chance.choice(FOLLOWED)
        #: The request of the pull that each consumer waits for.
        self.pending: dict[str, int] = {}
        #: Answers that are told to the model later.
        self.withheld: list[Effect] | None = None
        self.late = 0
        self.sessions: dict[str, Session] = {}
        for name in self.prefixes:
            self.join(name)

    def came(self, said: list[Effect]) -> None:
        if self.withheld is not None:
            self.withheld += said
            return
        for effect in said:
            for name, request in list(self.pending.items()):
                is_mine = getattr(effect, "connection", None) == self.sessions[name].connection
                if is_mine and getattr(effect, "request", None) == request:
                    del self.pending[name]
                    assert isinstance(effect, PulledMessages), effect
                    assert len(texts(effect)) == len(attempts_of(effect))
                    self.model.given(name, effect)

    def do(self, command: object) -> list[Effect]:
        said = self.driven.do(command)
        self.came(said)
        return said

    def join(self, name: str) -> None:
        """Subscribe, or take over; the model hears of others' answers once it knows what became of its messages."""
        driven, self.withheld = self.driven, self.withheld or []
        driven.connections += 1
        nonce = name.encode().ljust(8, b"-") + b"%8d" % driven.connections
        settings = {"retry_delays_us": (0,), "max_attempts": 4, "max_unacked": 12, "max_session_expiries": 100}
        command = Subscribe(
            driven.connections, driven.request(), "g", self.prefixes[name], name, None, nonce, nonce,
            settings=tuple(settings.items()),
        )  # fmt: skip
        said = self.do(command)
        while not (answers := [one for one in said if isinstance(one, Subscribed)]):
            said = driven.read()
            self.came(said)
        self.pending.pop(name, None)
        self.sessions[name] = Session(driven.connections, answers[0].subscription, name)
        if not driven.broker.groups["g"].ledger.by_name[name].in_flight.count:
            self.model.in_hand[name].clear()
        withheld, self.withheld = self.withheld, None
        self.came(withheld)

    def leave(self, name: str) -> None:
        who = self.sessions[name]
        self.model.in_hand[name].clear()
        self.pending.pop(name, None)
        self.do(Unsubscribe(who.connection, self.driven.request(), who.subscription))

    def pull(self, name: str, most: int, timeout_ms: int = 0) -> None:
        if name not in self.pending:
            who = self.sessions[name]
            command = self.driven.pull_command(
                who.subscription, max_count=most, connection=who.connection, timeout_ms=timeout_ms
            )
            self.pending[name] = command.request
            self.do(command)
            self.late += name in self.pending

    def ack(self, name: str, number: int) -> None:
        who = self.sessions[name]
        self.model.settle(name, number)
        self.do(Ack(who.connection, self.driven.request(), who.subscription, (number, number + 1)))

    def back(self, name: str, number: int) -> None:
        who, chance = self.sessions[name], self.chance
        kind = chance.choice((Disposition.NACK, Disposition.RELEASE, Disposition.REJECT))
        (found,) = self.driven.broker.groups["g"].ledger.by_name[name].in_flight.between(number, number + 1)
        is_dead = kind is Disposition.REJECT or (kind is Disposition.NACK and found.attempt >= 4)
        delay_us = chance.choice((0, 0, 300_000)) if kind is Disposition.NACK else None
        (self.model.settle if is_dead else self.model.back)(name, number)
        backs = (DispositionRange(number, number + 1, kind, delay_us, "it broke"),)
        self.do(HandBack(who.connection, self.driven.request(), who.subscription, backs))

    def send(self, keys: list[str]) -> None:
        for key in keys:
            kind = self.chance.choice((LANE_ORDERED, *ORDERED_KINDS)) if self.has_kinds else LANE_ORDERED
            number = self.driven.numbers[key]
            self.driven.numbers[key] += 1
            self.model.sent[key].append(number)
            slot = kind | sum(key.encode()) % 4_096
            content = {self.chance.choice(SUBJECTS): [b"%s %d" % (key.encode(), number)]}
            self.do(self.driven.send_command(content, lane=slot))

    def alive(self, silent: str = "") -> None:
        for name, who in self.sessions.items():
            if name != silent:
                nonce = name.encode().ljust(8, b"-") + b"%8d" % who.connection
                self.do(Heartbeat(who.connection, self.driven.request(), nonce, 0))

    def fall_silent(self, name: str) -> None:
        self.withheld = []
        for _ in range(3):
            self.alive(name)
            self.came(self.driven.advance(SESSION_MS // 2))
        self.join(name)  # a pull that waits may have kept it there

    def restart(self) -> None:
        driven = self.driven
        driven.store.close(clean=False)
        for several in (self.pending, driven.reads, driven.wanted, driven.read_outcomes):
            several.clear()
        driven.open()
        for name in list(self.sessions):
            self.join(name)

    def step(self) -> None:
        """Let something happen."""
        chance, luck = self.chance, self.chance.random()
        name = chance.choice(list(self.sessions))
        mine = self.model.in_hand[name]
        if chance.random() < 0.03:
            self.do(Administer(77, self.driven.request(), "roll", {}))
        if chance.random() < 0.1:
            self.disk.forget()
        if chance.random() < 0.4:
            self.came(self.driven.read())
        if luck < 0.3:
            self.send(chance.choices(KEYS, k=chance.choice((1, 1, 3, 8))))
        elif luck < 0.6:
            self.pull(name, chance.choice((1, 2, 5, 100)), chance.choice((0, 0, 5_000)))
        elif luck < 0.8 and mine:
            self.ack(name, chance.choice(list(mine)) if chance.random() < 0.3 else min(mine))
        elif luck < 0.87 and mine:
            self.back(name, chance.choice(list(mine)))
        elif luck < 0.9:
            if chance.random() < 0.5:
                self.leave(name)
            self.join(name)
        elif luck < 0.93:
            self.restart()
        elif luck < 0.95:
            self.fall_silent(name)
        else:
            self.alive()
            self.came(self.driven.advance(200))
        self.alive()

    def drain(self) -> None:
        """Let the consumers ack all that is left."""
        for _ in range(600):
            self.alive()
            self.came(self.driven.advance(300))
            self.came(self.driven.read())
            for name in self.sessions:
                for number in sorted(self.model.in_hand[name]):
                    self.ack(name, number)
                self.pull(name, 1_000_000)
                self.came(self.driven.read())
            if all(self.model.settled[key] >= set(numbers) for key, numbers in self.model.sent.items()):
                break
        for key, numbers in self.model.sent.items():
            assert self.model.settled[key] == set(numbers), key


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("partitions", [1, 3])
def test_choices_that_end_at_a_read_keep_the_order(
    tmp_path: Path, seed: int, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 6)
    monkeypatch.setattr("qmq.broker.delivery.order.scan.AGAIN_ROWS", 10 if seed % 2 else 100_000)
    history = ColdHistory(tmp_path, seed, partitions)
    for _ in range(200):
        history.step()
    history.drain()
    assert history.late >= 10
    history.driven.store.close(clean=True)
