"""Delayed messages on a disk that loses power and fails: at any operation of sending, cancelling, falling due.

After each crash, once all is due: what was acknowledged with flush is there once, under its id and not early; what was
cancelled for sure is not; nothing is there twice; ``qmq verify`` finds no fault. A seed that fails is in the test's id.
"""

from __future__ import annotations

import copy
import errno
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from qmq.broker.ports.commands import Administer, Send, SyncBroken, Synced
from qmq.broker.ports.effects import Administered, Effect, PulledMessages, Refused, Sent
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import StorageError, SyncFailed
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.ids import MessageId
from tests.broker.harness import START_US, Driven, runs_of_answer
from tests.effort import part_of
from tests.fake_disk import Operation
from tests.sim.disk import SimulatedDisk
from tests.sim.life import DIRECTORY, SMALL, check_files, stop

#: Thousands of histories: they run twice as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

LIMITS = BrokerLimits(producer_window=1_000, producer_ttl_ms=1_000_000_000)
LONG_MS = 40_000


@dataclass
class Sending:
    """What is known of one message."""

    flush: bool
    due_us: int
    name: str = ""
    stored: bool = False
    #: A cancellation was asked for; it was confirmed.
    doubtful: bool = False
    cancelled: bool = False


@dataclass
class Record:
    """What clients know."""

    sent: dict[bytes, Sending] = field(default_factory=dict)
    requests: dict[int, list[bytes]] = field(default_factory=dict)
    cancels: dict[int, bytes] = field(default_factory=dict)

    def hear(self, said: list[Effect], store_id: bytes) -> None:
        """Answers."""
        for effect in said:
            if isinstance(effect, Sent):
                for ordinal, body in enumerate(self.requests.pop(effect.request)):
                    known = self.sent[body]
                    known.stored = True
                    known.name = str(MessageId(store_id, effect.partition, effect.position + ordinal))
            elif isinstance(effect, Administered):
                self.sent[self.cancels.pop(effect.request)].cancelled = bool(effect.fields["cancelled"])
            elif isinstance(effect, Refused):
                self.requests.pop(effect.request, None)
                self.cancels.pop(effect.request, None)


class Life:
    """A broker on that disk, and what is done to it."""

    def __init__(self, disk: SimulatedDisk, record: Record, seed: int, wall_us: int = START_US) -> None:
        self.disk = disk
        self.record = record
        self.chance = random.Random(seed)
        self.driven = Driven(DIRECTORY, LIMITS, auto_sync=False, disk=disk, partitions=1 + seed % 2, **SMALL)
        self.driven.now = self.driven.now._replace(wall_us=wall_us)

    def step(self) -> None:
        """One thing, as chance has it."""
        kind = self.chance.random()
        try:
            if kind < 0.35:
                self.send()
            elif kind < 0.45:
                self.cancel()
            elif kind < 0.6:
                self.sync()
            elif kind < 0.85:
                self.hear(self.driven.advance(self.chance.choice((1, 500, 3_000))))
            else:
                self.checkpoint()
        except StorageError:
            self.disk.struck["step failed"] += 1

    def hear(self, said: list[Effect]) -> None:
        self.record.hear(said, self.driven.store.store_id)

    def send(self) -> None:
        record, chance, now_us = self.record, self.chance, self.driven.now.wall_us
        bodies = [b"message %d" % (len(record.sent) + n) for n in range(chance.choice((1, 1, 3)))]
        delays = [chance.choice((1, 2_000_000, 5_000_000, 20_000_000)) for _ in bodies]
        flush = chance.random() < 0.7
        for body, delay in zip(bodies, delays, strict=True):
            record.sent[body] = Sending(flush, now_us + delay)
        run = RunContent(chance.choice("ab"), bodies, [make_header(deliver_at=delay) for delay in delays])
        parts = build_batch([run], created_at_us=1, producer_id=b"p" * 16, producer_sequence=len(record.sent))
        command = Send(1, self.driven.request(), memoryview(bytearray(b"".join(parts))), flush)
        record.requests[command.request] = bodies
        self.hear(self.driven.do(command))

    def cancel(self) -> None:
        named = [body for body, known in self.record.sent.items() if known.name and not known.doubtful]
        if named:
            body = self.chance.choice(named)
            self.record.sent[body].doubtful = True
            command = Administer(1, self.driven.request(), "cancel", {"id": self.record.sent[body].name})
            self.record.cancels[command.request] = body
            self.hear(self.driven.do(command))

    def sync(self) -> None:
        wanted, self.driven.wanted = self.driven.wanted, []
        for want in wanted:
            try:
                self.driven.store.partition(want.partition).sync()
            except SyncFailed as error:
                outcome: Synced | SyncBroken = SyncBroken(want.partition, error)
            else:
                outcome = Synced(want.partition, want.position)
            self.driven.broker.handle(outcome, self.driven.now)
        self.driven.broker.turn(self.driven.now)
        self.hear(self.driven.effects())

    def checkpoint(self) -> None:
        store, now = self.driven.store, self.driven.now
        checkpoint = store.begin_checkpoint(self.driven.broker.checkpoint_state(now))
        self.hear(self.driven.effects())
        try:
            checkpoint.write()
        except StorageError as error:
            store.fail_checkpoint(checkpoint, error)
            raise
        store.finish_checkpoint(checkpoint)

    def drain(self) -> None:
        """Let all fall due."""
        for _ in range(40):
            self.hear(self.driven.advance(LONG_MS))
            while self.driven.wanted:
                self.sync()

    def found(self) -> list[tuple[bytes, str, int]]:
        """Body, id and time of all that was delivered."""
        subscription = self.driven.subscribe("", group=None, start="first")
        found = list[tuple[bytes, str, int]]()
        while True:
            said = self.driven.do(self.driven.pull_command(subscription))
            runs = [run for one in said if isinstance(one, PulledMessages) for run in runs_of_answer(one)]
            if not runs:
                return found
            found += [(run.body(i), str(run.id(i)), run.stored_at_us) for run in runs for i in range(run.count)]


