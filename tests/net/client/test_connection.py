"""One connection of a client: frames in and out of a transport that the test holds."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import ConnectionLost, Overloaded, ProtocolError, QmqError, StorageFull, UnsupportedVersion
from qmq.net.client.connection import SMALL_BYTES, WRITE_HIGH_BYTES, Answer, BrokerConnection
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME_SIZE, Frame, FrameKind
from qmq.net.protocol.messages import EMPTY_HEAD, MessagesHead, encode_messages
from tests.net.scripted import STORE, WELCOME, scripted_broker, stored_batch

#: The number of a connection's first request.
FIRST: Final = 3


class Owner:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

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
        self.told.append(("stored", request, position, stored_at_us, partition, store_id, tuple(firsts)))

    def batch_refused(self, request: int, error: QmqError) -> None:
        self.told.append(("refused", request, type(error)))

    def writable(self) -> None:
        self.told.append("writable")

    def lost(self, connection: BrokerConnection, error: QmqError) -> None:
        self.told.append(("lost", error))


class HeldTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self, protocol: BrokerConnection) -> None:
        super().__init__()
        self._protocol = protocol
        self.written = b""
        self.writes = 0
        self.limits: tuple[int | None, int | None] = (None, None)
        self.closed = self.aborted = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += data
        self.writes += 1

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits = (high, low)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            self._protocol.connection_lost(None)

    def frames(self) -> list[Frame]:
        """Return the bytes written since the last call."""
        written, self.written = memoryview(self.written), b""
        return list(frames.split_frames(written, 1 << 30))


class Held:
    """A connection on a HeldTransport."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.loop = asyncio.new_event_loop()
        self.connection = BrokerConnection(self.owner, "broker:1", self.loop)
        self.transport = HeldTransport(self.connection)
        self.connection.connection_made(self.transport)
        self.answers: list[Answer | QmqError] = []

    def ask(self, kind: FrameKind = FrameKind.PULL) -> int:
        return self.connection.ask(kind, self.answers.append)

    def receive(self, data: bytes, chunk: int = 1 << 30) -> None:
        """Receive bytes as from a transport: as many as fit, at most *chunk*."""
        while data and not self.transport.aborted:
            buffer = self.connection.get_buffer(-1)
            assert len(buffer) > 0
            size = min(len(buffer), len(data), chunk)
            buffer[:size] = data[:size]
            self.connection.buffer_updated(size)
            data = data[size:]


@pytest.fixture
def held() -> Any:
    made = Held()
    yield made
    made.loop.close()


def answer(kind: FrameKind, request: int, payload: bytes = b"", meta: dict[str, Any] | None = None) -> bytes:
    if kind == FrameKind.MESSAGES:
        return encode_messages(request, len(payload)) + payload
    packed = frames.pack_meta(meta) if meta else b""
    return frames.encode_frame(kind, request, packed, len(payload)) + payload


def test_requests_are_numbered_and_answered_by_number(held: Held) -> None:
    first, second = held.ask(FrameKind.PULL), held.ask(FrameKind.SUBSCRIBE)
    assert [(frame.kind, frame.request) for frame in held.transport.frames()] == [
        (FrameKind.PULL, first),
        (FrameKind.SUBSCRIBE, second),
    ]
    held.receive(
        answer(FrameKind.SUBSCRIBED, second, meta={"subscription": 3}) + answer(FrameKind.MESSAGES, first, b"abc")
    )
    assert held.answers == [
        (FrameKind.SUBSCRIBED, {"subscription": 3}, b"", None, EMPTY_HEAD, 0.0),
        (FrameKind.MESSAGES, {}, b"abc", None, EMPTY_HEAD, 0.0),
    ]


def test_an_answer_with_messages_may_answer_acknowledgements_too(held: Held) -> None:
    acks, pull = [held.ask(FrameKind.ACK), held.ask(FrameKind.ACK)], held.ask(FrameKind.PULL)
    held.receive(encode_messages(pull, 3, acked=acks) + b"abc")
    none_refused = (FrameKind.ACKED, {}, frames.ACKED.pack(0), None, EMPTY_HEAD, 0.0)
    head = MessagesHead(acked=tuple(acks))
    assert held.answers == [none_refused, none_refused, (FrameKind.MESSAGES, {}, b"abc", None, head, 0.0)]


