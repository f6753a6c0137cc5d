"""A broker's frames into a client: its answers, changed at will, as a bad network or broker might."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from crc32c import crc32c

from fuzz.answers import read_to_the_end
from fuzz.batches import TEMPLATES
from fuzz.target import GrowthCheck, Picks
from qmq.errors import ProtocolError, QmqError
from qmq.format.pieces import piece_of_run, read_single
from qmq.format.run import Envelopes, Run
from qmq.net.client.connection import Answer, BrokerConnection
from qmq.net.client.consumer.corrupt_reads import read_checked
from qmq.net.client.consumer.in_flight import FailedAttempt, InFlightWindow, PendingDisposition
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME, FRAME_SIZE, FrameKind
from qmq.net.protocol.messages import encode_messages
from qmq.net.protocol.types import ConsumerState
from tests.format.contents import stored

_STATE: Final = ConsumerState(1, 1, 10, 10, 1, 1)
_BATCHES: Final = tuple(stored(runs) for runs in TEMPLATES)
_PULLS: Final = 3
_COUNTS: Final = struct.Struct("<HH")
#: Bytes that a changed size may make a client reserve for a frame.
_MAX_FRAME_BYTES: Final = 1 << 20


class _Transport(asyncio.Transport):
    """Drops what is written."""

    def __init__(self, protocol: BrokerConnection) -> None:
        super().__init__()
        self._protocol = protocol
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        assert len(data) >= FRAME_SIZE

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: nothing is kept."""

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            self._protocol.connection_lost(None)


class _Consumer:
    """Takes answers as a puller does, and acks the messages; the owner of the connection and of the window, too."""

    loop: Any = None
    has_left = False
    hands_over = False
    failures: Any = None

    def __init__(self) -> None:
        self.refused = 0
        self.answered = 0
        self.in_flight = InFlightWindow(self, _STATE)
        self.acks = dict[int, list[int]]()  # by request

    def take(self, answer: Answer | QmqError) -> None:
        self.answered += 1
        if isinstance(answer, QmqError):
            return
        single = read_single(answer.payload) if answer.begun is None else None
        runs, damaged = read_checked(answer.payload, answer.begun)
        if single is not None:
            assert not damaged
            assert [shown(run) for run in runs] == [shown(single)]
        if damaged:
            return
        try:
            runs = self.in_flight.number(runs, answer.head.ranges)
        except ProtocolError:
            return
        for run in runs:
            read_to_the_end(run)
            assert run.delivery_sequence + run.count <= self.in_flight.expected
            self.in_flight.ack(run.delivery_sequence, run.delivery_sequence + run.count)

    def acked(self, intervals: list[int], answer: Answer | QmqError) -> None:
        self.answered += 1
        if isinstance(answer, Answer) and len(answer.payload) == frames.ACKED.size:
            self.in_flight.confirm(intervals, 0)

    def other(self, answer: Answer | QmqError) -> None:
        self.answered += 1

    # --- called by the window and the connection ---------------------------------------------------------------------

    def want_send(self) -> None:
        """Do nothing: the target sends."""

    def hand_back(self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition]) -> Awaitable[object]:
        raise AssertionError

    def hand_back_soon(self, in_flight: InFlightWindow, back: PendingDisposition) -> None:
        raise AssertionError

    def release(self, run: Envelopes, start: int, end: int, delay_us: int | None) -> None:
        raise AssertionError

    def cancelled(
        self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition], fail: Callable[[], FailedAttempt]
    ) -> None:
        raise AssertionError

    def call_from_thread(self, dispose: Callable[[], object]) -> bool:
        raise AssertionError

    def return_early(self, in_flight: InFlightWindow, start: int, end: int) -> None:
        raise AssertionError

    async def confirm(self, in_flight: InFlightWindow, start: int, end: int, *, acked: bool = True) -> None:
        raise AssertionError

    def dropped(self, in_flight: InFlightWindow, sequence_ranges: list[tuple[int, int]]) -> None:
        """Do nothing: an answer that was refused drops its messages."""

    def late(self, call: str, shown: object) -> None:
        raise AssertionError

    def batch_stored(
        self,
        request: int,
        position: int,
        stored_at_us: int,
        partition: int,
        store_id: bytes,
        firsts: Sequence[int],
        duplicates: bytes = b"",
    ) -> None:
        assert len(store_id) == 6

    def batch_refused(self, request: int, error: QmqError) -> None:
        assert isinstance(error, QmqError)

    def writable(self) -> None:
        raise AssertionError

    def lost(self, connection: BrokerConnection, error: QmqError) -> None:
        assert isinstance(error, QmqError)


def shown(run: Run) -> tuple[object, ...]:
    """All of a run that is read twice."""
    return run.origin, run.subject, run.count, run.lane, run.run_flags, run.first_sequence, run.ordinal, run.bodies()


