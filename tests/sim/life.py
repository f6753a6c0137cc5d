"""One life of a broker on a simulated disk: what its clients do to it, what happens beside it, and how it ends."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from qmq.broker.ports.commands import Ack, Send, Subscribe, SyncBroken, Synced
from qmq.broker.ports.effects import PulledMessages, Refused, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.daemon.verify import verify
from qmq.errors import StorageError, SyncFailed
from qmq.storage.meta.identity import read_copies
from tests.broker.harness import Driven, runs_of_answer
from tests.sim.client import Batch, Client, Found, found_in
from tests.sim.disk import SimulatedDisk

DIRECTORY: Final = Path("/data")
SUBJECTS: Final = ("a.x", "a.y", "a.z", "b", "c.x.y")
PRODUCERS: Final = (b"first producer..", b"second producer.", b"third producer..")
GROUPS: Final = ("g", "h")
SMALL: Final = {"segment_bytes": 2_600, "max_frame_bytes": 2_400, "reserve_bytes": 6_000}
#: Nobody is forgotten, also when the clock jumps.
LIMITS: Final = BrokerLimits(producer_window=1_000, producer_ttl_ms=1_000_000_000)
_HOUR_US: Final = 3_600_000_000


class Life:
    """From opening the store on. ``client`` outlives it."""

    def __init__(self, disk: SimulatedDisk, client: Client, seed: int, partitions: int) -> None:
        """Raises StorageError when the disk fails while the store is opened."""
        self.disk = disk
        self.client = client
        self.chance = random.Random(seed)
        self.partitions = partitions
        self.driven = Driven(DIRECTORY, LIMITS, auto_sync=False, disk=disk, partitions=partitions, **SMALL)
        disk.overwritten.clear()  # a start writes a torn copy again
        client.served = True
        #: A thread of the broker is at work, not its loop.
        self.in_thread = False
        self._is_beside = False
        self._outcomes: list[Synced | SyncBroken] = []
        self._subscriptions: dict[str, int] = {}
        self._expected: dict[str, int] = {}

    # --- what clients do ---------------------------------------------------------------------------------------------

    def send(self, most: int = 4) -> None:
        """A turn with some new batches, and perhaps one that was sent before."""
        chance, client = self.chance, self.client
        batches = [self._new_batch() for _ in range(chance.randrange(1, most + 1))]
        if client.batches and chance.random() < 0.2:
            batches.append(chance.choice(client.batches))
        self.send_batches([(batch, chance.random() < 0.6) for batch in batches])

    def _new_batch(self) -> Batch:
        chance = self.chance
        kind = chance.random()
        subjects = chance.sample(SUBJECTS, 1 if kind < 0.6 else chance.randrange(2, len(SUBJECTS)))
        counts = {subject: 1 if kind < 0.4 else chance.randrange(1, 4) for subject in subjects}
        return self.client.make(chance.choice(PRODUCERS), counts, chance.choice((0, 0, 20, 90)))

    def send_batches(self, batches: list[tuple[Batch, bool]]) -> None:
        """One turn with these batches, each with whether it is to be flushed."""
        commands = []
        for batch, flush in batches:
            command = Send(1, self.driven.request(), batch.data(), flush)
            self.client.sends[command.request] = batch, flush
            batch.refused = False
            commands.append(command)
        self.client.hear(self.driven.do(*commands))

    def pull(self, group: str, most: int = 5) -> int:
        """One pull of a group that takes everything; how many messages came."""
        if group not in self._subscriptions:
            self._subscriptions[group], self._expected[group] = self._subscribe(group)
        subscription = self._subscriptions[group]
        command = self.driven.pull_command(subscription, max_count=most)
        self.client.pulls[command.request] = group
        said = self.driven.do(command._replace(expected=self._expected[group]))
        self.client.hear(said)
        came = 0
        for answer in said:
            if isinstance(answer, PulledMessages):
                self._acknowledge(group, answer)
                came += answer.messages
        return came

    def _subscribe(self, group: str) -> tuple[int, int]:
        """The subscription of the group's only consumer, which has lost all that it held."""
        command = Subscribe(1, self.driven.request(), group, ("",), "c", None)
        (answer,) = [one for one in self.driven.do(command) if getattr(one, "request", 0) == command.request]
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, Subscribed)
        assert answer.consumer_state is not None
        return answer.subscription, answer.consumer_state.ack_floor

    def _acknowledge(self, group: str, answer: PulledMessages) -> None:
        """Some of it, or all."""
        for first, count, _ in answer.ranges:
            self._expected[group] = first + count
            if self.chance.random() < 0.9:
                pair = first, first + count
                self.driven.do(Ack(1, self.driven.request(), self._subscriptions[group], pair))

    # --- what the broker does beside it ------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make the syncs that are wanted by now."""
        while self.driven.wanted:
            self._sync_one()
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            self.driven.broker.handle(outcome, self.driven.now)
        self.driven.broker.turn(self.driven.now)
        self.client.hear(self.driven.effects())

    def _sync_one(self) -> None:
        want = self.driven.wanted.pop(0)
        self.in_thread, before = True, self.in_thread
        try:
            self.driven.store.partition(want.partition).sync()
        except SyncFailed as error:
            self._outcomes.append(SyncBroken(want.partition, error))
        else:
            self._outcomes.append(Synced(want.partition, want.position))
        finally:
            self.in_thread = before

    def beside(self) -> None:
        """Between two operations of the loop, have the sync done that is wanted; between two of a thread, a turn. What
        fails there is no error of the operation that it goes on beside.
        """
        if self._is_beside:
            return
        self._is_beside = True
        try:
            if not self.in_thread:
                if self.driven.wanted:
                    self.disk.struck["sync beside a turn"] += 1
                    self._sync_one()
            elif self.chance.random() < 0.5:
                self.disk.struck["turn beside a sync"] += 1
                self.send(2)
            else:
                self.pull(self.chance.choice(GROUPS))
        except StorageError:
            self.disk.struck["refused beside a sync"] += 1
        finally:
            self._is_beside = False

    def is_changing_identity(self) -> bool:
        """Another thread that wants to do so would wait."""
        return self.driven.store._identity._lock.locked()

    def sync_all(self) -> None:
        """Sync until nothing is waited for."""
        while self.driven.wanted or self._outcomes:
            self.sync()

    def checkpoint(self) -> None:
        """Take one; turns go on while it is written."""
        store = self.driven.store
        stored = [batch for batch in self.client.batches if batch.acknowledged]
        broken = {number for number in range(self.partitions) if self._is_broken(number)}
        checkpoint = store.begin_checkpoint(self.driven.broker.checkpoint_state(self.driven.now))
        self.client.hear(self.driven.effects())
        self.in_thread = True
        try:
            checkpoint.write()
        except BaseException as error:
            store.fail_checkpoint(checkpoint, error)
            raise
        finally:
            self.in_thread = False
        store.finish_checkpoint(checkpoint)
        for batch in stored:
            if batch.log_position is not None and batch.log_position[0] not in broken:
                batch.durable = True

    def _is_broken(self, partition: int) -> bool:
        return self.driven.store.partitions[partition].message_log.broken is not None

    def advance(self) -> None:
        """Let some time pass, or have somebody set the clock."""
        jump_us = self.chance.choice((0, 0, 0, _HOUR_US, -_HOUR_US))
        now = self.driven.now
        self.driven.now = now._replace(wall_us=now.wall_us + jump_us)
        self.client.hear(self.driven.advance(self.chance.randrange(1, 50)))

    def step(self) -> None:
        """One of all that, as chance has it. What the disk refuses is tried again later."""
        kind = self.chance.random()
        try:
            if kind < 0.5:
                self.send()
            elif kind < 0.7:
                self.sync()
            elif kind < 0.82:
                self.pull(self.chance.choice(GROUPS), self.chance.randrange(1, 8))
            elif kind < 0.95:
                self.checkpoint()
            else:
                self.advance()
        except StorageError:
            self.disk.struck["checkpoint failed"] += 1

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Stop cleanly. Whether anything may be lost, as a sync had failed before."""
        self.sync_all()
        self.checkpoint()
        self.driven.store.close(clean=True)
        return stop(self.disk, power=False)

    # --- looking -----------------------------------------------------------------------------------------------------

    def messages(self) -> list[Found]:
        """Everything that is there, by a consumer that follows alone."""
        subscription = self.driven.subscribe("", group=None, start="first")
        found: list[Found] = []
        while runs := self._pull_alone(subscription):
            found += found_in(runs)
        return found

    def _pull_alone(self, subscription: int) -> list:  # type: ignore[type-arg]
        command = self.driven.pull_command(subscription)
        answers = [effect for effect in self.driven.do(command) if isinstance(effect, PulledMessages)]
        return [run for answer in answers for run in runs_of_answer(answer)]


def stop(disk: SimulatedDisk, *, power: bool) -> bool:
    """Stop a disk in any state. Whether anything may be lost.

    Without a loss of power something may be only where the broker could still note that a sync had failed.
    """
    found = [copy.identity for copy in read_copies(disk, DIRECTORY) if copy.identity is not None]
    is_noted = bool(found) and not max(found, key=lambda identity: identity.generation).boot_id
    return disk.stop(power=power, evict=is_noted)


def check_files(disk: SimulatedDisk) -> None:
    """A stopped store has no fault, and nothing that must not happen.

    A full disk has the identity written in place: one copy may be torn then, which looks like rot.
    """
    report = verify(DIRECTORY, disk)
    found = "\n".join(map(str, report.findings))
    faults = [one for one in report.findings if one.severity == "fault"]
    torn = [one for one in faults if str(one.file) in disk.overwritten and "the other copy is enough" in one.advice]
    assert report.faults == len(torn) <= 1, found
    assert "must not happen" not in found, found
