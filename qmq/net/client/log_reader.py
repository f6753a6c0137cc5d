"""A reader of a broker's message log over the wire, without asyncio: archives and Spark use it, one per broker.

It connects again when the connection is lost, and repeats the requests without an answer: a position always means the
same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import msgpack
from crc32c import crc32c

from qmq.errors import BrokerStopping, ConnectionLost, Overloaded, ProtocolError, QmqError
from qmq.net.client.address import Address
from qmq.net.client.blocking import BlockingConnection
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME, FRAME_SIZE, Frame, FrameKind

#: Bytes of one READ_LOG request, and how many of these are in flight.
PIECE_BYTES: Final = 1 << 20
AHEAD: Final = 4
#: A broker that lets a request wait this long, in seconds, counts as dead.
ANSWER_TIMEOUT: Final = 30.0
#: The reader tries this long, in seconds, to reach a broker.
GIVE_UP_AFTER: Final = 60.0
_PAUSE: Final = 0.05
_MAX_PAUSE: Final = 1.0

T = TypeVar("T")


class Span(NamedTuple):
    """A segment: positions [base, end), and whether it is sealed, so never grows."""

    base: int
    end: int
    sealed: bool


class LogReader:
    """Reads one broker's log. One thread uses it, and no fork."""

    def __init__(self, address: Address, give_up_after: float = GIVE_UP_AFTER) -> None:
        self._address = address
        self._give_up_after = give_up_after
        self._connection: BlockingConnection | None = None
        self._store_id = b""

    def close(self) -> None:
        """Close the connection; the next call connects again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def store_id(self) -> bytes:
        """The id of the broker's store. Raises ConnectionLost."""
        return self._store_id or self._surely(lambda: self._store_id)

    @property
    def address(self) -> Address:
        """The address of the broker."""
        return self._address

    def started_us(self) -> int:
        """Return when the broker was started: no two brokers were at the same microsecond. Raises ConnectionLost."""
        meta = frames.pack_meta({"action": "stats", "after": "", "limit": 1})
        answer = self._surely(lambda: self._connected().ask(FrameKind.ADMINISTER, meta=meta))
        started_us = msgpack.unpackb(answer.payload).get("started_us")
        if type(started_us) is not int:
            raise ProtocolError(f"the broker at {self._address} does not say when it was started")
        return started_us

    def segments(self, partition: int, position: int = 0) -> tuple[int, list[Span]]:
        """Return the count of partitions, and the segments of one, from the first that ends behind *position*.

        Raises ConnectionLost, InvalidOption.
        """
        found: list[Span] = []
        while True:
            request = frames.SEGMENTS.pack(found[-1].end if found else position, partition)
            fields = self._surely(lambda: _listed(self._connected().ask(FrameKind.SEGMENTS, request)))  # noqa: B023 (called at once)
            found += [Span(*row) for row in fields["rows"]]
            if not fields["more"] or not fields["rows"]:
                return fields["partitions"], found

    def batches(self, partition: int, start: int, end: int) -> Iterator[memoryview]:
        """Yield INDEX_DTYPE records of the batches that begin at positions [start, end), as the broker sends them.

        Raises ConnectionLost, StorageError.
        """
        after: int | None = start
        while after is not None:
            request = frames.BATCHES.pack(after, end, partition)
            frame = self._surely(lambda: _checked(self._connected().ask(FrameKind.BATCHES, request)))  # noqa: B023 (called at once)
            yield frame.payload
            after = frames.unpack_meta(frame.meta)["after"]

    def read(self, partition: int, position: int, size: int) -> bytes:
        """Return *size* bytes from *position* on, across segments; fewer if the log ends, or begins, in between.

        Raises ConnectionLost, StorageError.
        """
        return self._surely(lambda: self._read(partition, position, size))

    # --- requests ----------------------------------------------------------------------------------------------------

    def _read(self, partition: int, position: int, size: int) -> bytes:
        connection, buffer = self._connected(), bytearray(size)
        todo = [(offset, min(PIECE_BYTES, size - offset)) for offset in range(0, size, PIECE_BYTES)][::-1]
        asked: dict[int, tuple[int, int]] = {}
        end = size
        while todo or asked:
            while todo and len(asked) < AHEAD:
                offset, wanted = todo.pop()
                number = connection.send(FrameKind.READ_LOG, frames.READ_LOG.pack(position + offset, wanted, partition))
                asked[number] = offset, wanted
            number, got = self._receive_bytes(connection, asked, buffer)
            offset, wanted = asked.pop(number)
            if not got:
                end = min(end, offset)
            elif got < wanted:
                todo.append((offset + got, wanted - got))
        return bytes(buffer[:end]) if end < size else bytes(buffer)

    def _receive_bytes(
        self, connection: BlockingConnection, asked: dict[int, tuple[int, int]], buffer: bytearray
    ) -> tuple[int, int]:
        """Receive one answer into *buffer*; return the number of its request, and the count of bytes."""
        size, kind, _, meta_size, number = FRAME.unpack(connection.exactly(FRAME_SIZE))
        left = size - FRAME_SIZE
        if kind == FrameKind.ERROR and meta_size <= left <= frames.MAX_META_BYTES:
            body = connection.exactly(left)
            raise frames.decode_error(Frame(kind, 0, number, body[:meta_size], body[meta_size:]))
        if kind != FrameKind.LOG_BYTES or meta_size or number not in asked or left > asked[number][1]:
            raise ProtocolError(f"the broker at {self._address} answered a read with a frame of kind {kind}")
        offset = asked[number][0]
        connection.fill(memoryview(buffer)[offset : offset + left])
        return number, left

    # --- the connection ----------------------------------------------------------------------------------------------

    def _surely(self, call: Callable[[], T]) -> T:
        """Make a call; repeat it while the broker is out of reach or overloaded. Raises the last error in the end."""
        give_up, pause = time.monotonic() + self._give_up_after, _PAUSE
        while True:
            try:
                self._connected()
                return call()
            except (OSError, ConnectionLost, BrokerStopping, Overloaded) as error:
                self.close()
                if time.monotonic() > give_up:
                    if isinstance(error, QmqError):
                        raise
                    raise ConnectionLost(f"cannot read from the broker at {self._address}: {error}") from error
            except QmqError:
                self.close()  # answers to other requests may still come
                raise
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    def _connected(self) -> BlockingConnection:
        """Return the connection; make it if there is none. Raises OSError and QmqError."""
        if self._connection is None:
            self._connection = BlockingConnection(self._address, "qmq history", ANSWER_TIMEOUT)
            store_id = self._connection.welcome.get("store_id")
            if type(store_id) is not bytes or (self._store_id and store_id != self._store_id):
                raise ProtocolError(
                    f"the broker at {self._address} serves another store than before; list its segments again"
                )
            self._store_id = store_id
        return self._connection


def _checked(frame: Frame) -> Frame:
    """Return an answer whose payload fits its checksum. Raises ConnectionLost, as the request can be repeated."""
    if frames.unpack_meta(frame.meta).get("crc") != crc32c(frame.payload):
        raise ConnectionLost("an answer about the log was damaged on the way")
    return frame


def _listed(frame: Frame) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(_checked(frame).payload)
    return fields
