"""Whatever way bytes of many connections arrive, their frames come out whole and stay put."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.net.protocol.frames import FRAME_SIZE, encode_frame, split_frames
from qmq.net.server.receive_buffer import SMALL_BYTES, Arena, Unfinished

SIZE = 1 << 20
LIMIT = 4 << 20


@dataclass
class Peer:
    """A connection: what it will send, and what came out at the other end."""

    stream: bytes
    unfinished: Unfinished = field(default_factory=Unfinished)
    sent: int = 0
    got: list[bytes] = field(default_factory=list)

    def receive(self, arena: Arena, most: int) -> list[tuple[memoryview, bytes]]:
        """One read of at most *most* bytes; gives the new payloads as views, and as bytes."""
        room = arena.room(self.unfinished)
        count = min(most, len(room), len(self.stream) - self.sent)
        room[:count] = self.stream[self.sent : self.sent + count]
        self.sent += count
        view = arena.received(self.unfinished, count)
        if view is None:
            return []
        fresh = [(frame.payload, bytes(frame.payload)) for frame in split_frames(view, LIMIT)]
        arena.keep(self.unfinished, sum(FRAME_SIZE + len(payload) for payload, _ in fresh))
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
    arena = Arena(SIZE)
    streams = [stream_of(number, content) for number, content in enumerate(contents)]
    peers = [Peer(stream) for stream, _ in streams]
    of_this_turn: list[tuple[memoryview, bytes]] = []

    def end_turn() -> None:
        assert all(view == copy for view, copy in of_this_turn), "a frame changed before its turn was over"
        of_this_turn.clear()
        arena.reset()

    for number, most, turn in plan:
        of_this_turn += peers[number].receive(arena, most)
        if turn or arena.short:
            end_turn()
    while any(peer.sent < len(peer.stream) for peer in peers):
        for peer in peers:
            if peer.sent < len(peer.stream):
                of_this_turn += peer.receive(arena, SIZE)
                if arena.short:
                    end_turn()
    end_turn()
    assert [peer.got for peer in peers] == [payloads for _, payloads in streams]
    assert all(not peer.unfinished.part and peer.unfinished.whole is None for peer in peers)


def test_an_idle_connection_holds_nothing_and_the_room_is_whole_again() -> None:
    arena = Arena(SIZE)
    peer = Peer(stream_of(0, [10, 20])[0])
    peer.receive(arena, SIZE)
    arena.reset()
    assert len(arena.room(Unfinished())) == SIZE


def test_a_large_frame_gets_a_buffer_of_its_size_and_is_not_copied_again() -> None:
    arena = Arena(SIZE)
    slow, quick = Peer(stream_of(0, [500_000])[0]), Peer(stream_of(1, [5])[0])
    slow.receive(arena, 100_000)
    quick.receive(arena, 100)
    whole = slow.unfinished.whole
    assert whole is not None
    assert len(whole) == 500_000 + FRAME_SIZE
    assert len(arena.room(slow.unfinished)) == len(whole) - 100_000
    fresh = slow.receive(arena, SIZE)
    assert fresh[0][0].obj is whole.obj


def test_what_a_lost_connection_left_is_free_again() -> None:
    arena = Arena(SIZE)
    for size in (5, 1_000, 300_000, SIZE):
        lost = Peer(stream_of(0, [size])[0])
        lost.receive(arena, min(size, 200_000))
        arena.forget(lost.unfinished)
        arena.reset()
        assert len(arena.room(Unfinished())) == SIZE
        assert lost.unfinished.whole is None


@pytest.mark.parametrize("size", [1, 15, 16, 60_000, 90_000, SIZE // 2])
def test_frames_of_one_connection_stay_in_one_piece_over_turns(size: int) -> None:
    stream, payloads = stream_of(0, [size] * 20)
    peer, arena = Peer(stream), Arena(SIZE)
    while peer.sent < len(stream):
        peer.receive(arena, 70_001)
        arena.reset()
    assert peer.got == payloads
