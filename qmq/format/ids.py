"""The message id, and types for integers that must not be confused."""

from __future__ import annotations

from typing import NamedTuple, NewType

from qmq.errors import InvalidOption
from qmq.format.layout import MESSAGE_ID, MESSAGE_ID_SIZE

#: The number of a byte in a partition's log; a message's position is its batch's plus its ordinal in the batch.
Position = NewType("Position", int)
#: The number of a message in its subject.
Sequence = NewType("Sequence", int)
#: The number of an entry in its partition, in position order.
Row = NewType("Row", int)
#: The number of a subject in the store's registry.
SubjectNumber = NewType("SubjectNumber", int)


class MessageId(NamedTuple):
    """The permanent name of a message: where it was first stored. ``str()`` gives 32 hex digits."""

    store_id: bytes
    partition: int
    position: int

    def __str__(self) -> str:
        return MESSAGE_ID.pack(*self).hex()

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Return the id that 32 hex digits name; raises InvalidOption for anything else."""
        try:
            raw = bytes.fromhex(text)
        except ValueError:
            raw = b""
        if len(raw) != MESSAGE_ID_SIZE or len(text) != 2 * MESSAGE_ID_SIZE:  # fromhex takes spaces
            raise InvalidOption(f"{text!r} is not a message id; give its 32 hex digits")
        return cls._make(MESSAGE_ID.unpack(raw))
