"""The places of a message in the message log: where it was stored first, and where copies of it lie."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qmq.broker.find.rows import boundary_at, row_in_batch
from qmq.broker.groups.group import Group
from qmq.broker.groups.message_ranges import PARTITIONS, RunPart, partition_of, parts_of
from qmq.broker.journal.record_types import MessageRange
from qmq.format.batch import EntryRow
from qmq.format.ids import MessageId
from qmq.format.layout import ENTRY_HAS_ORIGIN_ID, HAS_ORIGIN_ID
from qmq.format.pieces import StoredBatch
from qmq.format.private import is_private, origin_subject, private_subject
from qmq.storage.store import NotInMemory, Store


class MessagePlace(NamedTuple):
    """Message *ordinal* of a run: the run's row in the consumer log, and the name of its subject."""

    partition: int
    entry: EntryRow
    ordinal: int
    name: str

    @property
    def sequence(self) -> int:
        """Its sequence in the subject of the run."""
        return self.entry[0] + self.ordinal

    @property
    def subject(self) -> str:
        """The subject to which it was sent."""
        return origin_subject(self.name)

    @property
    def is_shared(self) -> bool:
        """Whether all groups that follow the subject have it; else it belongs to one group alone."""
        return not is_private(self.name)

    def belongs_to(self, group: str) -> bool:
        """Return whether that group has it."""
        return self.is_shared or self.name == private_subject(group, self.subject)

    @property
    def run_part(self) -> RunPart:
        """The message as a part of its run."""
        return RunPart(self.partition, self.entry, self.ordinal, self.ordinal + 1)


def id_of(store: Store, partition: int, entry: EntryRow, index: int) -> str:
    """Return the id of a message of a run; of a copy, the id of its original.

    Raises StorageError, BadBatch and NotInMemory.
    """
    position, run = entry[1], entry[5]
    part = store.partitions[partition]
    if entry[8] & ENTRY_HAS_ORIGIN_ID:
        if not part.page_cache.has(position, entry[10]):
            batches = np.array([position]), np.array([entry[10]])
            raise NotInMemory(part.page_cache.read(*batches, onward=False))
        batch = StoredBatch(part.message_log.view(position, entry[10]))
        return bytes(batch.column(run, HAS_ORIGIN_ID)[index]).hex()
    row = part.consumer_log.row_at_position(position) + run
    return str(MessageId(store.store_id, partition, position + boundary_at(part, row, index).ordinal))


def find_place(store: Store, partition: int, position: int) -> MessagePlace | None:
    """Return the message at a position; None where none is kept. Raises NotInMemory and StorageError."""
    if partition >= len(store.partitions):
        return None
    part = store.partitions[partition]
    log = part.consumer_log
    row = log.row_at_position(position + 1) - 1
    if row < log.first_row or row >= log.visible_row:
        return None
    entry = log.read_entry(row)
    start, row = entry[1], row - entry[5]
    row, index = row_in_batch(part, row, log.read_entry(row), position - start)
    if row >= log.visible_row:
        return None
    entry = log.read_entry(row)
    return MessagePlace(partition, entry, index, store.subjects.name(entry[3])) if entry[1] == start else None


def may_have(messages: MessageRange, place: MessagePlace) -> bool:
    """Return whether a range may have the message at a place, by what the range itself says."""
    if messages.log < PARTITIONS:
        return offset_by_sequence(messages, place) is not None
    position = place.entry[1]
    return partition_of(messages) == place.partition and messages.first <= position <= messages.end


def offset_by_sequence(messages: MessageRange, place: MessagePlace) -> int | None:
    """Return which message of a range by sequence the message is; None where the range does not have it."""
    offset = place.sequence - messages.first - messages.skip
    return offset if messages.log == place.entry[3] and 0 <= offset < messages.total else None


def offset_in(store: Store, group: Group, messages: MessageRange, place: MessagePlace) -> int | None:
    """Return which message of a group's range (from 0) lies at a place; None where the range does not have it.

    Raises NotInMemory and StorageError.
    """
    if messages.log < PARTITIONS:
        return offset_by_sequence(messages, place)
    if not may_have(messages, place):
        return None
    position, run = place.entry[1], place.entry[5]
    if messages.first == messages.end and messages.run == run and messages.skip + messages.total <= place.entry[4]:
        offset = place.ordinal - messages.skip
        return offset if 0 <= offset < messages.total else None
    before = 0
    for part in parts_of(store, group, messages):
        if isinstance(part, RunPart):
            if part.entry[1] == position and part.entry[5] == run and part.start <= place.ordinal < part.stop:
                return before + place.ordinal - part.start
            before += part.stop - part.start
            continue
        counts = part.rows["count"].astype(np.int64)
        found = np.flatnonzero((part.rows["position"] == position) & (part.rows["run"] == run))
        if len(found):
            return before + int(counts[: found[0]].sum()) + place.ordinal
        before += int(counts.sum())
    return None
