"""Rewind groups to the first bad bytes of the pull log, because the records there are lost.

Behind the bad bytes, records by which a group moves on do not count, so the group gets the messages again that it was
given since. All other records count (acks of older messages, joins, settings, seeks, handovers): each is applied as far
as it fits the group's state at the bad bytes. So no message is lost, and none is in flight twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

import numpy as np

from qmq.broker.groups.group import Group
from qmq.broker.groups.message_ranges import PARTITIONS
from qmq.broker.journal.record_types import MessageRange, RecordKind
from qmq.errors import BadBatch, StorageError
from qmq.format.batch import Header, parse_header
from qmq.format.copies.for_group import is_copy
from qmq.format.layout import BATCH_HEADER_SIZE, RUN_REPLAYED
from qmq.format.private import private_subject
from qmq.net.protocol.types import Disposition
from qmq.storage.store import Hole, Store

#: Records by which a group moves on. (Retention drops only messages whose records a checkpoint has, so MOVED and
#: FORWARD can be done anew.)
_MOVES_ON: Final = frozenset(
    (RecordKind.PULL, RecordKind.PASSED, RecordKind.AGAIN, RecordKind.MOVED, RecordKind.FORWARD)
)
_REASON: Final = "the record of its handover is lost"
_CHUNK_ROWS: Final = 8_192


class Rewind:
    """The groups that a start rewinds while it reads the pull log."""

    def __init__(self, holes: Iterable[Hole]) -> None:
        self._holes = deque(holes)
        #: The size of all holes so far. Damage only grows, so the same size means the same holes.
        self.lost_bytes = 0
        self.groups = set[Group]()

    def pass_holes(self, position: int, groups: Iterable[Group]) -> None:
        """Rewind *groups* if holes lie before *position*."""
        while self._holes and self._holes[0].end <= position:
            hole = self._holes.popleft()
            self.lost_bytes += hole.end - hole.start
            self.groups.update(groups)

    def counts(self, group: Group, kind: int) -> bool:
        """Return whether a record of this kind, read now, counts."""
        return kind not in _MOVES_ON or group not in self.groups

    def finish(self, group: Group, lost_bytes: int) -> None:
        """Note that an earlier start rewound the group to holes of *lost_bytes*.

        All records behind count again, unless there are more holes now: that start had still read the records in them.
        """
        if lost_bytes == self.lost_bytes:
            self.groups.discard(group)


def hand_out_unrecorded(store: Store, groups: Iterable[Group], now_us: int) -> None:
    """Hand out messages of a group's private subjects that no record names: the record may be lost.

    They were acknowledged only once a record named them, so these lie behind the checkpoint. This may wait for the
    disk.
    """
    if not store.subjects.has_private:
        return
    for group in groups:
        ledger = group.ledger
        if ledger is None or group.name is None:
            continue
        own = store.subjects.under(private_subject(group.name, ""), 0, store.subjects.count).tolist()
        for header, is_restored in _stored(store, own) if own else ():
            partition, position, first = header.partition, header.position, header.producer_sequence
            messages = MessageRange(PARTITIONS + partition, position, 0, 0, header.messages, position)
            if is_restored:
                if not ledger.restored.has(header.producer_id, first):
                    ledger.bring_back([messages], header.producer_id, first, first + header.messages, now_us)
            elif (name := header.producer_id + first.to_bytes(8, "little")) not in ledger.handed:
                ledger.take_over(messages, 1, Disposition.NACK, _REASON, 0, now_us, name)


def _stored(store: Store, own: list[int]) -> Iterator[tuple[Header, bool]]:
    """Yield the batches of private subjects behind the checkpoint, and whether a restore brought them.

    Batches that cannot be read are left out; so are copies, because a rewound group has their originals.
    """
    for part in store.partitions:
        row = part.consumer_log.row_at_position(part.claimed)
        while len(rows := part.consumer_log.rows(row, _CHUNK_ROWS)):
            row += len(rows)
            mine = rows[np.isin(rows["subject"], own)]
            for position, flags in dict(zip(mine["position"].tolist(), mine["flags"].tolist(), strict=True)).items():
                with suppress(BadBatch, StorageError):
                    header = parse_header(part.page_cache.peek(position, BATCH_HEADER_SIZE))
                    if not is_copy(header.producer_id):
                        yield header, bool(flags & RUN_REPLAYED)
