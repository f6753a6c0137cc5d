"""Answers that wait until the pull log is synced, since what they confirm must survive a loss of power.

These are answers about a new group, its start and its settings, a seek, a deletion, dead letters, handovers and
restores. Checkpoints sync the log only now and then, so these answers have a sync of their own. It runs beside the
loop, as reads do. One runs at a time; answers that come meanwhile share the next one.
"""

from __future__ import annotations

from typing import Final

from qmq.broker.ports.effects import (
    Administered,
    Asker,
    Effect,
    HandedOver,
    ReadWanted,
    Refused,
    Restored,
    Subscribed,
    first_number,
)
from qmq.errors import QmqError, StorageError
from qmq.storage.store import PullSync, Store

#: The number of the read that is a sync of the pull log.
SYNC_NUMBER: Final = first_number(Asker.PULL_LOG)
#: A write that failed is tried again after this time.
_AGAIN_US: Final = 100_000

Answer = Administered | HandedOver | Restored | Subscribed


class RecordSync:
    """Syncs the pull log; runs as a read."""

    partition = 0

    def __init__(self, sync: PullSync, answers: list[Answer]) -> None:
        self.sync = sync
        self.answers = answers

    def step(self) -> bool:
        """[thread] Sync. Raise StorageFailed or SyncFailed."""
        self.sync.run()
        return False


class DurableReplies:
    """Keeps the answers of all groups until the log is synced, then adds them to *effects*."""

    def __init__(self, store: Store, effects: list[Effect]) -> None:
        self._store = store
        self._effects = effects
        self._waiting: list[Answer] = []
        self._syncing: RecordSync | None = None
        self._number = 1  # of the next sync
        self._done = 0  # the last sync that succeeded

    def ticket(self) -> int:
        """Return a ticket for the records that are staged by the end of this turn; see ``has``."""
        return self._number

    def has(self, ticket: int) -> bool:
        """Return whether the records of that ticket are on disk."""
        return self._done >= ticket

    def answer(self, effect: Answer) -> None:
        """Send the answer when all records staged by now are on disk; refuse it if that fails."""
        self._waiting.append(effect)

    def turn(self) -> None:
        """Begin a sync if answers wait for one and none is running."""
        if not self._waiting or self._syncing is not None:
            return
        files = self._store.groups
        try:
            files.write()
        except StorageError as error:
            if files.broken:
                answers, self._waiting = self._waiting, []
                self._answer(answers, error)
            return  # a full disk: the next turn tries again
        self._syncing, self._waiting = RecordSync(files.begin_sync(), self._waiting), []
        self._number += 1
        self._effects.append(ReadWanted(SYNC_NUMBER, self._syncing))

    def synced(self, error: QmqError | None) -> None:
        """End the running sync, which succeeded or failed."""
        syncing, self._syncing = self._syncing, None
        assert syncing is not None
        self._store.groups.end_sync(syncing.sync, error)
        if error is None:
            self._done = self._number - 1
        self._answer(syncing.answers, error)

    def _answer(self, answers: list[Answer], error: QmqError | None) -> None:
        for answer in answers:
            self._effects.append(answer if error is None else Refused(answer.connection, answer.request, error))

    def next_deadline_us(self, now_us: int) -> int | None:
        """Return when to try a failed write again."""
        return now_us + _AGAIN_US if self._waiting and self._syncing is None else None
