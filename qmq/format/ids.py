"""Integers that must not be confused, and the message id."""

from __future__ import annotations

from typing import NamedTuple, NewType

from qmq.errors import InvalidOption
from qmq.format.layout import MESSAGE_ID, MESSAGE_ID_SIZE

#: A byte offset in a partition of the message log; a message's is its batch's position plus its ordinal in the batch.
Position = NewType("Position", int)
#: The number of a message in one consumer log.
Sequence = NewType("Sequence", int)
#: The number of an entry of a partition's consumer logs, in position order.
Row = NewType("Row", int)
#: The number of a subject in the store's registry.
SubjectNumber = NewType("SubjectNumber", int)


class MessageId(NamedTuple):
    """Where a message was first stored: its name for good. ``str()`` gives 32 hex digits."""

    store_id: bytes
    partition: int
    position: int

    def __str__(self) -> str:
        return MESSAGE_ID.pack(*self).hex()

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Read 32 hex digits; raises InvalidOption for anything else."""
        try:
            raw = bytes.fromhex(text)
        except ValueError:
            raw = b""
        if len(raw) != MESSAGE_ID_SIZE or len(text) != 2 * MESSAGE_ID_SIZE:  # fromhex takes spaces
            raise InvalidOption(f"{text!r} is not a message id; give its 32 hex digits")
        return cls._make(MESSAGE_ID.unpack(raw))