class Clients:
    """One connection an input: each request is answered or fails once, and nothing raises into the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def once(self, data: bytes) -> int:
        picks = Picks(data)
        with GrowthCheck():
            return self._dialogue(picks)

    def _dialogue(self, picks: Picks) -> int:
        consumer = _Consumer()
        connection = BrokerConnection(consumer, "broker:1", self._loop)
        transport = _Transport(connection)
        connection.connection_made(transport)
        connection._max_frame_bytes = _MAX_FRAME_BYTES
        asked = 1
        other = connection.ask(FrameKind.SUBSCRIBE, consumer.other)
        pulls, acks, count = list[int](), list[int](), 0
        while picks.left and not transport.aborted:
            while len(pulls) < _PULLS:
                pulls.append(connection.ask(FrameKind.PULL, consumer.take))
                asked += 1
            if intervals := consumer.in_flight.take_acks():
                acks.append(
                    connection.ask(FrameKind.ACK, partial(consumer.acked, intervals), joins=bool(picks.number(1) & 1))
                )
                asked += 1
            open_acks = [request for request in acks if request in connection._asked]
            frame = self._frame(picks, consumer, pulls[0], open_acks, other)
            self._receive(connection, transport, frame, picks)
            pulls = [request for request in pulls if request in connection._asked]
            count += 1
        transport.abort()
        assert consumer.answered == asked, "each request is answered once"
        return max(count, 1)

    def _frame(self, picks: Picks, consumer: _Consumer, pull: int, acks: list[int], other: int) -> bytes:
        """A frame that a broker may send, or one that is changed."""
        kind, how = picks.number(1) & 7, picks.number(1)
        if kind < 5:
            frame = self._messages(picks, consumer, pull, acks)
        elif kind == 5 and acks:
            payload = frames.ACKED.pack(picks.number(1))
            frame = bytearray(frames.encode_frame(FrameKind.ACKED, acks[0], b"", len(payload)) + payload)
        elif kind == 6:
            runs = picks.number(1) & 3
            payload = frames.SENT.pack(picks.number(8), picks.number(8), picks.number(2), b"store1", runs)
            payload += picks.take(8 * runs).ljust(8 * runs, b"\1")
            frame = bytearray(frames.encode_frame(FrameKind.SENT, 2, b"", len(payload)) + payload)
        else:
            meta = picks.take(picks.number(1) & 31)
            answer = FrameKind.ERROR if how & 16 else FrameKind.SUBSCRIBED
            frame = bytearray(frames.encode_frame(answer, other if how & 32 else pull, meta))
        if how & 1:
            picks.edit(memoryview(frame))
        if how & 2:
            _seal(frame)
        if how & 4:
            frame[:0] = picks.take(picks.number(1) & 31)
        return bytes(frame)

    def _messages(self, picks: Picks, consumer: _Consumer, pull: int, acks: list[int]) -> bytearray:
        number, how = picks.below(len(_BATCHES)), picks.number(1)
        payload, contents = bytes(_BATCHES[number]), TEMPLATES[number]
        count = sum(map(len, contents))
        if how & 1:
            run = picks.below(len(contents))
            start = picks.below(len(contents[run]))
            payload, count = b"".join(piece_of_run(_BATCHES[number], run, start, None)[0]), len(contents[run]) - start
        if how & 8:
            payload, count = 2 * payload, 2 * count
        first = consumer.in_flight.expected + (picks.number(1) & 3 if how & 2 else 0)
        ranges = [(first, count, 1)]
        if how & 4 and count > 1:
            ranges = [(first, 1, 1), (first + 1 + (picks.number(1) & 3), count - 1, 2)]
        tags = ("vip", "new")[: how >> 6]
        left_us = picks.number(8) if how & 16 else None
        return bytearray(encode_messages(pull, len(payload), ranges, acks[: how >> 5 & 1], left_us, tags) + payload)

    def _receive(self, connection: BrokerConnection, transport: _Transport, data: bytes, picks: Picks) -> None:
        """Receive bytes as from a transport, in parts."""
        while data and not transport.aborted:
            buffer = connection.get_buffer(-1)
            size = min(len(buffer), len(data), 1 + picks.number(1) if picks.number(1) & 1 else 1 << 20)
            buffer[:size] = data[:size]
            connection.buffer_updated(size)
            data = data[size:]

    def seeds(self) -> list[bytes]:
        plain = [bytes([0, 0, number, 0, how, *[0] * 4]) for number in range(len(_BATCHES)) for how in (0, 1, 2, 4, 8)]
        changed = [bytes([1, how, number, 0, 32, 4, 3, 0, 20, 0, 4, 0]) * 3 for number in range(4) for how in (1, 3, 4)]
        others = [bytes([kind, how, *range(40)]) for kind in (5, 6, 7) for how in (0, 1, 16, 48)]
        return [seed * times for seed in plain + others for times in (1, 4)] + changed

    def close(self) -> None:
        self._loop.close()


def _seal(frame: bytearray) -> None:
    """Make the checksum of the head of MESSAGES fit, where the sizes allow it."""
    size, kind, _, meta_size, _ = FRAME.unpack_from(frame)
    end = FRAME_SIZE + meta_size
    if kind == FrameKind.MESSAGES and FRAME_SIZE + 4 + _COUNTS.size <= end <= len(frame) and size >= end:
        struct.pack_into("<I", frame, FRAME_SIZE, crc32c(frame[FRAME_SIZE + 4 : end]))
