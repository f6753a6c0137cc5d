"""What the send path keeps of each partition: what is staged, what hides it, and who waits for its sync."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from qmq.broker.ports.commands import Send
from qmq.broker.ports.effects import Administered, LastSequenceIs, Sent
from qmq.errors import QmqError
from qmq.format.batch import CheckedBatch
from qmq.storage.store import Store

#: Ranges of a partition that wait for different things, before one waits for the next one's as well.
MAX_BARRIERS: Final = 65_536

#: So many answers wait for a sync before those are looked for that nobody waits for any more.
MOST_WAITING: Final = 16_384

Numbers = npt.NDArray[np.int64]
LogPosition = tuple[int, int]  # partition, position

#: What is said once a batch is stored.
Answer = Sent | LastSequenceIs | Administered


class OwnBatch(Protocol):
    """A batch that the broker makes itself: told what became of it."""

    def stored(self, partition: int, batch: StagedBatch) -> None:
        """It is written."""

    def refused(self, error: QmqError) -> None:
        """It is not, and comes back with no start."""

    def unknown(self, error: QmqError) -> None:
        """The next start may find it."""


class StagedBatch(NamedTuple):
    """A batch of this turn, stamped and staged but not written. ``answer`` is for whoever asked, if anyone did."""

    command: Send | None
    answer: Answer | None
    own: OwnBatch | None
    flush: bool
    position: int
    end: int
    stored_at_us: int
    first_sequences: int | npt.NDArray[np.uint64]
    numbers: int | Numbers
    messages: int | npt.NDArray[Any]
    producer_id: bytes
    producer_sequence: int
    after: tuple[LogPosition, ...]  # as in Barrier
    last_positions: dict[int, LogPosition | None]  # where its subjects were before; several partitions only


class Barrier(NamedTuple):
    """Nothing of the partition from ``start`` on is visible before it is synced up to ``end`` and ``after`` holds."""

    start: int
    end: int
    flush: bool
    after: tuple[LogPosition, ...]  # positions that must be visible, in other partitions


class StagedPartition:
    """One partition of the message log, or of the delay log: *local* is its number in the store that holds it."""

    def __init__(self, number: int, store: Store, local: int) -> None:
        self.number = number
        self.store = store
        self.local = local
        self.visible = self.synced = store.end(local)
        self.staged: list[StagedBatch] = []
        self.barriers: deque[Barrier] = deque()
        self.waiting: deque[tuple[int, Answer]] = deque()  # (position to sync, what is said then)
        self.most_waiting = MOST_WAITING
        self.sync_running = False
        self.wanted = 0  # on disk up to here, by others than those who wait
        self.broken: QmqError | None = None

    def hide(self, barrier: Barrier) -> None:
        """Add one; where they are many, because a disk has stalled, it makes one with the last."""
        if len(self.barriers) >= MAX_BARRIERS:
            last = self.barriers.pop()
            after = dict(last.after)
            for number, position in barrier.after:
                after[number] = max(position, after.get(number, 0))
            barrier = Barrier(last.start, barrier.end, last.flush or barrier.flush, tuple(after.items()))
        self.barriers.append(barrier)

    def end(self) -> int:
        """The position after the last batch that was written."""
        return self.store.end(self.local)

    def forget_gone(self, gone: set[int]) -> None:
        """Nobody waits for answers at these connections any more."""
        self.waiting = deque(entry for entry in self.waiting if entry[1].connection not in gone)
        self.most_waiting = max(MOST_WAITING, 2 * len(self.waiting))


class DelayLog(Protocol):
    """The delay log as the send path sees it; the part that delays messages registers it as ``Publisher.delay_log``."""

    def partition(self) -> StagedPartition:
        """Return the partition of the delay log; a delayed message must have been sent before."""

    def partitions(self) -> list[StagedPartition]:
        """Return the partition of the delay log; empty before the first delayed message."""

    def has(self, partition: StagedPartition) -> bool:
        """Return whether *partition* is the one of the delay log."""

    def has_staged(self) -> bool:
        """Return whether batches wait to be written."""

    def numbers_of(self, batch: CheckedBatch) -> int | Numbers:
        """Return the number of each run's subject in the delay log."""

    def arriving(self, view: memoryview, batch: CheckedBatch, wall_us: int) -> OwnBatch:
        """Check a batch of delayed messages; the result is told whether it was written."""

    def publish(self, visible: int) -> None:
        """Schedule the messages of the batches that end at or before position *visible*."""


class Visibility:
    """Moves the visible ends of the partitions of the message log."""

    def __init__(self, partitions: list[StagedPartition]) -> None:
        self._partitions = partitions

    def publish(self) -> None:
        """Move each partition's visible end as far as its barriers allow; one that moves may free another."""
        moved = True
        while moved:
            moved = False
            for partition in self._partitions:
                moved |= self.publish_one(partition)
            moved = moved and len(self._partitions) > 1

    def publish_one(self, partition: StagedPartition) -> bool:
        """Move one; False when it stays where it is."""
        barriers = partition.barriers
        while barriers and self._passable(partition, barriers[0]):
            barriers.popleft()
        visible = barriers[0].start if barriers else partition.end()
        if visible <= partition.visible:
            return False
        partition.visible = visible
        partition.store.publish(partition.local, visible)
        return True

    def _passable(self, partition: StagedPartition, barrier: Barrier) -> bool:
        if barrier.flush and barrier.end > partition.synced and partition.broken is None:
            return False
        return all(self._partitions[number].visible >= position for number, position in barrier.after)
