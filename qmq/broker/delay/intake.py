"""Take delayed messages into the delay log, and schedule them once they are visible."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.publish.publish import SubjectNumbering
from qmq.broker.publish.staging import Numbers, StagedBatch, StagedPartition
from qmq.errors import InvalidOption, QmqError
from qmq.format.batch import CheckedBatch, clock_us_of, numbers_by_run
from qmq.format.copies.due import due_times
from qmq.format.layout import DELAY_PARTITION, DELIVER_UNIT_US, MAX_DELAY_SHOWN, MAX_DELAY_US
from qmq.storage.store import Store

_DAY_US: Final = 86_400_000_000

Times = npt.NDArray[np.uint64]


class Arrived(NamedTuple):
    """A batch of the delay log that is visible up to ``end``: when its messages fall due, by ordinal, and how many
    messages each subject has.
    """

    position: int
    end: int
    due: Times
    subjects: list[tuple[str, int]]


class DelayIntake:
    """The delay log as the send path sees it. *arrived* is called with each batch once it is visible."""

    def __init__(self, store: Store, numbering: SubjectNumbering, arrived: Callable[[Arrived], None]) -> None:
        """*numbering* is that of the store itself, in which messages are delivered when they are due."""
        self._store = store
        self._numbering = numbering
        self._arrived = arrived
        self._partition: StagedPartition | None = None
        self._hidden: deque[Arrived] = deque()
        if store.delay_log is not None:
            self._partition = StagedPartition(DELAY_PARTITION, store.delay_log, 0)

    # --- as a partition -----------------------------------------------------------------------------------------------

    def partition(self) -> StagedPartition:
        """Return the partition of the delay log; a delayed message must have been sent before."""
        assert self._partition is not None
        return self._partition

    def partitions(self) -> list[StagedPartition]:
        """Return the partition of the delay log; empty before the first delayed message."""
        return [] if self._partition is None else [self._partition]

    def has(self, partition: StagedPartition) -> bool:
        """Return whether *partition* is the one of the delay log."""
        return partition is self._partition

    def has_staged(self) -> bool:
        """Return whether batches wait to be written."""
        return self._partition is not None and bool(self._partition.staged)

    def numbers_of(self, batch: CheckedBatch) -> int | Numbers:
        """Return the number of each run's subject in the delay log."""
        log = self.partition().store

        def number_of(name: str, lane: int) -> int:
            number = log.subjects.number(name, lane)
            return log.add_subject(name, lane, forced=True) if number is None else number

        if batch.runs is None:
            assert batch.run is not None
            return number_of(batch.names[0], batch.run[1])
        return numbers_by_run(batch.names, batch.runs, number_of)

    # --- what comes ---------------------------------------------------------------------------------------------------

    def arriving(self, view: memoryview, batch: CheckedBatch, wall_us: int) -> DelayedArrival:
        """Check a batch of delayed messages, and register its subjects for their delivery.

        Raises InvalidOption for a time too far ahead, InvalidName, TooManySubjects, StorageError.
        """
        latest = int(due_times(view, batch.header, wall_us).max())
        if latest > wall_us + MAX_DELAY_US + DELIVER_UNIT_US:
            raise InvalidOption(
                f"a message is to be delivered in {(latest - wall_us) / _DAY_US:.1f} days; at most {MAX_DELAY_SHOWN} "
                "are allowed"
            )
        self._numbering.of(batch)
        if self._partition is None:
            self._partition = StagedPartition(DELAY_PARTITION, self._store.open_delay_log(wall_us), 0)
        return DelayedArrival(self, view, batch)

    def stored(self, view: memoryview, batch: CheckedBatch, staged: StagedBatch) -> None:
        """Remember a batch that is written; it is scheduled once it is visible."""
        header = batch.header
        due = due_times(view, header, clock_us_of(view, header, staged.stored_at_us))
        self._hidden.append(Arrived(staged.position, staged.end, due, subjects_of(batch)))

    def publish(self, visible: int) -> None:
        """Schedule the messages of the batches that end at or before position *visible*."""
        while self._hidden and self._hidden[0].end <= visible:
            self._arrived(self._hidden.popleft())


class DelayedArrival:
    """One batch on its way into the delay log."""

    def __init__(self, delayed: DelayIntake, view: memoryview, batch: CheckedBatch) -> None:
        self._delayed = delayed
        self._view = view
        self._batch = batch

    def stored(self, partition: int, batch: StagedBatch) -> None:
        """Remember the batch for the schedule."""
        self._delayed.stored(self._view, self._batch, batch)

    def refused(self, error: QmqError) -> None:
        """Do nothing: the sender gets the error."""

    def unknown(self, error: QmqError) -> None:
        """Do nothing: the sender gets the error."""


def subjects_of(batch: CheckedBatch) -> list[tuple[str, int]]:
    """Return the number of messages that a batch has of each subject."""
    if batch.runs is None:
        return [(batch.names[0], batch.header.messages)]
    return [
        (batch.names[subject], count)
        for subject, count in zip(batch.runs["subject"].tolist(), batch.runs["count"].tolist(), strict=True)
    ]
