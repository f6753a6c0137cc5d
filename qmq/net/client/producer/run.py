"""The messages of one subject, and of one lane of it, in a batch that a client sends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import msgpack
import numpy as np
import numpy.typing as npt

from qmq.format.build import NO_HEADER, AnyHeader, MessageHeader
from qmq.format.lanes import kind_of
from qmq.format.layout import LANE_NORMAL

#: The sizes of bodies: little-endian u32.
Sizes = npt.NDArray[np.uint32]
#: The key of a run in a batch: the subject, and the lane unless it is the normal one; for slots, their kind.
RunName = str | tuple[str, int]


def name_of(subject: str, lane: int) -> RunName:
    """Return the name of the run for messages of a lane."""
    if lane == LANE_NORMAL:
        return subject
    return subject, kind_of(lane)


class OutgoingRun:
    """The messages of one subject in a batch, without priorities and order keys.

    ``tickets`` are those of the messages without a waiter, in order. It is None while there are fewer than two: one
    object less for the garbage collector.
    """

    __slots__ = ("bodies", "count", "first_ticket", "headers", "sizes", "subject", "tickets")
    lane: int = LANE_NORMAL

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.bodies: list[bytes] = []
        self.headers: list[AnyHeader] | None = None
        self.first_ticket = 0
        self.tickets: list[int] | None = None
        self.sizes: list[Sizes] | None = None  # sizes of the bodies that came from send_many
        self.count = 0  # set when the batch is built

    def append(self, body: bytes, header: MessageHeader) -> None:
        """Add a message."""
        if self.headers is not None:
            self.headers.append(header)
        elif header is not NO_HEADER:
            self.headers = [*repeat(NO_HEADER, len(self.bodies)), header]
        self.bodies.append(body)

    def extend(
        self,
        bodies: Sequence[bytes],
        header: MessageHeader = NO_HEADER,
        sizes: Sizes | None = None,
        headers: Sequence[AnyHeader] | None = None,
    ) -> int:
        """Add messages with the same header, or each with its own of *headers*; return the index of the first. *sizes*:
        those of the bodies, if known.
        """
        index = len(self.bodies)
        if self.headers is None and (headers is not None or header is not NO_HEADER):
            self.headers = [NO_HEADER] * index
        if self.headers is not None:
            self.headers += [header] * len(bodies) if headers is None else headers
        self.bodies += bodies
        if sizes is not None:
            if self.sizes is None:
                self.sizes = []
            self.sizes.append(sizes)
        return index

    def lengths(self) -> bytes | None:
        """Return the sizes of the bodies as little-endian u32; None if unknown."""
        if self.sizes is None or sum(map(len, self.sizes)) != len(self.bodies):
            return None
        return np.concatenate(self.sizes).tobytes()

    def add_ticket(self, ticket: int) -> None:
        """Give the last message, which has no waiter, a ticket."""
        if self.tickets is not None:
            self.tickets.append(ticket)
        elif self.first_ticket:
            self.tickets = [self.first_ticket, ticket]
        else:
            self.first_ticket = ticket

    def all_tickets(self) -> list[int]:
        """Return all tickets."""
        if self.tickets is not None:
            return self.tickets
        return [self.first_ticket] if self.first_ticket else []

    def empty(self) -> OutgoingRun:
        """Return a run for messages of the same subject and lane."""
        return OutgoingRun(self.subject)

    def part(self, start: int, stop: int, awaited: Sequence[range]) -> OutgoingRun:
        """Return messages [start, stop) of a built run, in which the messages in *awaited* have no tickets."""
        part = self.empty()
        part.count = stop - start
        part.headers = None if self.headers is None else self.headers[start:stop]
        before, within = (
            end - first - sum(max(0, min(end, one.stop) - max(first, one.start)) for one in awaited)
            for first, end in ((0, start), (start, stop))
        )
        for ticket in self.all_tickets()[before : before + within]:
            part.add_ticket(ticket)
        return part

    def key(self, index: int) -> str | None:
        """Return the key of message *index*."""
        header = NO_HEADER if self.headers is None else self.headers[index]
        if type(header) is str:
            return header
        if type(header) is not MessageHeader:
            return None  # an order key
        packed = header.packed
        return msgpack.unpackb(packed).get("k", (None,))[0] if packed else None


def _own_header(header: MessageHeader) -> MessageHeader:
    """Return the header, NO_HEADER where it says nothing but the lane, which is that of the run."""
    return header if header.packed or header.deliver_at or header.expire_at else NO_HEADER


class LaneRun(OutgoingRun):
    """The messages of one subject and priority."""

    __slots__ = ("lane",)

    def __init__(self, name: tuple[str, int]) -> None:
        super().__init__(name[0])
        self.lane = name[1]

    def append(self, body: bytes, header: MessageHeader) -> None:
        """Add a message."""
        super().append(body, _own_header(header))

    def extend(
        self,
        bodies: Sequence[bytes],
        header: MessageHeader = NO_HEADER,
        sizes: Sizes | None = None,
        headers: Sequence[AnyHeader] | None = None,
    ) -> int:
        """As OutgoingRun.extend."""
        return super().extend(bodies, _own_header(header), sizes, headers)

    def empty(self) -> LaneRun:
        return LaneRun((self.subject, self.lane))
