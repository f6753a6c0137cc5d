"""However the bytes of many connections arrive, their frames come out whole and stay in place."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.net.protocol.frames import FRAME_SIZE, encode_frame, split_frames
from qmq.net.server.receive_buffer import SMALL_BYTES, PartialFrame, ReceiveBuffer

SIZE = 1 << 20
LIMIT = 4 << 20


@dataclass
class Peer:
    """A connection: the bytes to send, and those received."""

    stream: bytes
    partial_frame: PartialFrame = field(default_factory=PartialFrame)
    sent: int = 0
    got: list[bytes] = field(default_factory=list)

    def receive(self, receive_buffer: ReceiveBuffer, most: int) -> list[tuple[memoryview, bytes]]:
        """Receive at most *most* bytes once; return the new payloads as views, and as bytes."""
        room = receive_buffer.room(self.partial_frame)
        count = min(most, len(room), len(self.stream) - self.sent)
        room[:count] = self.stream[self.sent : self.sent + count]
        self.sent += count
        view = receive_buffer.received(self.partial_frame, count)
        if view is None:
            return []
        fresh = [(frame.payload, bytes(frame.payload)) for frame in split_frames(view, LIMIT)]
        receive_buffer.consume(self.partial_frame, sum(FRAME_SIZE + len(payload) for payload, _ in fresh))
        self.got += [copy for _, copy in fresh]
        return fresh


def stream_of(number: int, sizes: list[int]) -> tuple[bytes, list[bytes]]:
    payloads = [bytes([(number * 31 + index) % 256]) * size for index, size in enumerate(sizes)]
    return b"".join(encode_frame(2, 1, b"", len(payload)) + payload for payload in payloads), payloads


sizes = st.lists(
    st.sampled_from([0, 1, 300, SMALL_BYTES - FRAME_SIZE, SMALL_BYTES, 100_000, SIZE // 2, SIZE, 2 * SIZE]),
    min_size=1,
    max_size=4,
)
reads = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 3, 15, 16, 17, 1_448, 65_536, 200_000, SIZE]), st.booleans()),
    max_size=60,
)


@given(st.lists(sizes, min_size=3, max_size=3), reads)
def test_frames_come_out_whole_and_stay_until_the_turn_ends(
    contents: list[list[int]], plan: list[tuple[int, int, bool]]
) -> None:
    receive_buffer = ReceiveBuffer(SIZE)
    streams = [stream_of(number, content) for number, content in enumerate(contents)]
    peers = [Peer(stream) for stream, _ in streams]
    of_this_turn: list[tuple[memoryview, bytes]] = []

    def end_turn() -> None:
        assert all(view == copy for view, copy in of_this_turn), "a frame changed before its turn was over"
        of_this_turn.clear()
        receive_buffer.reset()

    for number, most, turn in plan:
        of_this_turn += peers[number].receive(receive_buffer, most)
        if turn or receive_buffer.short:
            end_turn()
    while any(peer.sent < len(peer.stream) for peer in peers):
        for peer in peers:
            if peer.sent < len(peer.stream):
                of_this_turn += peer.receive(receive_buffer, SIZE)
                if receive_buffer.short:
                    end_turn()
    end_turn()
    assert [peer.got for peer in peers] == [payloads for _, payloads in streams]
    assert all(not peer.partial_frame.part and peer.partial_frame.whole is None for peer in peers)


def test_an_idle_connection_holds_no_bytes_and_the_buffer_is_free_again() -> None:
    receive_buffer = ReceiveBuffer(SIZE)
    peer = Peer(stream_of(0, [10, 20])[0])
    peer.receive(receive_buffer, SIZE)
    receive_buffer.reset()
    assert len(receive_buffer.room(PartialFrame())) == SIZE


def test_a_large_frame_gets_a_buffer_of_its_size_and_is_not_copied_again() -> None:
    receive_buffer = ReceiveBuffer(SIZE)
    slow, quick = Peer(stream_of(0, [500_000])[0]), Peer(stream_of(1, [5])[0])
    slow.receive(receive_buffer, 100_000)
    quick.receive(receive_buffer, 100)
    whole = slow.partial_frame.whole
    assert whole is not None
    assert len(whole) == 500_000 + FRAME_SIZE
    assert len(receive_buffer.room(slow.partial_frame)) == len(whole) - 100_000
    fresh = slow.receive(receive_buffer, SIZE)
    assert fresh[0][0].obj is whole.obj


def test_the_incomplete_frame_of_a_lost_connection_is_freed() -> None:
    receive_buffer = ReceiveBuffer(SIZE)
    for size in (5, 1_000, 300_000, SIZE):
        lost = Peer(stream_of(0, [size])[0])
        lost.receive(receive_buffer, min(size, 200_000))
        receive_buffer.forget(lost.partial_frame)
        receive_buffer.reset()
        assert len(receive_buffer.room(PartialFrame())) == SIZE
        assert lost.partial_frame.whole is None


@pytest.mark.parametrize("size", [1, 15, 16, 60_000, 90_000, SIZE // 2])
def test_frames_of_one_connection_stay_in_one_piece_over_turns(size: int) -> None:
    stream, payloads = stream_of(0, [size] * 20)
    peer, receive_buffer = Peer(stream), ReceiveBuffer(SIZE)
    while peer.sent < len(stream):
        peer.receive(receive_buffer, 70_001)
        receive_buffer.reset()
    assert peer.got == payloads
