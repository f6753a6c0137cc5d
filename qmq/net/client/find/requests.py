"""The requests GET and FIND to one broker, and their answers."""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

from qmq.errors import BadBytes, ProtocolError, QmqError, StorageError
from qmq.format.ids import MessageId
from qmq.format.layout import DELAY_PARTITION, MESSAGE_ID
from qmq.format.pieces import read_answer
from qmq.format.run import Run
from qmq.net.client.backoff import Backoff
from qmq.net.client.broker_link import Link
from qmq.net.client.connection import Answer, timeout_while_still
from qmq.net.client.find.stored_message import StoredMessage, stored_message
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.selection import Boundary, Selection

#: upto_us, looked, left, unreadable; then perhaps the two numbers of a boundary.
_NUMBERS: Final = 4


class FoundPage(NamedTuple):
    """One answer to a search: verified runs in the order of the store, and where the search goes on (None: done)."""

    runs: list[Run]
    after: Boundary | None
    upto_us: int
    looked: int
    left: int
    unreadable: int


async def ask(
    link: Link, timeout: float, kind: FrameKind, meta: dict[str, Any] | None = None, payload: bytes = b""
) -> Answer:
    """Send a request and return its answer; repeat it where the connection was lost or the broker is overloaded.

    Raises TimeoutError after *timeout* seconds in which no bytes moved, and errors of the broker, also of its disk, at
    once.
    """
    backoff: Backoff | None = None
    async with timeout_while_still(timeout, link.moved_at):
        while True:
            connection = await link.connected()
            try:
                return await connection.request(kind, meta, payload)
            except QmqError as error:
                if not error.retryable or isinstance(error, StorageError):
                    raise
            backoff = backoff or Backoff()
            await asyncio.sleep(backoff.next_delay())


class BrokerSource:
    """The store of one broker, as a search reads it."""

    def __init__(self, link: Link, timeout: float, reach_timeout: float | None = None) -> None:
        """The broker has *timeout* seconds for each answer, and *reach_timeout* (None: as many) to be connected."""
        self._link = link
        self._timeout = timeout
        self._reach_timeout = timeout if reach_timeout is None else reach_timeout
        self.name = str(link.address)

    async def store_id(self) -> bytes:
        """Return the id of the store. Raises TimeoutError if the broker cannot be reached."""
        async with asyncio.timeout(self._reach_timeout):
            await self._link.connected()
        return self._link.store_id

    async def page(
        self, selection: Selection, newest: bool, after: Boundary | None, upto_us: int | None, max_count: int
    ) -> FoundPage:
        """Return the next messages of a search. Raises StorageError, TimeoutError."""
        return await find_page(self._link, self._timeout, selection, newest, after, upto_us, max_count)


async def get_message(link: Link, timeout: float, message_id: MessageId) -> StoredMessage:
    """Return the message with an id of the broker's store. Raises UnknownMessage, StorageError, TimeoutError."""
    answer = await ask(link, timeout, FrameKind.GET, payload=MESSAGE_ID.pack(*message_id))
    runs, damaged = read_answer(answer.payload)
    delayed = message_id if message_id.partition >= DELAY_PARTITION else None
    for run in runs:
        index = message_id.position - run.position - run.ordinal
        if 0 <= index < run.count:
            return stored_message(run, index, str(link.address), delayed)
    reason = damaged[0].reason if damaged else "the answer does not have it"
    raise BadBytes(f"message {message_id} cannot be read at {link.address}: {reason}; run qmq verify there")


async def find_page(
    link: Link, timeout: float, selection: Selection, newest: bool, after: Boundary | None, upto_us: int | None,
    max_count: int,
) -> FoundPage:  # fmt: skip
    """Return the next messages of a search. Raises StorageError, TimeoutError."""
    fields = {**selection.packed(), "max_count": max_count}
    if newest:
        fields["newest"] = True
    if after is not None:
        fields["after"] = list(after)
    if upto_us is not None:
        fields["upto_us"] = upto_us
    answer = await ask(link, timeout, FrameKind.FIND, fields)
    numbers = answer.meta.get("numbers")
    if (
        type(numbers) is not list
        or len(numbers) not in (_NUMBERS, _NUMBERS + 2)
        or not all(type(one) is int and one >= 0 for one in numbers)
        or frames.pack_numbers(numbers)[1] != answer.meta.get("crc")
    ):
        raise ProtocolError(f"FOUND of the broker at {link.address} has no numbers that fit their checksum")
    upto, looked, left, unreadable = numbers[:_NUMBERS]
    runs, damaged = read_answer(answer.payload)
    goes_on = Boundary(*numbers[_NUMBERS:]) if len(numbers) > _NUMBERS else None
    return FoundPage(runs, goes_on, upto, looked, left, unreadable + len(damaged))
