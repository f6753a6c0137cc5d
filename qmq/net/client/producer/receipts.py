"""What a producer gets for messages that a broker has stored."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, overload

from qmq.format.ids import MessageId

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)


def utc_from_us(time_us: int) -> datetime:
    """Microseconds since 1970 as an aware datetime in UTC; the last there is for what is behind it, as a sender's clock
    may have said.
    """
    return _EPOCH + timedelta(microseconds=min(time_us, _LAST_US))


class StoredSpan(NamedTuple):
    """Messages of one subject that were stored one after another: ``position`` and ``sequence`` are the first one's
    (None: they have none yet, or it is not known any more).
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
        """So many of them, from that one on."""
        sequence = None if self.sequence is None else self.sequence + start
        return self._replace(messages=count, position=self.position + start, sequence=sequence)


class Receipt:
    """One message is stored: under which id, as which sequence of its subject, and when."""

    __slots__ = ("_index", "_span")

    def __init__(self, span: StoredSpan, index: int = 0) -> None:
        self._span = span
        self._index = index

    @property
    def id(self) -> str:
        """The message's id, 32 hex digits: its name for good."""
        span = self._span
        return str(MessageId(span.store_id, span.partition, span.position + self._index))

    @property
    def subject(self) -> str:
        """The subject it was sent to."""
        return self._span.subject

    @property
    def sequence(self) -> int | None:
        """Its number among the messages of its subject; None for one that is to be delivered later, which gets its
        number then, and where the broker did not know it any more.
        """
        first = self._span.sequence
        return None if first is None else first + self._index

    @property
    def stored_at_us(self) -> int:
        """When the broker stored it: microseconds since 1970, UTC."""
        return self._span.stored_at_us

    @property
    def stored_at(self) -> datetime:
        """When the broker stored it, UTC."""
        return utc_from_us(self._span.stored_at_us)

    @property
    def maybe_duplicate(self) -> bool:
        """Another broker may have stored it too: it did not answer, and stayed away for ``failover_after``."""
        return self._span.maybe_duplicate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receipt) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Receipt({self.id!r}, {self.subject!r}, sequence={self.sequence})"


class Receipts(Sequence[Receipt]):
    """The receipts of one ``send_many``, in the order of its bodies; each is made when it is looked at."""

    __slots__ = ("_spans", "_starts", "_total")

    def __init__(self, spans: Sequence[StoredSpan]) -> None:
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
        return Receipt(self._spans[number], index - self._starts[number])

    def __iter__(self) -> Iterator[Receipt]:
        for span in self._spans:
            for index in range(span.messages):
                yield Receipt(span, index)

    def __repr__(self) -> str:
        return f"<Receipts of {self._total} messages>"
