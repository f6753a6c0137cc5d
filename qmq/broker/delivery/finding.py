"""Where the messages of one answer lie that are handed out again: each range is looked for once."""

from __future__ import annotations

import numpy as np

from qmq.broker.groups.group import Group
from qmq.broker.groups.message_ranges import PARTITIONS, Parts, Some, parts_of
from qmq.broker.journal.record_types import MessageRange
from qmq.format.pieces import StoredBatch
from qmq.storage.store import NotAtHand, Store

#: What the numbers of a range's messages count from: its log, and where it is no subject's, its first run.
_Base = tuple[int, int, int]


class RangeLookup:
    """Of one group, for one answer: neither rows nor bytes change meanwhile.

    Messages that fail one by one are often of one run: who has found one of it need not look for the others.
    """

    def __init__(self, store: Store, group: Group) -> None:
        self._store = store
        self._group = group
        self._known: dict[MessageRange, Parts] = {}
        self._last: Some | None = None  # the whole run in which the last range lies that was looked for
        self._base: _Base = (-1, 0, 0)
        #: How many ranges had to be looked for.
        self.looks = 0
        self._start = 0  # number of its first message from the base on
        #: Batches whose header was checked, for who carries them: (partition, position).
        self.batches: dict[tuple[int, int], StoredBatch] = {}

    def parts(self, messages: MessageRange) -> Parts:
        """The parts of a range, as far as they are there; all of them in memory. Raises NotAtHand."""
        found = self._known.get(messages)
        if found is None:
            found = self._known[messages] = self._in_last(messages) or self._look(messages)
        return found

    def _in_last(self, messages: MessageRange) -> Parts:
        base, number = _numbered(messages)
        if self._last is None or base != self._base:
            return []
        start = number - self._start
        if start < 0 or start + messages.total > self._last.stop:
            return []
        return [Some(self._last.partition, self._last.entry, start, start + messages.total)]

    def _look(self, messages: MessageRange) -> Parts:
        self.looks += 1
        store, parts = self._store, parts_of(self._store, self._group, messages)
        for part in parts:
            if isinstance(part, Some):
                positions, sizes = np.array([part.entry[1]]), np.array([part.entry[10]])
            else:
                positions, sizes = part.rows["position"].astype(np.int64), part.rows["batch_size"].astype(np.int64)
            if store.count_at_hand(part.partition, positions, sizes) < len(positions):
                raise NotAtHand(store.read_of(part.partition, positions, sizes, onward=False))
        if len(parts) == 1 and isinstance(part := parts[0], Some) and part.stop - part.start == messages.total:
            self._last = part._replace(start=0, stop=part.entry[4])
            self._base, number = _numbered(messages)
            self._start = number - part.start
        return parts


def _numbered(messages: MessageRange) -> tuple[_Base, int]:
    """What its messages are numbered from, and the number of its first."""
    if messages.log < PARTITIONS:
        return (messages.log, 0, 0), messages.first + messages.skip
    return (messages.log, messages.first, messages.run), messages.skip
