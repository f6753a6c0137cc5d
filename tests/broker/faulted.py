"""A broker on a failing disk, and clients that remember their answers: every step goes on, whatever fails."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from qmq.broker.broker import Broker
from qmq.broker.ports.commands import Ack, Disconnected, Send, Subscribe, SyncBroken, Synced
from qmq.broker.ports.effects import Effect, PulledMessages, Refused, Sent, Subscribed
from qmq.errors import QmqError, StorageError, StorageFailed, SyncFailed
from qmq.storage.disk.disk import Disk
from qmq.storage.recovery.decide import RecoverySource
from qmq.storage.store import Store, StoreOptions
from qmq.storage.verify.verify import verify
from tests.broker.harness import Driven, batch_of, bodies_of, runs_of_answer
from tests.fake_disk import FakeDisk

#: Small sizes, so that a short workload rolls segments and renews reserves.
OPTIONS = {"segment_bytes": 16 << 10, "max_frame_bytes": 6 << 10, "reserve_bytes": 48 << 10, "partitions": 2}
PRODUCER = b"producer of test"
GROUPS = {"all": "", "one": "a"}


class FaultedBroker(Driven):
    """A broker whose failed syncs and checkpoints are noted and handed in, as the daemon does it."""

    def __init__(self, directory: Path, disk: FakeDisk) -> None:
        self.errors: list[QmqError] = []
        super().__init__(directory, disk=disk, **OPTIONS)

    def open(self) -> None:
        self.store = Store.open(self.directory, StoreOptions(**self.options), self.disk, self.now.wall_us)
        try:
            self.broker = Broker(self.store, self.limits, self.now)
        except StorageError:
            self.store.close(clean=False)
            raise

    def try_checkpoint(self) -> bool:
        """Take a checkpoint, and return whether that worked."""
        taken = True
        try:
            self.checkpoint()
        except StorageError as error:
            self.errors.append(error)
            taken = False
        for partition, part in enumerate(self.store.partitions):
            broken = part.broken()
            if broken is not None:
                self.broker.handle(SyncBroken(partition, broken), self.now)
        return taken

    def sync(self, turn: bool = True) -> list[Effect]:
        wanted, self.wanted = self.wanted, []
        for want in wanted:
            try:
                self.store.partition(want.partition).sync()
            except SyncFailed as error:
                self.errors.append(error)
                self.broker.handle(SyncBroken(want.partition, error), self.now)
            except StorageFailed as error:
                self.errors.append(error)
                self.wanted.append(want)  # the sync could not begin
            else:
                self.broker.handle(Synced(want.partition, want.position), self.now)
        self.broker.turn(self.now)
        return self.effects() if turn else []

    def is_broken(self) -> bool:
        """Whether a sync has failed: the broker takes everything again only after a restart."""
        return any(part.broken() for part in self.store.partitions)


@dataclass
class Batch:
    """One batch of the clients. ``state`` is open until it is acknowledged, or its outcome cannot be known.

    It is "unknown" after a failed sync, "left" after a failed write: then it may turn up behind later messages.
    """

    data: bytes
    flush: bool
    contents: dict[str, list[bytes]]
    state: str = "open"
    sent: Sent | None = None


class _CouldNotStart(Exception):
    """The disk refused an operation; the reason is among the errors."""


class World:
    """One data directory, its broker while one runs, and the answers that its clients got."""

    def __init__(self, directory: Path, disk: FakeDisk) -> None:
        self.directory = directory
        self.disk = disk
        self.driven: FaultedBroker
        self.batches: list[Batch] = []
        #: By group, over all lives: bodies in the order in which they came, and the next delivery sequence.
        self.got: dict[str, list[bytes]] = defaultdict(list)
        self.expected: dict[str, int] = {}
        #: Refusals and exceptions, in order.
        self.errors: list[QmqError] = []
        #: Whether a checkpoint could not be read, so that an older one counted.
        self.fell_back = False
        self._subscriptions: dict[str, int] = {}
        self._subscribing: dict[int, str] = {}  # group, by request that waits for the disk
        self._pulls: dict[int, str] = {}  # group, by request
        self._sends: dict[int, Batch] = {}  # by request; every repeat of a batch is answered
        self._sequence = 0
        self._number = 0

    # --- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start a broker. A failed start leaves nothing open, and works once nothing fails any more."""
        with suppress(_CouldNotStart):
            self._start()
            return
        assert self.disk.still_open() == [], self.errors[-1]
        self.disk.heal()
        self._start()

    def _start(self) -> None:
        try:
            self.driven = FaultedBroker(self.directory, self.disk)
        except StorageError as error:
            self.errors.append(error)
            raise _CouldNotStart from error
        self.driven.errors = self.errors
        self.fell_back |= self.driven.store.recovery.source is not RecoverySource.CHECKPOINT
        self._subscriptions.clear()
        self._subscribing.clear()
        self._pulls.clear()
        self._sends.clear()

    def copied(self, directory: Path) -> World:
        """Return the same clients with a copy of the directory, while no broker runs."""
        shutil.copytree(self.directory, directory)
        other = World(directory, FakeDisk("boot-1"))
        other.batches = [replace(batch) for batch in self.batches]
        other.got = defaultdict(list, {group: list(bodies) for group, bodies in self.got.items()})
        other.expected = dict(self.expected)
        other._sequence, other._number = self._sequence, self._number
        return other

    def close(self) -> bool:
        """Stop the broker, and return whether the stop was clean."""
        driven = self.driven
        clean = driven.try_checkpoint() and not driven.is_broken() and driven.store.groups.is_claimed
        try:
            driven.store.close(clean)
        except StorageError as error:
            self.errors.append(error)
            clean = False
        assert self.disk.still_open() == []
        return clean

    def verified(self) -> None:
        """Check that verify finds no fault in the stopped directory."""
        report = verify(self.directory, Disk())
        assert report.is_good, "\n".join(map(str, report.findings))

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, *subjects: str, flush: bool, size: int = 900) -> None:
        """Add a batch, with a message of *size* bytes for each subject, to those that ``offer`` sends."""
        contents = {}
        for subject in subjects:
            contents[subject] = [b"%06d" % self._number + os.urandom(size // 2).hex().encode()]
            self._number += 1
        data = bytes(batch_of(contents, self._sequence, PRODUCER))
        self._sequence += len(subjects)
        self.batches.append(Batch(data, flush, contents))

    def offer(self) -> None:
        """Send all open batches in one turn, refused ones again as a client does."""
        commands = []
        for batch in self.waiting():
            request = self.driven.request()
            self._sends[request] = batch
            commands.append(Send(1, request, memoryview(bytearray(batch.data)), batch.flush))
        self._take(self.driven.do(*commands))
        self.turn()

    def repeat(self, batch: Batch) -> Effect:
        """Send a batch once more, and return the answer."""
        command = Send(1, self.driven.request(), memoryview(bytearray(batch.data)), True)
        said = [*self.driven.do(command), *self.driven.sync()]
        return next(effect for effect in said if getattr(effect, "request", 0) == command.request)

    def turn(self) -> None:
        """Run a turn without new commands, in which syncs that could not begin are tried again."""
        self._take(self.driven.sync())

    def waiting(self) -> list[Batch]:
        """Return the batches without a final answer."""
        return [batch for batch in self.batches if batch.state == "open"]

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Sent):
                batch = self._sends.pop(effect.request)
                if batch.sent is not None:
                    assert str(batch.sent._replace(request=0)) == str(effect._replace(request=0))
                batch.state, batch.sent = "acknowledged", effect
            elif isinstance(effect, Refused) and effect.request in self._sends:
                batch = self._sends.pop(effect.request)
                self.errors.append(effect.error)
                assert batch.state != "acknowledged"
                if not effect.error.retryable:
                    assert isinstance(effect.error, SyncFailed), effect.error
                    left = "cannot be removed" in str(effect.error)
                    batch.state = "left" if left else "unknown"
            elif isinstance(effect, Subscribed | Refused) and effect.request in self._subscribing:
                self._subscribed_to(effect)
            elif isinstance(effect, PulledMessages | Refused) and effect.request in self._pulls:
                self._answered(effect)

    # --- pulling -----------------------------------------------------------------------------------------------------

    def pull(self, group: str, max_count: int = 1_000, timeout_ms: int = 0) -> Effect | None:
        """Pull once, and return the answer; None when the pull waits: its answer is taken whenever it comes."""
        subscription = self._subscribed(group)
        if subscription is None:
            return None
        command = self.driven.pull_command(subscription, max_count=max_count, timeout_ms=timeout_ms, connection=2)
        self._pulls[command.request] = group
        said = self.driven.do(command._replace(expected=self.expected[group]))
        self._take(said)
        return next((effect for effect in said if getattr(effect, "request", 0) == command.request), None)

    def _subscribed(self, group: str) -> int | None:
        if group not in self._subscriptions:
            command = Subscribe(2, self.driven.request(), group, (GROUPS.get(group, ""),), "c", None)
            if group not in self._subscribing.values():
                self._subscribing[command.request] = group
                self._take(self.driven.do(command))
        return self._subscriptions.get(group)

    def _subscribed_to(self, answer: Subscribed | Refused) -> None:
        group = self._subscribing.pop(answer.request)
        if isinstance(answer, Refused):
            self.errors.append(answer.error)
            return
        consumer_state = answer.consumer_state
        assert consumer_state is not None
        self._subscriptions[group] = answer.subscription
        self.expected[group] = min(self.expected.get(group, consumer_state.ack_floor), consumer_state.next_sequence)

    def _answered(self, effect: PulledMessages | Refused) -> None:
        group = self._pulls.pop(effect.request)
        if isinstance(effect, Refused):
            self.errors.append(effect.error)
        else:
            bodies = iter(bodies_of(runs_of_answer(effect)))
            for first, count, _ in effect.ranges:
                expected = self.expected[group]  # another pull may have brought the same messages
                self.got[group] += [
                    body for at, body in zip(range(count), bodies, strict=False) if first + at >= expected
                ]
                self.expected[group] = max(expected, first + count)
            self._acknowledge(self._subscriptions[group], effect)

    def _acknowledge(self, subscription: int, answer: PulledMessages) -> None:
        pairs = tuple(one for first, count, _ in answer.ranges for one in (first, first + count))
        if pairs:
            self._take(self.driven.do(Ack(2, self.driven.request(), subscription, pairs)))

    def drain(self, group: str) -> list[bytes]:
        """Pull all that a group can get now, and return all that it has got so far."""
        while isinstance(answer := self.pull(group), PulledMessages) and answer.messages:
            pass
        assert isinstance(answer, PulledMessages), answer
        return self.got[group]

    def leave(self) -> None:
        """Disconnect the consumers, which ends their waiting pulls."""
        self.driven.do(Disconnected(2))
        self._pulls.clear()
        self._subscribing.clear()
        self._subscriptions.clear()