def crash(
    disk: SimulatedDisk, life: Life, operation: Operation, seed: int, *, again: bool, lossy: bool = False
) -> None:
    """Crash a copy within *operation*, start it again, and hold what it delivers against the record. *lossy*: the power
    was lost already in the crash that is recovered from.
    """
    chance = random.Random(seed)
    image, record = disk.clone(chance.getrandbits(32)), copy.deepcopy(life.record)
    image.interrupt(operation)
    power = chance.random() < 0.6
    image.struck["power lost" if power else "killed"] += 1
    lossy |= stop(image, power=power)
    if record.sent:
        check_files(image)
    if again:

        def before(operation: Operation) -> None:
            if chance.random() < 0.02:
                inner = Life.__new__(Life)
                inner.record = record
                image.struck["crashed in recovery"] += 1
                crash(image, inner, operation, chance.getrandbits(32), again=False, lossy=lossy)

        image.before = before
    started = Life(image, record, life_seed(disk), START_US)
    image.before = None
    started.driven.now = started.driven.now._replace(wall_us=START_US + 3_600_000_000)
    started.drain()
    check(started, lossy)
    started.checkpoint()
    started.driven.store.close(clean=True)
    stop(image, power=False)
    check_files(image)


def life_seed(disk: SimulatedDisk) -> int:
    """A seed with the number of partitions that the disk's store has."""
    return 1 if disk.exists(DIRECTORY / "log-1") else 0


def check(life: Life, power: bool) -> None:
    """What was delivered in the end."""
    found = life.found()
    counts = Counter(body for body, _, _ in found)
    for body, name, stored_at_us in found:
        known = life.record.sent[body]
        assert counts[body] == 1, f"{body!r} came {counts[body]} times"
        assert stored_at_us >= known.due_us, f"{body!r} came early"
        assert known.name in ("", name), f"{body!r} came under another id"
        assert not known.cancelled, f"{body!r} came though it was cancelled"
    for body, known in life.record.sent.items():
        if known.stored and not known.doubtful and (known.flush or not power):
            assert body in counts, f"{body!r} was acknowledged and is gone"


@pytest.mark.parametrize("seed", range(part_of(6)))
def test_a_crash_at_any_operation(seed: int) -> None:
    disk = SimulatedDisk(seed)
    chance = random.Random(seed)
    life = Life(disk, Record(), seed)

    def before(operation: Operation) -> None:
        if chance.random() < 0.05:
            crash(disk, life, operation, chance.getrandbits(32), again=chance.random() < 0.2)

    disk.before = before
    for _ in range(80):
        life.step()
    disk.before = None
    life.drain()
    check(life, power=False)
    print(dict(disk.struck), len(life.record.sent), "sent")
    assert disk.struck["power lost"]
    assert disk.struck["killed"]


@pytest.mark.parametrize("seed", range(part_of(6)))
def test_a_disk_that_fails(seed: int) -> None:
    disk = SimulatedDisk(seed)
    chance = random.Random(seed)
    life = Life(disk, Record(), seed)
    for _ in range(120):
        if chance.random() < 0.1:
            disk.fail(chance.choice(("pwritev", "create")), chance.randrange(1, 4), errno.ENOSPC)
        life.step()
    disk.heal()
    life.drain()
    check(life, power=False)
    crash(disk, life, Operation("fsync", "", (0,)), seed, again=False)
    print(dict(disk.struck), len(life.record.sent), "sent")
    assert disk.struck["write failed"] + disk.struck["other call failed"]


@pytest.mark.parametrize("seed", range(part_of(6)))
def test_a_sync_that_fails(seed: int) -> None:
    disk = SimulatedDisk(seed)
    life = Life(disk, Record(), seed)
    for _ in range(30):
        life.step()
    disk.fail("fdatasync", 1 + seed % 3)
    for _ in range(40):
        life.step()
    disk.heal()
    crash(disk, life, Operation("fsync", "", (0,)), seed, again=False)
    print(dict(disk.struck), len(life.record.sent), "sent")
    assert disk.struck["sync failed"]
