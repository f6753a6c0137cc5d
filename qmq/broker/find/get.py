"""One message by its id, which says where the message lies: store, partition and position."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from qmq.broker.delivery.encode import AnswerEncoder
from qmq.broker.find.rows import row_in_batch
from qmq.broker.groups.message_ranges import RunPart
from qmq.broker.ports.commands import Get
from qmq.broker.ports.effects import GotMessage
from qmq.broker.ports.rights import Rights
from qmq.errors import BadBytes, QmqError, UnknownMessage
from qmq.format.batch import parse_header
from qmq.format.ids import MessageId
from qmq.format.layout import BATCH_HEADER_SIZE, DELAY_PARTITION, ENTRY_HAS_ORIGIN_ID, HAS_DELIVER_AT, MESSAGE_ID
from qmq.storage.store import NotInMemory, Partition, Store


class GetMessages:
    """Reads messages by their own ids. Copies, which keep the ids of their originals, are found by a search."""

    def __init__(self, store: Store, is_cancelled: Callable[[int], bool], rights: Mapping[int, Rights]) -> None:
        """*is_cancelled* returns whether the delayed message at a position of the delay log was cancelled. *rights* are
        those of the connections that have a token.
        """
        self._rights = rights
        self._store = store
        self._is_cancelled = is_cancelled

    def store_of(self, command: Get) -> Store:
        """Return the store that has the message's log: that of the broker, or its delay log. Raises UnknownMessage."""
        name, store = MessageId._make(MESSAGE_ID.unpack(command.message_id)), self._store
        if name.store_id != store.store_id:
            raise UnknownMessage(f"message {name} is of store {name.store_id.hex()}; this is {store.store_id.hex()}")
        if name.partition < DELAY_PARTITION:
            return store
        if store.delay_log is None:
            raise UnknownMessage(f"message {name} would be delayed, and no message was delayed here")
        return store.delay_log

    def message(self, command: Get) -> GotMessage:
        """Return the answer with the message. Raises UnknownMessage, StorageError, NotInMemory."""
        name, store = MessageId._make(MESSAGE_ID.unpack(command.message_id)), self.store_of(command)
        number = name.partition & (DELAY_PARTITION - 1)
        if number >= len(store.partitions):
            raise UnknownMessage(f"message {name} is of partition {number}; there are {len(store.partitions)} here")
        rights = self._rights.get(command.connection)
        if store is not self._store and self._is_cancelled(name.position):
            if rights is not None and "" not in rights.browse:
                raise _unknown(name)
            raise UnknownMessage(f"the delayed message {name} was cancelled")
        part = store.partitions[number]
        wanted = self._part_at(part, name)
        if rights is not None and not rights.may_browse(store.subjects.name(wanted.entry[3])):
            raise _unknown(name)
        positions, sizes = np.array([wanted.entry[1]]), np.array([wanted.entry[10]])
        if part.page_cache.count(positions, sizes) == 0:
            raise NotInMemory(part.page_cache.read(positions, sizes, onward=False))
        if store is not self._store and not self._is_delayed(part, wanted):
            raise UnknownMessage(f"there is no message {name}: a cancellation has that position")
        damaged: list[QmqError] = []
        buffers = AnswerEncoder(store, damaged).encode([wanted])
        if damaged:
            raise damaged[0]
        if not buffers:
            raise BadBytes(f"the bytes of message {name} are known to be bad; run qmq verify")
        return GotMessage(command.connection, command.request, buffers)

    @staticmethod
    def _is_delayed(part: Partition, wanted: RunPart) -> bool:
        """Return whether the batch of the delay log has delayed messages: others cancel one."""
        header = parse_header(part.message_log.view(wanted.entry[1], BATCH_HEADER_SIZE))
        return bool(header.flags & HAS_DELIVER_AT)

    def _part_at(self, part: Partition, name: MessageId) -> RunPart:
        """Return where a message lies. Raises UnknownMessage, StorageError, NotInMemory."""
        log = part.consumer_log
        row = log.row_at_position(name.position + 1) - 1
        entry = log.read_entry(row) if row >= log.first_row else None
        if entry is None:
            raise UnknownMessage(f"message {name} is not kept any more: retention has dropped it")
        position, row = entry[1], row - entry[5]
        row, index = row_in_batch(part, row, log.read_entry(row), name.position - position)
        if row < log.visible_row:
            entry = log.read_entry(row)
            if entry[1] == position and not entry[8] & ENTRY_HAS_ORIGIN_ID:  # a copy has another id
                return RunPart(part.number, entry, index, index + 1)
        raise _unknown(name)


def _unknown(name: MessageId) -> UnknownMessage:
    return UnknownMessage(f"there is no message {name}: it is not kept any more, or never was stored")
