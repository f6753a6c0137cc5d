"""The messages with order keys of one subject in a batch: gathered in the order of the calls, sent slot by slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

from qmq.format.build import AnyHeader, MessageHeader
from qmq.format.hashing import hash_bytes
from qmq.format.layout import ORDER_SLOTS
from qmq.net.client.producer.receipts import OrderedSpan, StoredSpan
from qmq.net.client.producer.run import LaneRun

_Indexes = npt.NDArray[np.int64]
_SLOTS: Final = np.uint64(ORDER_SLOTS)
_NO_INDEXES: Final = np.zeros(0, np.int64)
#: Up to this many messages a run is sorted without numpy.
_FEW: Final = 16


class OrderedRun(LaneRun):
    """Messages of one subject with order keys. When it is built, it becomes a run for each slot, and ``order`` says
    which message is where in the batch: it holds indexes of messages.
    """

    __slots__ = ("counts", "lanes", "noted", "number", "order")

    def __init__(self, name: tuple[str, int]) -> None:
        super().__init__(name)
        self.order: _Indexes = _NO_INDEXES
        #: Which one of its batch's ordered runs it is, and of how many of its messages the batch has noted the keys.
        self.number = self.noted = 0
        #: The lane of each run, and its count of messages.
        self.lanes: list[int] = []
        self.counts: list[int] = []

    def by_slot(self) -> tuple[list[bytes], list[AnyHeader]]:
        """Return bodies and headers slot by slot, in each slot as they came; ``order``, ``lanes`` and ``counts`` say
        how.
        """
        assert self.headers is not None
        headers = [header.encode() if type(header) is str else header for header in self.headers]
        if len(headers) <= _FEW:
            few = list(map(_slot_of, headers))
            indexes = sorted(range(len(few)), key=few.__getitem__)
            self.order = np.array(indexes, np.int64)
            count_of = Counter(few[index] for index in indexes)
            self.lanes, self.counts = [slot | self.lane for slot in count_of], list(count_of.values())
        else:
            slots = _slots_of(headers)
            self.order = np.argsort(slots, kind="stable")
            counts = np.bincount(slots, minlength=ORDER_SLOTS)
            found = np.flatnonzero(counts)
            self.lanes, self.counts = (found | self.lane).tolist(), counts[found].tolist()
            indexes = self.order.tolist()
        if len(headers) == 1:
            return self.bodies, headers
        chosen = itemgetter(*indexes)
        return list(chosen(self.bodies)), list(chosen(headers))

    def span(self, stored: StoredSpan, first_sequences: Sequence[int] | None) -> OrderedSpan:
        """Return all messages, by their indexes; *stored* is the whole run, *first_sequences* those of its runs (None:
        they have none).
        """
        places = self._places()
        if first_sequences is None:
            return OrderedSpan(stored, places + stored.position, None)
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        before: _Indexes = np.repeat(np.array(first_sequences, np.int64) - starts, self.counts)
        return OrderedSpan(stored, places + stored.position, (before + np.arange(len(before)))[places])

    def lengths(self) -> None:
        """Return None: the bodies are built in another order."""
        return

    def key(self, index: int) -> str | None:
        """Return the key of message *index*: a text in the place of a header is its order key."""
        assert self.headers is not None
        return None if type(self.headers[index]) is str else super().key(index)

    def part(self, start: int, stop: int, awaited: Sequence[range]) -> OrderedRun:
        """Return the messages at places [start, stop) of the built run, in which the messages in *awaited* have no
        tickets. Their indexes are their places from *start* on.
        """
        assert self.headers is not None
        part, indexes = OrderedRun((self.subject, self.lane)), self.order[start:stop].tolist()
        part.count = stop - start
        part.headers = [self.headers[index] for index in indexes]
        part.order = np.arange(part.count)
        lanes = np.repeat(self.lanes, self.counts)[start:stop]
        found, counts = np.unique(lanes, return_counts=True)
        part.lanes, part.counts = found.tolist(), counts.tolist()
        tickets = self.all_tickets()
        with_ticket = np.ones(self.count, np.bool_)
        for one in awaited:
            with_ticket[one.start : one.stop] = False
        numbers = np.cumsum(with_ticket) - 1
        for index in indexes:
            if with_ticket[index]:
                part.add_ticket(tickets[int(numbers[index])])
        return part

    def places(self) -> list[int]:
        """Return the place of each message in the built run, by its index."""
        found: list[int] = self._places().tolist()
        return found

    def _places(self) -> _Indexes:
        places = np.empty(len(self.order), np.int64)
        places[self.order] = np.arange(len(self.order))
        return places


def order_key_of(header: MessageHeader) -> str:
    """Return the order key in a header that has one."""
    order_key: str = msgpack.unpackb(header.packed)["o"][0]
    return order_key


def key_of(header: AnyHeader) -> str:
    """Return the order key of a message with one, by its header: a text is its order key."""
    if isinstance(header, MessageHeader):
        return order_key_of(header)
    return header if isinstance(header, str) else header.decode()


def _slots_of(headers: Sequence[Any]) -> _Indexes:
    """Return the slot of each message."""
    if set(map(type, headers)) == {bytes}:
        hashes = np.fromiter(map(hash_bytes, headers), np.uint64, len(headers))
        return (hashes % _SLOTS).astype(np.int64)
    return np.fromiter(map(_slot_of, headers), np.int64, len(headers))


def _slot_of(header: Any) -> int:
    return (header.lane if type(header) is MessageHeader else hash_bytes(header)) % ORDER_SLOTS
