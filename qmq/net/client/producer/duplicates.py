"""Messages that a broker did not store, as they repeat unique texts, and where it has the first of each text."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from qmq.errors import InvalidOption, ProtocolError
from qmq.format.layout import NO_SEQUENCE, UNIQUE_ROW_SIZE
from qmq.net.client.producer.receipts import DuplicateReceipt, StoredSpan

#: ordinal u32 of the message in its batch, and the UNIQUE_ROW of the first one with its text
_ROW: Final = struct.Struct("<IQQQH")
assert _ROW.size == 4 + UNIQUE_ROW_SIZE


class Duplicate(NamedTuple):
    """Where the first message with a unique text is."""

    position: int
    stored_at_us: int
    sequence: int
    partition: int

    def receipt(self, subject: str, store_id: bytes) -> DuplicateReceipt:
        """Return the receipt of a message that repeats the text."""
        sequence = None if self.sequence == NO_SEQUENCE else self.sequence
        return DuplicateReceipt(
            StoredSpan(subject, 1, store_id, self.partition, self.position, sequence, self.stored_at_us)
        )


def read_duplicates(rows: bytes, messages: int) -> dict[int, Duplicate]:
    """Return the messages that were left out of a batch of so many, by ordinal. Raises ProtocolError."""
    if len(rows) % _ROW.size:
        raise ProtocolError(f"SENT has {len(rows)} bytes of messages that were left out, {_ROW.size} for each")
    found = {ordinal: Duplicate(*row) for ordinal, *row in _ROW.iter_unpack(rows)}
    if len(found) * _ROW.size != len(rows) or max(found) >= messages:
        raise ProtocolError(f"SENT leaves out messages that a batch of {messages} does not have")
    return found


def no_unique_texts() -> InvalidOption:
    """Return the error for a unique text that goes to a broker that knows none."""
    return InvalidOption("this broker is too old for unique=: it would store repeats; upgrade it first")