@pytest.mark.parametrize("named", [lambda acks, pull: [pull], lambda acks, pull: [99], lambda acks, pull: acks + acks])
def test_one_that_names_no_open_acknowledgement_ends_the_connection(held: Held, named: Any) -> None:
    acks, pull = [held.ask(FrameKind.ACK)], held.ask(FrameKind.PULL)
    held.receive(encode_messages(pull, 3, acked=named(acks, pull)) + b"abc")
    assert held.transport.aborted
    assert type(held.answers[-1]) is ProtocolError
    assert not any(isinstance(told, Answer) and told.kind == FrameKind.MESSAGES for told in held.answers)


def test_a_request_that_joins_leaves_in_one_write_with_the_next(held: Held) -> None:
    ack = held.connection.ask(FrameKind.ACK, held.answers.append, joins=True)
    assert held.transport.frames() == []
    pull = held.ask()
    assert held.transport.writes == 1
    assert [frame.request for frame in held.transport.frames()] == [ack, pull]


@given(st.lists(st.integers(0, 3 * SMALL_BYTES), max_size=8), st.sampled_from([7, 1_000, 40_000, 1 << 30]))
def test_answers_of_any_size_come_whole_in_any_pieces(sizes: list[int], chunk: int) -> None:
    held = Held()
    held.connection._max_frame_bytes = 1 << 20
    payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
    data = b"".join(answer(FrameKind.MESSAGES, held.ask(), payload) for payload in payloads)
    held.receive(data, max(chunk, len(data) // 2_000))
    assert [bytes(reply.payload) for reply in held.answers if isinstance(reply, Answer)] == payloads
    held.loop.close()


def test_payloads_outlive_the_buffer_they_came_in(held: Held) -> None:
    held.receive(answer(FrameKind.MESSAGES, held.ask(), b"first"))
    held.receive(answer(FrameKind.MESSAGES, held.ask(), b"other"))
    (first, other) = held.answers
    assert isinstance(first, Answer)
    assert isinstance(other, Answer)
    assert (first.payload, other.payload) == (b"first", b"other")


def test_a_large_answer_is_received_into_a_buffer_of_its_size(held: Held) -> None:
    held.connection._max_frame_bytes = 16 << 20
    size = 5 << 20
    held.receive(encode_messages(held.ask(), size))
    assert len(held.connection.get_buffer(-1)) == size
    held.receive(bytes(size))
    assert len(held.connection.get_buffer(-1)) > SMALL_BYTES
    (reply,) = held.answers
    assert isinstance(reply, Answer)
    assert len(reply.payload) == size


def test_a_large_answer_to_a_pull_is_read_while_it_comes(held: Held) -> None:
    """A batch that was good when it came is not looked at again."""
    held.connection._max_frame_bytes = 16 << 20
    batches = [stored_batch({"a": [b"x" * SMALL_BYTES] * 2}, position=at) for at in (1 << 20, 2 << 20)]
    frame = answer(FrameKind.MESSAGES, held.ask(), b"".join(batches))
    held.receive(frame[: -len(batches[1])], 40_000)
    held.connection.get_buffer(-1)[-1:] = b"?"  # bytes that have not come are not read
    assert held.connection._large is not None
    held.connection._large[len(frame) - len(batches[1]) - 1] ^= 1
    held.receive(frame[-len(batches[1]) :], 40_000)
    (reply,) = held.answers
    assert isinstance(reply, Answer)
    assert reply.begun is not None
    runs, damaged = reply.begun.all()
    assert ([run.count for run in runs], damaged) == ([2, 2], [])


@pytest.mark.parametrize("chunk", [5, 1 << 30])
def test_batches_and_their_answers_go_to_the_owner(held: Held, chunk: int) -> None:
    for size, flush in ((10, True), (SMALL_BYTES * 2, False)):
        request = held.connection.next_request()
        held.connection.send_batch(request, [b"h" * 5, b"d" * size], flush)
        (frame,) = held.transport.frames()
        assert (frame.kind, frame.flags, frame.request) == (FrameKind.SEND, frames.FLUSH if flush else 0, request)
        assert frame.payload == b"h" * 5 + b"d" * size
        for firsts in ((5,), (), (5, 2**64 - 1)):
            sent = frames.SENT.pack(4_096, 77, 3, STORE, len(firsts)) + struct.pack(f"<{len(firsts)}Q", *firsts)
            held.receive(answer(FrameKind.SENT, request, sent), chunk)
            assert held.owner.told.pop() == ("stored", request, 4_096, 77, 3, STORE, firsts)
    held.receive(frames.encode_error(9, StorageFull("full")))
    assert held.owner.told == [("refused", 9, StorageFull)]


def test_a_request_that_is_refused_gets_the_error(held: Held) -> None:
    held.receive(frames.encode_error(held.ask(), Overloaded("too many pulls")))
    (error,) = held.answers
    assert type(error) is Overloaded
    assert held.owner.told == []


def test_an_error_of_the_connection_ends_it_with_that_error(held: Held) -> None:
    held.ask()
    held.receive(frames.encode_error(0, ProtocolError("nonsense")))
    assert held.transport.aborted
    assert [str(error) for error in held.answers] == ["nonsense"]
    ((what, error),) = held.owner.told
    assert (what, type(error)) == ("lost", ProtocolError)


@pytest.mark.parametrize(
    "nonsense",
    [
        answer(FrameKind.MESSAGES, 77),
        answer(FrameKind.SUBSCRIBED, FIRST),
        b"\xff" * 16,
        frames.FRAME.pack(8, FrameKind.MESSAGES, 0, 0, FIRST),
        frames.FRAME.pack(1 << 20, FrameKind.MESSAGES, 0, 0, FIRST),
        frames.FRAME.pack(20, FrameKind.MESSAGES, 0, 4, FIRST) + b"\xc1\xc1\xc1\xc1",
        frames.FRAME.pack(20, FrameKind.ERROR, 0, 4, FIRST) + b"\xc1\xc1\xc1\xc1",
        answer(FrameKind.SENT, FIRST, b"where"),
        answer(FrameKind.SENT, FIRST, frames.SENT.pack(0, 0, 0, STORE, 2) + bytes(8)),
    ],
)
def test_nonsense_ends_the_connection(held: Held, nonsense: bytes) -> None:
    assert held.ask() == FIRST
    held.receive(nonsense)
    assert held.transport.aborted
    ((_, error),) = held.owner.told
    assert type(error) is ProtocolError
    assert held.answers == [error]


def test_no_flipped_bit_of_a_header_answers_another_request() -> None:
    """Each bit of the 16 bytes before an answer, while many requests of its kind are open."""
    outcomes = Counter[str]()
    for bit in range(8 * FRAME_SIZE):
        held = Held()
        others = list[Answer | QmqError]()
        for _ in range(20):
            held.connection.ask(FrameKind.PULL, others.append)
        request = held.ask()
        for _ in range(20):
            held.connection.ask(FrameKind.PULL, others.append)
        frame = bytearray(answer(FrameKind.MESSAGES, request, b"QMQB" * 100))
        frame[bit // 8] ^= 1 << bit % 8
        held.receive(bytes(frame))
        assert not any(isinstance(other, Answer) for other in others)
        if held.answers and isinstance(got := held.answers[0], Answer):
            is_whole = got.payload == b"QMQB" * 100
            outcomes["whole" if is_whole else "cut"] += 1
            assert is_whole or (len(got.payload) < 400 and held.transport.aborted)
        else:
            outcomes["ended" if held.transport.aborted else "waits for more"] += 1
        if held.transport.aborted:
            assert len(others) == 40
            assert len(held.answers) == 1
        held.loop.close()
    print(dict(outcomes))
    assert set(outcomes) == {"whole", "cut", "ended", "waits for more"}
    assert outcomes["whole"] == 8  # flags, which answers do not have


@given(st.binary(max_size=300))
def test_no_bytes_raise_into_the_loop(data: bytes) -> None:
    held = Held()
    held.ask()
    held.receive(data)
    held.loop.close()


def test_a_lost_connection_tells_everybody(held: Held) -> None:
    held.ask()
    held.connection.connection_lost(ConnectionResetError("reset by peer"))
    assert held.connection.closed
    (error,) = held.answers
    assert type(error) is ConnectionLost
    assert "reset by peer" in str(error)
    held.ask()
    held.loop.call_soon(held.loop.stop)
    held.loop.run_forever()
    assert len(held.answers) == 2


def test_writing_pauses_and_goes_on(held: Held) -> None:
    assert held.transport.limits[0] == WRITE_HIGH_BYTES
    held.connection.pause_writing()
    assert not held.connection.writable
    held.connection.resume_writing()
    assert held.connection.writable
    assert held.owner.told == ["writable"]


def test_an_answer_can_be_overdue(held: Held) -> None:
    held.connection.ask(FrameKind.PULL, held.answers.append, due=5.0)
    held.ask()
    assert not held.connection.is_overdue(5.0)
    assert held.connection.is_overdue(5.1)


async def test_a_request_is_overdue_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.net.client.connection.ANSWER_TIMEOUT", 5.0)
    async with scripted_broker() as broker:
        loop = asyncio.get_running_loop()
        connection = BrokerConnection(Owner(), "broker", loop)
        await loop.create_connection(lambda: connection, "127.0.0.1", int(broker.url.rpartition(":")[2]))
        asking = asyncio.ensure_future(connection.request(FrameKind.SUBJECTS, {"prefix": ""}))
        await asyncio.sleep(0)
        assert not connection.is_overdue(loop.time())
        assert connection.is_overdue(loop.time() + 5.1)
        connection.abort(ConnectionLost("given up"))
        with pytest.raises(ConnectionLost, match="given up"):
            await asking


async def test_closing_does_not_wait_for_a_broker_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.net.client.connection.CLOSE_TIMEOUT", 0.01)
    async with scripted_broker() as broker:
        loop = asyncio.get_running_loop()
        owner = Owner()
        connection = BrokerConnection(owner, "broker", loop)
        await connection.wait_closed()  # never opened
        await loop.create_connection(lambda: connection, "127.0.0.1", int(broker.url.rpartition(":")[2]))
        await connection.hello("test")
        peer = await broker.peer()
        peer.transport.pause_reading()
        connection.send_batch(2, [bytes(64 << 20)], False)
        connection.close()
        await connection.wait_closed()
        await asyncio.sleep(0)
        assert [what for what, _ in owner.told if what == "lost"] == ["lost"]
        await connection.wait_closed()


async def test_hello_returns_the_welcome() -> None:
    async with scripted_broker(max_message_bytes=77) as broker:
        loop = asyncio.get_running_loop()
        connection = BrokerConnection(Owner(), "broker", loop)
        host, port = "127.0.0.1", int(broker.url.rpartition(":")[2])
        await loop.create_connection(lambda: connection, host, port)
        welcome = await connection.hello("qmq-python/test")
        peer = await broker.peer()
        assert peer.hello == {"protocol": frames.PROTOCOL_VERSION, "client": "qmq-python/test"}
        assert (welcome.store_id, welcome.max_message_bytes) == (STORE, 77)
        connection.close()
        await peer.gone()


@pytest.mark.parametrize("missing", sorted(WELCOME.keys() - {"protocol"}))
async def test_a_welcome_that_does_not_say_all_is_refused(missing: str) -> None:
    async with scripted_broker() as broker:
        del broker.welcome[missing]
        loop = asyncio.get_running_loop()
        connection = BrokerConnection(Owner(), "broker", loop)
        await loop.create_connection(lambda: connection, "127.0.0.1", int(broker.url.rpartition(":")[2]))
        with pytest.raises(ProtocolError, match=missing):
            await connection.hello("test")
        connection.abort(ConnectionLost("test over"))


@pytest.mark.parametrize("wrong", [{"store_id": "text"}, {"producer_window": "many"}, {"max_pull_bytes": None}])
async def test_a_welcome_of_other_types_is_refused(wrong: dict[str, Any]) -> None:
    async with scripted_broker(**wrong) as broker:
        loop = asyncio.get_running_loop()
        connection = BrokerConnection(Owner(), "broker", loop)
        await loop.create_connection(lambda: connection, "127.0.0.1", int(broker.url.rpartition(":")[2]))
        with pytest.raises(ProtocolError, match="WELCOME"):
            await connection.hello("test")
        connection.abort(ConnectionLost("test over"))


async def test_a_refused_hello_is_raised() -> None:
    async with scripted_broker() as broker:
        broker.refusal = UnsupportedVersion("speak version 2")
        loop = asyncio.get_running_loop()
        connection = BrokerConnection(Owner(), "broker", loop)
        await loop.create_connection(lambda: connection, "127.0.0.1", int(broker.url.rpartition(":")[2]))
        with pytest.raises(UnsupportedVersion, match="speak version 2"):
            await connection.hello("test")
        connection.abort(ConnectionLost("test over"))
