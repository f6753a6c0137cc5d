"""The state of each partition in the send path: staged batches, barriers that hide them, answers that wait for
syncs.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from qmq.broker.ports.commands import Send
from qmq.broker.ports.effects import Administered, LastSequenceIs, Sent, SentDuplicates
from qmq.errors import QmqError, StorageError
from qmq.format.batch import CheckedBatch
from qmq.storage.store import NotInMemory, Store

#: The most barriers of a partition; behind them, a new barrier is merged with the last.
MAX_BARRIERS: Final = 65_536

#: When so many answers wait for a sync, those of closed connections are dropped.
MOST_WAITING: Final = 16_384

Numbers = npt.NDArray[np.int64]
LogPosition = tuple[int, int]  # partition, position

#: The answer once a batch is stored.
Answer = Sent | SentDuplicates | LastSequenceIs | Administered


class OwnBatch(Protocol):
    """A batch that the broker makes itself; one of the methods is called with the outcome of its write."""

    def stored(self, partition: int, batch: StagedBatch) -> None:
        """Called when the batch is written."""

    def refused(self, error: QmqError) -> None:
        """Called when the batch is not written, and no start will find it."""

    def unknown(self, error: QmqError) -> None:
        """Called when the next start may find the batch or not."""


class StagedBatch(NamedTuple):
    """A batch of this turn, stamped and staged but not written. ``answer`` goes to its sender, if it has one."""

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
    after: tuple[LogPosition, ...]  # see Barrier
    last_positions: dict[
        int, LogPosition | None
    ]  # the last positions of its subjects before; with several partitions only


class Barrier(NamedTuple):
    """Nothing of the partition from ``start`` on is visible before it is synced up to ``end`` and ``after`` is
    visible.
    """

    start: int
    end: int
    flush: bool
    after: tuple[LogPosition, ...]  # positions in other partitions that must be visible first


class StagedPartition:
    """One partition of the message log or of the delay log; *local* is its number in its store."""

    def __init__(self, number: int, store: Store, local: int) -> None:
        self.number = number
        self.store = store
        self.stored = store.partitions[local]
        self.visible = self.synced = self.stored.message_log.end
        self.staged: list[StagedBatch] = []
        self.barriers: deque[Barrier] = deque()
        self.waiting: deque[tuple[int, Answer]] = deque()  # (position to sync, answer then)
        self.most_waiting = MOST_WAITING
        self.sync_running = False
        self.wanted = 0  # a sync up to here is wanted though no answer waits for it
        self.broken: QmqError | None = None

    def hide(self, barrier: Barrier) -> None:
        """Add a barrier; when a stalled disk has made too many, merge it with the last one."""
        if len(self.barriers) >= MAX_BARRIERS:
            last = self.barriers.pop()
            after = dict(last.after)
            for number, position in barrier.after:
                after[number] = max(position, after.get(number, 0))
            barrier = Barrier(last.start, barrier.end, last.flush or barrier.flush, tuple(after.items()))
        self.barriers.append(barrier)

    def end(self) -> int:
        """Return the position after the last batch that was written."""
        return self.stored.message_log.end

    def forget_gone(self, gone: set[int]) -> None:
        """Drop the waiting answers of these connections."""
        self.waiting = deque(entry for entry in self.waiting if entry[1].connection not in gone)
        self.most_waiting = max(MOST_WAITING, 2 * len(self.waiting))


class DelayLog(Protocol):
    """The delay log as the send path sees it; ``broker/delay`` registers its own as ``Intake.delay_log``."""

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
        """Check a batch of delayed messages; return the object that is called with the outcome of its write."""

    def publish(self, visible: int) -> None:
        """Schedule the messages of the batches that end at or before position *visible*."""


class Visibility:
    """The visible ends of the partitions of the message log."""

    def __init__(self, partitions: list[StagedPartition]) -> None:
        self._partitions = partitions
        #: Whether rows could not be read that are to become visible: the next turn tries again.
        self.is_behind = False

    def publish(self) -> None:
        """Move each partition's visible end as far as its barriers allow; moving one may free another."""
        moved = True
        while moved:
            moved = False
            for partition in self._partitions:
                moved |= self.publish_one(partition)
            moved = moved and len(self._partitions) > 1

    def publish_one(self, partition: StagedPartition) -> bool:
        """Move the visible end of one partition; return False when it does not move."""
        barriers = partition.barriers
        while barriers and self._passable(partition, barriers[0]):
            barriers.popleft()
        stored = partition.stored
        visible = barriers[0].start if barriers else stored.message_log.end
        if visible <= partition.visible:
            return False
        try:
            stored.consumer_log.publish(visible)
        except (NotInMemory, StorageError):  # its rows are in a file by now that cannot be read at the moment
            self.is_behind = True
            return False
        partition.visible = visible
        return True

    def _passable(self, partition: StagedPartition, barrier: Barrier) -> bool:
        if barrier.flush and barrier.end > partition.synced and partition.broken is None:
            return False
        return all(self._partitions[number].visible >= position for number, position in barrier.after)
