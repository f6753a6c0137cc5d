"""What may be handed to groups that get a message once: what a loss of power cannot take away any more.

A batch that was not flushed may be gone then, and its sender tries it again: as another message, which a group that had
been given the first one would get as well. So such groups are given what is on disk, and the rest after a sync. Where a
sync has failed all is handed out: the senders were told that nobody knows, and send anew or not, as they choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from qmq.broker.delivery.encode import Many, Some
from qmq.broker.delivery.select import Selection
from qmq.broker.groups.group import Following


class OnDisk:
    """Tells what is on disk, and who waits for more of it."""

    def __init__(self, upto: Callable[[int], int], want: Callable[[int], None]) -> None:
        """*upto* tells up to which position a partition's batches are on disk; *want* has the rest brought there."""
        self._upto = upto
        self._want = want
        self._waiting: dict[int, Following] = {}

    def count(self, selection: Selection) -> int:
        """How many of the messages that were chosen come before the first that is not on disk."""
        if all(self._last(part) < self._upto(part.partition) for part in selection.parts):
            return selection.count
        count = 0
        for part in selection.parts:
            upto = self._upto(part.partition)
            if self._last(part) < upto:
                count += int(part.rows["count"].sum()) if isinstance(part, Many) else part.stop - part.start
                continue
            if isinstance(part, Many):
                count += int(part.rows["count"][: int(np.searchsorted(part.rows["position"], np.uint64(upto)))].sum())
            break
        return count

    def _last(self, part: Many | Some) -> int:
        return int(part.rows["position"][-1]) if isinstance(part, Many) else part.entry[1]

    def want(self, selection: Selection) -> None:
        """Have what was chosen brought to disk."""
        for partition in sorted({part.partition for part in selection.parts}):
            self._want(partition)
        self._waiting.update((id(following), following) for following, parts in selection.taken() if parts)

    def synced(self) -> Iterable[Following]:
        """More is on disk, or a sync has failed: who waited for that."""
        waiting, self._waiting = self._waiting, {}
        return waiting.values()
