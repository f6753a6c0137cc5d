"""Seal the segments that are being written, on request, so that everything stored so far can be archived.

The request is answered once a checkpoint has these segments and everything that belongs to them: from then on their
files do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from qmq.broker.ports.commands import Administer, Now
from qmq.broker.ports.effects import Administered, CheckpointWanted, Effect, Refused
from qmq.errors import StorageFailed
from qmq.storage.store import Store

#: How often to look for the checkpoint, and how long to wait for it.
_LOOK_US: Final = 20_000
_TIMEOUT_US: Final = 30_000_000


class SegmentRoll:
    """Rolls the segments of the message log. The answers go to *effects*."""

    def __init__(self, store: Store, effects: list[Effect], write: Callable[[], None]) -> None:
        """*write* stores the batches that are staged."""
        self._store = store
        self._effects = effects
        self._write = write
        self._waiting: list[tuple[Administer, list[int], int]] = []  # ends of the segments, deadline

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, command: Administer, now: Now) -> None:
        """Seal the segments; a segment without batches is left open. Raises StorageError."""
        self._write()
        ends = [part.seal() for part in self._store.partitions]
        self._waiting.append((command, ends, now.monotonic_us + _TIMEOUT_US))
        self.tick(now)
        if self._waiting:
            self._effects.append(CheckpointWanted())

    def tick(self, now: Now) -> None:
        """Answer the requests whose checkpoint is there, whose partition is broken, or whose time is up."""
        waiting, self._waiting = self._waiting, []
        for command, ends, until_us in waiting:
            parts = self._store.partitions
            broken = next(filter(None, (part.broken() for part in parts)), None)
            if all(part.is_settled(end) for part, end in zip(parts, ends, strict=True)):
                rows: list[dict[str, Any]] = [{"partition": number, "end": end} for number, end in enumerate(ends)]
                self._effects.append(Administered(command.connection, command.request, {"rows": rows}))
            elif broken is not None:
                self._effects.append(Refused(command.connection, command.request, broken))
            elif now.monotonic_us >= until_us:
                slow = StorageFailed(
                    f"the segments are sealed, but no checkpoint had them within {_TIMEOUT_US // 1_000_000} s; read "
                    "the broker's log for errors of its disk, then try again"
                )
                self._effects.append(Refused(command.connection, command.request, slow))
            else:
                self._waiting.append((command, ends, until_us))

    def disconnected(self, connection: int) -> None:
        """Drop the requests of a connection that is gone."""
        self._waiting = [one for one in self._waiting if one[0].connection != connection]

    def next_deadline_us(self, now: Now) -> int | None:
        """Return when to look again; None when no request waits."""
        return now.monotonic_us + _LOOK_US if self._waiting else None
