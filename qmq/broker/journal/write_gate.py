"""What was noted of groups in this turn is written before anyone is told of it.

Acknowledgements whose answers may wait are written with the next record that somebody does wait for, and answered with
the next messages of their connection: mostly one write, and one answer, for what would be two.
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
    Subscribed,
    SyncWanted,
)
from qmq.errors import StorageError, SyncFailed
from qmq.storage.store import Store

#: What could not be written is tried again so often.
_AGAIN_US: Final = 100_000
#: Acknowledgements are written and answered after so long at the latest.
LATER_US: Final = 20_000
#: What is said whatever becomes of records.
_REST_ON_NONE: Final = frozenset((HeartbeatSeen, Sent, SyncWanted))


class WriteGate:
    """Between the ledgers, which stage records, and the effects that depend on them."""

    def __init__(self, store: Store, effects: list[Effect]) -> None:
        self._store = store
        self._effects = effects
        self._withheld: list[Effect] = []
        #: Why the last write failed.
        self.failed: StorageError | None = None
        self._later: dict[int, list[Acked]] = {}  # by connection
        self._later_us = 0  # when they are due

    def answer_later(self, answer: Acked, now_us: int) -> None:
        """An acknowledgement whose answer may wait."""
        if not self._later:
            self._later_us = now_us + LATER_US
        self._later.setdefault(answer.connection, []).append(answer)

    def hurry(self) -> None:
        """What may wait is answered with the next write."""
        self._later_us = 0

    def disconnected(self, connection: int) -> None:
        """Nobody waits for its answers any more."""
        self._later.pop(connection, None)

    def turn(self, now_us: int) -> None:
        """The turn ends: write, unless nobody waits for what is staged."""
        if self._later:
            self._release(now_us)
            if self._later and not self._withheld and all(type(effect) in _REST_ON_NONE for effect in self._effects):
                return
        self._write()

    def _release(self, now_us: int) -> None:
        """Have those answered that are due, and those whose connection gets messages now."""
        if now_us >= self._later_us or self._store.groups.broken:
            released = [answer for answers in self._later.values() for answer in answers]
            self._later.clear()
        else:
            released = list[Acked]()
            for effect in self._effects:
                if type(effect) is PulledMessages:
                    released += self._later.pop(effect.connection, ())
        self._effects[:0] = released  # before the messages that they may be a part of

    def _write(self) -> None:
        """Write what is staged. While that cannot be (a full disk), answers that rest on it wait."""
        groups = self._store.groups
        if not groups.staged and not self._withheld and not groups.broken:
            return
        try:
            groups.write()
        except SyncFailed as error:
            self._withhold()
            self._effects += [_refused(effect, error) for effect in self._withheld]
            self._withheld.clear()
            self.failed = error
            return
        except StorageError as error:
            self._withhold()
            self.failed = error
            return
        self.failed = None
        if self._withheld:
            self._effects += self._withheld
            self._withheld.clear()

    def write_all(self) -> None:
        """Write what is staged, unless nothing can be written any more. Raises StorageFull or StorageFailed; then it
        stays staged.
        """
        self._write()
        if self.failed is not None and not isinstance(self.failed, SyncFailed):
            raise self.failed

    def next_deadline_us(self, now_us: int) -> int | None:
        """When there is something to write."""
        if self._withheld:
            return now_us + _AGAIN_US
        return self._later_us if self._later else None

    def _withhold(self) -> None:
        resting = [effect for effect in self._effects if _rests_on_records(effect)]
        if resting:
            self._withheld += resting
            self._effects[:] = [effect for effect in self._effects if not _rests_on_records(effect)]


def _rests_on_records(effect: Effect) -> bool:
    return (
        isinstance(effect, Acked | Administered | HandedBack | HandedOver)
        or (isinstance(effect, PulledMessages) and bool(effect.ranges))
        or (isinstance(effect, Subscribed) and effect.consumer_state is not None)
    )


def _refused(effect: Effect, error: StorageError) -> Refused:
    assert isinstance(effect, Acked | Administered | HandedBack | HandedOver | PulledMessages | Subscribed)
    return Refused(effect.connection, effect.request, error)
