"""What was noted of groups in this turn is written before anyone is told of it."""

from __future__ import annotations

from typing import Final

from qmq.broker.effects import Acked, Administered, Effect, HandedBack, HandedOver, Messages, Refused, Subscribed
from qmq.errors import StorageError, SyncFailed
from qmq.storage.store import Store

#: What could not be written is tried again so often.
_AGAIN_US: Final = 100_000


class Records:
    """Between the ledgers, which stage records, and the effects that depend on them."""

    def __init__(self, store: Store, effects: list[Effect]) -> None:
        self._store = store
        self._effects = effects
        self._withheld: list[Effect] = []
        #: Why the last write failed.
        self.failed: StorageError | None = None

    def write(self) -> None:
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
        self.write()
        if self.failed is not None and not isinstance(self.failed, SyncFailed):
            raise self.failed

    def next_deadline_us(self, now_us: int) -> int | None:
        """When to try again."""
        return now_us + _AGAIN_US if self._withheld else None

    def _withhold(self) -> None:
        resting = [effect for effect in self._effects if _rests_on_records(effect)]
        if resting:
            self._withheld += resting
            self._effects[:] = [effect for effect in self._effects if not _rests_on_records(effect)]


def _rests_on_records(effect: Effect) -> bool:
    return (
        isinstance(effect, Acked | Administered | HandedBack | HandedOver)
        or (isinstance(effect, Messages) and bool(effect.ranges))
        or (isinstance(effect, Subscribed) and effect.place is not None)
    )


def _refused(effect: Effect, error: StorageError) -> Refused:
    assert isinstance(effect, Acked | Administered | HandedBack | HandedOver | Messages | Subscribed)
    return Refused(effect.connection, effect.request, error)
