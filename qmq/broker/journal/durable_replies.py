"""Answers that leave once all that the pull log says by then is on disk: to what is never to be forgotten again.

That a group was made, where it begins and what it is set to; that it went elsewhere or was deleted; what became of its
dead letters; what was handed over to it. Checkpoints sync the log only now and then, so such answers have a sync of
their own, run beside the loop as a read is. There is one at a time: what comes meanwhile shares the next one.
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
#: What could not be written is tried again so often.
_AGAIN_US: Final = 100_000

Answer = Administered | HandedOver | Restored | Subscribed


class RecordSync:
    """Brings the pull log to disk; run as a read."""

    partition = 0

    def __init__(self, sync: PullSync, answers: list[Answer]) -> None:
        self.sync = sync
        self.answers = answers

    def step(self) -> bool:
        """[thread] Sync. Raises StorageFailed or SyncFailed."""
        self.sync.run()
        return False


class Durable:
    """Of all groups. The answers go to *effects*."""

    def __init__(self, store: Store, effects: list[Effect]) -> None:
        self._store = store
        self._effects = effects
        self._waiting: list[Answer] = []
        self._syncing: RecordSync | None = None
        self._number = 1  # of the next sync
        self._done = 0  # the last that brought everything to disk

    def ticket(self) -> int:
        """What is staged in this turn, or was before, is on disk when ``has`` says so."""
        return self._number

    def has(self, ticket: int) -> bool:
        """Whether what was staged by then is on disk."""
        return self._done >= ticket

    def answer(self, effect: Answer) -> None:
        """Say it when all that is staged by now is on disk; refuse it where that fails."""
        self._waiting.append(effect)

    def turn(self) -> None:
        """Begin a sync if somebody waits for one, and none is under way."""
        if not self._waiting or self._syncing is not None:
            return
        files = self._store.groups
        try:
            files.write()
        except StorageError as error:
            if files.broken:
                answers, self._waiting = self._waiting, []
                self._answer(answers, error)
            return  # a full disk: it is tried again
        self._syncing, self._waiting = RecordSync(files.begin_sync(), self._waiting), []
        self._number += 1
        self._effects.append(ReadWanted(SYNC_NUMBER, self._syncing))

    def synced(self, error: QmqError | None) -> None:
        """That was done, or has failed."""
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
        """When to try again what could not be written."""
        return now_us + _AGAIN_US if self._waiting and self._syncing is None else None
