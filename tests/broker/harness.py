"""A broker over a real store, driven by hand: commands in, effects out, and syncs when the test asks for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from qmq.broker.broker import Broker
from qmq.broker.journal.durable_replies import SYNC_NUMBER
from qmq.broker.ports.commands import (
    Ack,
    Administer,
    Checked,
    Fetched,
    ListSubjects,
    Now,
    Pull,
    ReadDone,
    Send,
    Subscribe,
    Synced,
)
from qmq.broker.ports.effects import (
    Acked,
    CheckpointWanted,
    CheckWanted,
    Effect,
    FetchWanted,
    PulledMessages,
    ReadWanted,
    Refused,
    Sent,
    Subscribed,
    SyncWanted,
)
from qmq.broker.ports.limits import BrokerLimits
from qmq.daemon.verify import verify
from qmq.errors import QmqError, StorageError
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.layout import LANE_NORMAL
from qmq.format.pieces import Run, read_answer
from qmq.storage.disk.disk import Disk
from qmq.storage.store import Store, StoreOptions
from tests.sim.disk import SimulatedDisk

PRODUCER = b"p" * 16
START_US = 1_700_000_000_000_000
_WORK = SyncWanted | ReadWanted | CheckWanted | FetchWanted | CheckpointWanted


def batch_of(
    contents: dict[str, Sequence[bytes]], sequence: int, producer_id: bytes = PRODUCER, key: str | None = None,
    lane: int = LANE_NORMAL,
) -> memoryview:  # fmt: skip
    """Return a writable batch, as a server hands it in."""
    headers = make_header(key) if key is not None else None
    runs = [
        RunContent(subject, bodies, None if headers is None else [headers] * len(bodies), lane)
        for subject, bodies in contents.items()
    ]
    parts = build_batch(runs, created_at_us=START_US, producer_id=producer_id, producer_sequence=sequence)
    return memoryview(bytearray(b"".join(parts)))


#: The stores on real files that tests have opened, for ``closing_left_open``.
_OPENED: list[Store] = []


@contextmanager
def closing_left_open() -> Iterator[None]:
    """At the end, close the stores that were opened within and are open still: their descriptors would pile up."""
    before = list(_OPENED)
    yield
    for store in [store for store in _OPENED if store not in before]:
        with suppress(StorageError):
            store.close(clean=False)
    _OPENED[:] = before


class Driven:
    """One broker in a directory. Every call returns the effects that it caused."""

    def __init__(
        self,
        directory: Path,
        limits: BrokerLimits | None = None,
        auto_sync: bool = True,
        disk: Disk | None = None,
        **options: int,
    ) -> None:
        self.directory = directory
        self.disk = disk if disk is not None else Disk()
        self.limits = limits if limits is not None else BrokerLimits()
        self.options = options
        self.auto_sync = auto_sync
        self.now = Now(1_000_000, START_US)
        self.requests = 0
        self.producer = PRODUCER
        self.produced = 0
        self.wanted: list[SyncWanted] = []
        self.auto_read = True
        self.reads: list[ReadWanted] = []
        self.read_outcomes: list[ReadDone] = []
        self.fetches: list[FetchWanted] = []
        self.open()

    def open(self) -> None:
        """Open the store and a broker on it."""
        self.store = Store.open(self.directory, StoreOptions(**self.options), self.disk, self.now.wall_us)
        if not isinstance(self.disk, SimulatedDisk):
            _OPENED[:] = [*(store for store in _OPENED if not store.is_closed), self.store]
        self.broker = Broker(self.store, self.limits, self.now)

    def restart(self) -> None:
        """Stop cleanly and start again."""
        self.checkpoint()
        self.store.close(clean=True)
        self.wanted.clear()
        self.reads.clear()
        self.open()

    def close(self) -> None:
        """Stop cleanly; verify must then find no fault in the directory."""
        self.restart()
        self.store.close(clean=True)
        report = verify(self.directory, Disk(), None)
        assert not report.faults, report.faults

    def checkpoint(self, *, adds_up: bool = True) -> None:
        """Take a checkpoint. With *adds_up* the messages of all groups must add up."""
        checkpoint = self.store.begin_checkpoint(self.broker.checkpoint_state(self.now))
        assert not adds_up or not self.broker.unaccounted()
        try:
            checkpoint.write()
        except StorageError as error:
            self.store.fail_checkpoint(checkpoint, error)
            raise
        self.store.finish_checkpoint(checkpoint)

    def advance(self, milliseconds: int) -> list[Effect]:
        """Let time pass and tick."""
        self.now = Now(self.now.monotonic_us + milliseconds * 1_000, self.now.wall_us + milliseconds * 1_000)
        self.broker.tick(self.now)
        return self.effects()

    def do(self, *commands: object) -> list[Effect]:
        """Run one loop turn with these commands, and return the effects."""
        for command in commands:
            self.broker.handle(command, self.now)  # type: ignore[arg-type]
        self.broker.turn(self.now)
        return self.effects()

    def do_whole(self, command: Administer | ListSubjects) -> list[Effect]:
        """Give a command whose work may take several turns; return the effects until the broker has nothing more to do
        at once.
        """
        said = self.do(command)
        while not any(getattr(effect, "request", None) == command.request for effect in said):
            deadline_us = self.broker.tick(self.now)
            said += self.effects()
            if deadline_us is None or deadline_us > self.now.monotonic_us:
                break
        return said

    def effects(self) -> list[Effect]:
        """Take the effects, and run the wanted syncs and reads where these run by themselves."""
        said: list[Effect] = []
        while effects := self.broker.take_effects():
            said += [effect for effect in effects if not isinstance(effect, _WORK)]
            self.fetches += [effect for effect in effects if isinstance(effect, FetchWanted)]
            self.wanted += [effect for effect in effects if isinstance(effect, SyncWanted)]
            self.reads += [effect for effect in effects if isinstance(effect, ReadWanted)]
            if self.auto_sync:
                self.sync(turn=False)
            if self.auto_read:
                self.read(turn=False)
                self.fetch()
            for effect in effects:
                if isinstance(effect, CheckWanted):
                    self.broker.handle(self.check(effect), self.now)
        return said

    def fetch(self) -> None:
        """Run the wanted reads of the log."""
        fetches, self.fetches = self.fetches, []
        for number, fetch in fetches:
            error = None
            try:
                fetch.run()
            except QmqError as failed:
                error = failed
            self.broker.handle(Fetched(number, error), self.now)

    def check(self, wanted: CheckWanted) -> Checked:
        """Check a batch as it lies on disk."""
        reader = self.store.partition(wanted.partition).reader(wanted.position)
        try:
            batch, damage = reader.read_batch(wanted.position, wanted.size, wanted.first, wanted.messages)
            return Checked(wanted.number, batch, damage, None)
        except StorageError as error:
            return Checked(wanted.number, memoryview(b""), None, error)
        finally:
            reader.close()

    def read(self, turn: bool = True) -> list[Effect]:
        """Run the wanted reads, and hand in their outcomes."""
        self.run_reads()
        self.finish_reads()
        return self.effects() if turn else []

    def run_reads(self) -> None:
        """Run the wanted reads, as their threads do."""
        for number, read in self.reads:
            error = None
            try:
                while read.step():
                    pass
            except QmqError as failed:
                error = failed
            self.read_outcomes.append(ReadDone(number, error))
        self.reads.clear()

    def sync_records(self) -> list[Effect]:
        """Run the wanted syncs of the pull log, and leave the other reads."""
        others = [wanted for wanted in self.reads if wanted.number != SYNC_NUMBER]
        self.reads = [wanted for wanted in self.reads if wanted.number == SYNC_NUMBER]
        self.run_reads()
        self.reads = others
        self.finish_reads()
        return self.effects()

    def finish_reads(self) -> None:
        """Hand in the outcomes of reads that have run."""
        outcomes, self.read_outcomes = self.read_outcomes, []
        for outcome in outcomes:
            self.broker.handle(outcome, self.now)
        if outcomes:
            self.broker.turn(self.now)

    def sync(self, turn: bool = True) -> list[Effect]:
        """Run the wanted syncs."""
        wanted, self.wanted = self.wanted, []
        for want in wanted:
            self.store.partition(want.partition).sync()
            self.broker.handle(Synced(want.partition, want.position), self.now)
        self.broker.turn(self.now)
        return self.effects() if turn else []

    def request(self) -> int:
        """Return a new request number."""
        self.requests += 1
        return self.requests

    def send_command(
        self, contents: dict[str, Sequence[bytes]], flush: bool = True, connection: int = 1, lane: int = LANE_NORMAL
    ) -> Send:
        """Return a Send with the next batch of the test's producer, whose messages are all in one lane."""
        batch = batch_of(contents, self.produced, self.producer, lane=lane)
        self.produced += sum(map(len, contents.values()))
        return Send(connection, self.request(), batch, flush)

    def send_runs(self, *runs: RunContent, flush: bool = True) -> Sent:
        """Send one batch of runs that have headers or lanes; it must be acknowledged at once."""
        parts = build_batch(runs, created_at_us=START_US, producer_id=self.producer, producer_sequence=self.produced)
        self.produced += sum(len(run.bodies) for run in runs)
        said = self.do(Send(1, self.request(), memoryview(bytearray(b"".join(parts))), flush))
        (sent,) = (effect for effect in said if isinstance(effect, Sent | Refused))
        assert isinstance(sent, Sent), sent
        return sent

    def change_producer(self) -> None:
        """Send the batches that follow as another producer."""
        self.producer, self.produced = os.urandom(16), 0

    def send(self, subject: str, *bodies: bytes, flush: bool = True) -> Sent:
        """Send one batch, which must be acknowledged at once."""
        said = self.do(self.send_command({subject: bodies}, flush))
        sent = [effect for effect in said if isinstance(effect, Sent | Refused)]
        assert len(sent) == 1
        assert isinstance(sent[0], Sent), sent[0]
        return sent[0]

    def subscribe(
        self,
        *prefixes: str,
        group: str | None = "g",
        start: str | tuple[str, int] | None = None,
        connection: int = 1,
    ) -> int:
        """Subscribe, and return the subscription's number."""
        said = self.do(Subscribe(connection, self.request(), group, prefixes, "c", start))
        (answer,) = said or self.sync_records()
        assert isinstance(answer, Subscribed), answer
        return answer.subscription

    def pull_command(
        self,
        subscription: int,
        max_count: int = 1_000_000,
        min_count: int = 1,
        max_bytes: int = 4 << 20,
        timeout_ms: int = 0,
        connection: int = 1,
        expected: int | None = None,
        checks: bool = False,
    ) -> Pull:
        """Return a Pull."""
        limits = max_count, min_count, max_bytes, timeout_ms
        return Pull(connection, self.request(), subscription, *limits, expected, checks)

    def pull(self, subscription: int, left_out: int = 0, **limits: int) -> list[Run]:
        """Pull without waiting, ack what came, and return its verified runs. *left_out* messages could not be read."""
        command = self.pull_command(subscription, **limits)
        answers = [effect for effect in self.do(command) if isinstance(effect, PulledMessages)]
        (answer,) = [answer for answer in answers if answer.request == command.request]
        self.acknowledge(subscription, answer, command.connection)
        return runs_of_answer(answer, left_out)

    def acknowledge(self, subscription: int, answer: PulledMessages, connection: int = 1) -> list[Effect]:
        """Ack everything that a pull brought, and return the other effects."""
        if not answer.ranges:
            return []
        pairs = tuple(one for first, count, _ in answer.ranges for one in (first, first + count))
        request = self.request()
        said = self.do(Ack(connection, request, subscription, pairs))
        assert Acked(connection, request, 0) in said, said
        return [effect for effect in said if not isinstance(effect, Acked)]


def runs_of_answer(answer: Effect, left_out: int = 0) -> list[Run]:
    """Return the runs of a PulledMessages effect, whose bytes and counts must be right but for *left_out* messages."""
    assert isinstance(answer, PulledMessages), answer
    payload = b"".join(answer.buffers)
    assert len(payload) == answer.size
    runs, damaged = read_answer(memoryview(payload))
    assert not damaged
    assert sum(run.count for run in runs) == answer.messages - left_out
    return runs


def bodies_of(runs: list[Run]) -> list[bytes]:
    """Return all bodies in order."""
    return [body for run in runs for body in run.bodies()]
