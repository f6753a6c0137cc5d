"""The segments that are being written closed on request, so that all that is stored by then can be archived.

It is answered once a checkpoint has it, with everything that belongs to these segments: then their files stay as they
are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from qmq.broker.ports.commands import Administer, Now
from qmq.broker.ports.effects import Administered, Effect, Refused
from qmq.errors import StorageFailed
from qmq.storage.store import Store

#: A checkpoint is looked for so often, and for so long.
_LOOK_US: Final = 20_000
_TIMEOUT_US: Final = 30_000_000


class SegmentRoll:
    """Of the message log. The answers go to *effects*."""

    def __init__(self, store: Store, effects: list[Effect], write: Callable[[], None]) -> None:
        """*write* stores what is staged."""
        self._store = store
        self._effects = effects
        self._write = write
        self._waiting: list[tuple[Administer, list[int], int]] = []  # where the segments end, patience until

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, command: Administer, now: Now) -> None:
        """Close the segments; what has no batch in it is left. Raises StorageError."""
        self._write()
        ends = [self._store.seal(partition) for partition in range(self._store.partitions)]
        self._waiting.append((command, ends, now.monotonic_us + _TIMEOUT_US))
        self.tick(now)

    def tick(self, now: Now) -> None:
        """Answer what can be."""
        waiting, self._waiting = self._waiting, []
        for command, ends, until_us in waiting:
            broken = next(filter(None, map(self._store.broken, range(len(ends)))), None)
            if all(self._store.is_settled(partition, end) for partition, end in enumerate(ends)):
                rows: list[dict[str, Any]] = [{"partition": number, "end": end} for number, end in enumerate(ends)]
                self._effects.append(Administered(command.connection, command.request, {"rows": rows}))
            elif broken is not None:
                self._effects.append(Refused(command.connection, command.request, broken))
            elif now.monotonic_us >= until_us:
                slow = StorageFailed(
                    f"the segments are closed, and no checkpoint has them after {_TIMEOUT_US // 1_000_000} s; see "
                    "what the broker's log says of its disk, then try again"
                )
                self._effects.append(Refused(command.connection, command.request, slow))
            else:
                self._waiting.append((command, ends, until_us))

    def disconnected(self, connection: int) -> None:
        """Nobody waits for its answers any more."""
        self._waiting = [one for one in self._waiting if one[0].connection != connection]

    def next_deadline_us(self, now: Now) -> int | None:
        """When to look again."""
        return now.monotonic_us + _LOOK_US if self._waiting else None
