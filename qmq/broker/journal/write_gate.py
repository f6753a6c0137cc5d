"""The write at the end of a turn: records go to the pull log before the answers that confirm them leave.

Acks whose answers may wait are written with the next record that a client waits for, and answered with the next
messages of their connection: mostly one write and one answer instead of two.
"""

from __future__ import annotations

from typing import Final

from qmq.broker.ports.effects import (
    Acked,
    Administered,
    Effect,
    HandedBack,
    HandedOver,
    HeartbeatSeen,
    PulledMessages,
    Refused,
    Sent,
    SentDuplicates,
    Subscribed,
    SyncWanted,
)
from qmq.errors import StorageError, SyncFailed
from qmq.storage.store import Store

#: A write that failed is tried again after this time.
_AGAIN_US: Final = 100_000
#: Acks that may wait are written and answered after this time at the latest.
LATER_US: Final = 20_000
#: Effects that depend on no record.
_NEED_NO_RECORD: Final = frozenset((HeartbeatSeen, Sent, SentDuplicates, SyncWanted))


class WriteGate:
    """Writes the records that groups stage, and holds back the effects that depend on records not written yet."""

    def __init__(self, store: Store, effects: list[Effect]) -> None:
        self._store = store
        self._log = store.groups.pull_log
        self._effects = effects
        self._withheld: list[Effect] = []
        self._later: dict[int, list[Acked]] = {}  # by connection
        self._later_us = 0  # when they are due

    def answer_later(self, answer: Acked, now_us: int) -> None:
        """Take an answer to an ack that may wait."""
        if not self._later:
            self._later_us = now_us + LATER_US
        self._later.setdefault(answer.connection, []).append(answer)

    def is_clear(self, now_us: int) -> bool:
        """Return whether nothing has to be written or answered before what is next."""
        return not self._withheld and (not self._later or now_us < self._later_us) and self._log.broken is None

    def take_later(self, handed: list[PulledMessages]) -> list[Acked]:
        """Take out the answers that go with messages to their connections."""
        later = self._later
        if len(handed) == 1:
            return later.pop(handed[0].connection, []) if later else []
        return [answer for one in handed for answer in later.pop(one.connection, ())]

    def hurry(self) -> None:
        """Send the answers that may wait with the next write."""
        self._later_us = 0

    def disconnected(self, connection: int) -> None:
        """Drop the answers to a connection that is closed."""
        self._later.pop(connection, None)

    def turn(self, now_us: int) -> None:
        """End the turn: write, unless only acks that may wait are staged."""
        if self._later:
            self._release(now_us)
            if self._later and not self._withheld and all(type(effect) in _NEED_NO_RECORD for effect in self._effects):
                return
        self._write()

    def _release(self, now_us: int) -> None:
        """Take out the answers that are due, and those whose connection gets messages now."""
        if now_us >= self._later_us or self._store.groups.broken:
            released = [answer for answers in self._later.values() for answer in answers]
            self._later.clear()
        else:
            released = list[Acked]()
            for effect in self._effects:
                if type(effect) is PulledMessages:
                    released += self._later.pop(effect.connection, ())
        self._effects[:0] = released  # before the messages that they may be a part of

    def _write(self) -> StorageError | None:
        """Write the staged records. While that fails (a full disk), the answers that depend on them wait; return the
        error.
        """
        groups = self._store.groups
        if not groups.staged and not self._withheld and not groups.broken:
            return None
        try:
            groups.write()
        except SyncFailed as error:
            self._withhold()
            self._effects += [_refused(effect, error) for effect in self._withheld]
            self._withheld.clear()
            return error
        except StorageError as error:
            self._withhold()
            return error
        if self._withheld:
            self._effects += self._withheld
            self._withheld.clear()
        return None

    def write_all(self) -> None:
        """Write the staged records, unless the log is broken. Raise StorageFull or StorageFailed; then they stay
        staged.
        """
        error = self._write()
        if error is not None and not isinstance(error, SyncFailed):
            raise error

    def next_deadline_us(self, now_us: int) -> int | None:
        """Return when to write next."""
        if self._withheld:
            return now_us + _AGAIN_US
        return self._later_us if self._later else None

    def _withhold(self) -> None:
        waiting = [effect for effect in self._effects if _needs_records(effect)]
        if waiting:
            self._withheld += waiting
            self._effects[:] = [effect for effect in self._effects if not _needs_records(effect)]


def _needs_records(effect: Effect) -> bool:
    return (
        isinstance(effect, Acked | Administered | HandedBack | HandedOver)
        or (isinstance(effect, PulledMessages) and bool(effect.ranges))
        or (isinstance(effect, Subscribed) and effect.consumer_state is not None)
    )


def _refused(effect: Effect, error: StorageError) -> Refused:
    assert isinstance(effect, Acked | Administered | HandedBack | HandedOver | PulledMessages | Subscribed)
    return Refused(effect.connection, effect.request, error)
