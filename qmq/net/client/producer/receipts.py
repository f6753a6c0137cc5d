"""Receipts of messages that a broker has stored."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from qmq.format.ids import MessageId

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)


def utc_from_us(time_us: int) -> datetime:
    """Return microseconds since 1970 as a datetime in UTC; a later time than datetime can hold as the latest one, as a
    sender's clock may be wrong.
    """
    return _EPOCH + timedelta(microseconds=min(time_us, _LAST_US))


class StoredSpan(NamedTuple):
    """Stored messages of one subject in a row. ``position`` and ``sequence`` are those of the first message; the
    sequence is None for delayed messages, which have none yet, and where the broker no longer knows it.
    """

    subject: str
    messages: int
    store_id: bytes
    partition: int
    position: int
    sequence: int | None
    stored_at_us: int
    maybe_duplicate: bool = False

    def part(self, start: int, count: int) -> StoredSpan:
        """Return *count* of these messages, from number *start* on."""
        sequence = None if self.sequence is None else self.sequence + start
        return self._replace(messages=count, position=self.position + start, sequence=sequence)

    def receipt(self, index: int) -> Receipt:
        """Return the receipt of one of these messages."""
        return Receipt(self, index)


class OrderedSpan(NamedTuple):
    """Stored messages of one subject with order keys, in the order of the call; in the batch they lie slot by slot.
    ``stored`` is the whole run; ``sequences`` is None where no message has one.
    """

    stored: StoredSpan
    positions: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64] | None

    @property
    def messages(self) -> int:
        """The count of messages."""
        return len(self.positions)

    def part(self, start: int, count: int) -> OrderedSpan:
        """Return *count* of these messages, from number *start* on."""
        sequences = None if self.sequences is None else self.sequences[start : start + count]
        return OrderedSpan(self.stored, self.positions[start : start + count], sequences)

    def receipt(self, index: int) -> Receipt:
        """Return the receipt of one of these messages."""
        sequence = None if self.sequences is None else int(self.sequences[index])
        return Receipt(self.stored._replace(messages=1, position=int(self.positions[index]), sequence=sequence))


class Receipt:
    """The receipt of one stored message: its id, its sequence, and the time at which the broker stored it."""

    __slots__ = ("_index", "_span")

    def __init__(self, span: StoredSpan, index: int = 0) -> None:
        self._span = span
        self._index = index

    @property
    def id(self) -> str:
        """The id of the message: 32 hex digits that never change."""
        span = self._span
        return str(MessageId(span.store_id, span.partition, span.position + self._index))

    @property
    def subject(self) -> str:
        """The subject of the message."""
        return self._span.subject

    @property
    def sequence(self) -> int | None:
        """The number of the message within its subject. It is None for a delayed message, which gets a number when it
        falls due, and if the broker no longer knew it.
        """
        first = self._span.sequence
        return None if first is None else first + self._index

    @property
    def stored_at_us(self) -> int:
        """The time at which the broker stored the message, in microseconds since 1970, UTC."""
        return self._span.stored_at_us

    @property
    def stored_at(self) -> datetime:
        """The time at which the broker stored the message, in UTC."""
        return utc_from_us(self._span.stored_at_us)

    @property
    def maybe_duplicate(self) -> bool:
        """Whether another broker may have stored it, too: that one was lost before it answered (``failover_after``)."""
        return self._span.maybe_duplicate

    @property
    def duplicate(self) -> bool:
        """Whether nothing was stored, as a message with this unique text was sent before: the id is that one's."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receipt) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Receipt({self.id!r}, {self.subject!r}, sequence={self.sequence})"


class DuplicateReceipt(Receipt):
    """The receipt of a message that was not stored: one with its unique text was before. Its id, sequence and time are
    those of that one.
    """

    __slots__ = ()

    @property
    def duplicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Receipt({self.id!r}, {self.subject!r}, sequence={self.sequence}, duplicate=True)"


class ReceiptSpan(NamedTuple):
    """Messages of one call of which some were not stored."""

    receipts: tuple[Receipt, ...]

    @property
    def messages(self) -> int:
        """The count of messages."""
        return len(self.receipts)

    def receipt(self, index: int) -> Receipt:
        """Return the receipt of one of these messages."""
        return self.receipts[index]


AnySpan = StoredSpan | OrderedSpan | ReceiptSpan


class Receipts(Sequence[Receipt]):
    """The receipts of one ``send_many``, in the order of its bodies; each is made on access."""

    __slots__ = ("_spans", "_starts", "_total")

    def __init__(self, spans: Sequence[AnySpan]) -> None:
        self._spans = spans
        self._starts: list[int] = []
        total = 0
        for span in spans:
            self._starts.append(total)
            total += span.messages
        self._total = total

    def __len__(self) -> int:
        return self._total

    @overload
    def __getitem__(self, index: int) -> Receipt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Receipt]: ...
    def __getitem__(self, index: int | slice) -> Receipt | list[Receipt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._total))]
        if index < 0:
            index += self._total
        if not 0 <= index < self._total:
            raise IndexError(f"receipt {index} of {self._total}")
        number = bisect_right(self._starts, index) - 1
        return self._spans[number].receipt(index - self._starts[number])

    def __iter__(self) -> Iterator[Receipt]:
        for span in self._spans:
            for index in range(span.messages):
                yield span.receipt(index)

    def __repr__(self) -> str:
        return f"<Receipts of {self._total} messages>"
