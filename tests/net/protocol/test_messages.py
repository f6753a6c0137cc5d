"""The head of MESSAGES: encoded by the broker, decoded by the client."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import ProtocolError
from qmq.net.protocol.frames import FRAME_SIZE, MAX_META_BYTES, FrameKind, split_frames
from qmq.net.protocol.messages import HEAD, NOT_LEFT, MessagesHead, decode_head, encode_messages

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
RANGES = st.lists(st.tuples(U64, U32, U32), max_size=5)
TAGS = st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=9), max_size=3)


def head_of(
    ranges: list[tuple[int, int, int]], acked: list[int], left_us: int | None = None, tags: tuple[str, ...] = ()
) -> bytes:
    return encode_messages(9, 0, ranges, acked, left_us, tags)[FRAME_SIZE:]


@given(U64, RANGES, st.lists(U64, max_size=4), st.none() | st.integers(0, NOT_LEFT - 1), TAGS)
def test_what_is_encoded_is_decoded(
    request_number: int, ranges: list[tuple[int, int, int]], acked: list[int], left_us: int | None, tags: list[str]
) -> None:
    data = encode_messages(request_number, 3, ranges, acked, left_us, tags) + b"abc"
    (frame,) = split_frames(memoryview(data), 1 << 20)
    assert (frame.kind, frame.request, bytes(frame.payload)) == (FrameKind.MESSAGES, request_number, b"abc")
    flat = tuple(number for one in ranges for number in one)
    assert decode_head(frame.meta) == MessagesHead(flat, tuple(acked), left_us, tuple(tags))


@pytest.mark.parametrize(
    "head",
    [
        head_of([], []),
        head_of([(5, 1, 1)], []),
        head_of([(5, 1, 1)], [3]),
        head_of([(5, 1, 1), (9, 2, 1)], [3, 6], 77, ("a", "b")),
    ],
)
def test_no_flipped_bit_and_no_missing_byte_passes(head: bytes) -> None:
    decode_head(memoryview(head))
    for bit in range(8 * len(head)):
        flipped = bytearray(head)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            decode_head(memoryview(flipped))
    for size in range(len(head)):
        with pytest.raises(ProtocolError):
            decode_head(memoryview(head)[:size])


@pytest.mark.parametrize(
    "rest",
    [
        struct.pack("<HHQ", 1, 0, 0),
        struct.pack("<HHQ", 0, 1, 0),
        struct.pack("<HHQ", 65_535, 65_535, 0) + bytes(40),
        struct.pack("<HHQQII", 1, 1, 0, 5, 1, 1),
        struct.pack("<HHQ", 0, 0, 0) + b"\xff\xfe",
    ],
)
def test_a_head_that_contradicts_itself_is_refused(rest: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_head(memoryview(struct.pack("<I", crc32c(rest)) + rest))


def test_a_head_that_is_too_large_is_not_sent() -> None:
    most = (MAX_META_BYTES - HEAD.size) // 16
    assert len(decode_head(memoryview(head_of([(1, 1, 1)] * most, []))).ranges) == 3 * most
    with pytest.raises(ProtocolError, match="at most 65535"):
        head_of([(1, 1, 1)] * (most + 1), [])
