"""qmq/net/protocol/frames.py: frames survive every split, and hostile ones are told from good ones."""

from __future__ import annotations

import os
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq import errors
from qmq.errors import Overloaded, ProtocolError, QmqError, RemoteError, StorageFull
from qmq.net.protocol import frames
from qmq.net.protocol.frames import (
    FRAME_SIZE,
    Frame,
    FrameKind,
    decode_error,
    encode_error,
    encode_frame,
    split_frames,
    unpack_meta,
)

LIMIT = 4_096

any_frames = st.tuples(
    st.sampled_from(list(FrameKind)),
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=40),
    st.binary(max_size=200),
)


def encoded(kind: int, flags: int, request: int, meta: bytes, payload: bytes) -> bytes:
    return encode_frame(kind, request, meta, len(payload), flags) + payload


def plain(frame: Frame) -> tuple[int, int, int, bytes, bytes]:
    return frame.kind, frame.flags, frame.request, bytes(frame.meta), bytes(frame.payload)


@given(st.lists(any_frames, max_size=4))
def test_frames_come_apart_as_they_went_together(content: list[tuple[int, int, int, bytes, bytes]]) -> None:
    stream = b"".join(encoded(*one) for one in content)
    assert [plain(frame) for frame in split_frames(memoryview(stream), LIMIT)] == content


@given(st.lists(any_frames, min_size=1, max_size=3))
def test_every_split_point_gives_the_frames_before_it(content: list[tuple[int, int, int, bytes, bytes]]) -> None:
    parts = [encoded(*one) for one in content]
    stream = b"".join(parts)
    ends = [sum(map(len, parts[: number + 1])) for number in range(len(parts))]
    for cut in range(len(stream) + 1):
        whole = sum(end <= cut for end in ends)
        got = [plain(frame) for frame in split_frames(memoryview(stream)[:cut], LIMIT)]
        assert got == content[:whole]


@pytest.mark.parametrize(
    "header",
    [
        frames.FRAME.pack(0, FrameKind.HELLO, 0, 0, 1),
        frames.FRAME.pack(FRAME_SIZE - 1, FrameKind.HELLO, 0, 0, 1),
        frames.FRAME.pack(FRAME_SIZE + 9, FrameKind.HELLO, 0, 10, 1),
        frames.FRAME.pack(LIMIT + 1, FrameKind.SEND, 0, 0, 1),
        b"GET / HTTP/1.1\r\n",
        bytes.fromhex("16030102000100 01fc0303 aabbccddee"),
        b"\xff" * FRAME_SIZE,
    ],
)
def test_headers_that_lie_are_refused_after_the_frames_before(header: bytes) -> None:
    good = encoded(FrameKind.PULL, 0, 7, b"", b"x" * frames.PULL.size)
    got = split_frames(memoryview(good + header), LIMIT)
    assert next(got).request == 7
    with pytest.raises(ProtocolError):
        next(got)


def test_the_largest_frame_passes() -> None:
    largest = encoded(FrameKind.SEND, frames.FLUSH, 1, b"", bytes(LIMIT - FRAME_SIZE))
    assert [len(frame.payload) for frame in split_frames(memoryview(largest), LIMIT)] == [LIMIT - FRAME_SIZE]


@given(st.binary(max_size=300))
def test_random_bytes_never_do_more_than_raise(junk: bytes) -> None:
    used = 0
    try:
        for frame in split_frames(memoryview(junk), LIMIT):
            used += FRAME_SIZE + len(frame.meta) + len(frame.payload)
            unpack_meta(frame.meta)
    except ProtocolError:
        pass
    assert used <= len(junk)


fields = st.dictionaries(
    st.text(max_size=10), st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
)


@given(fields)
def test_meta_comes_back(content: dict[str, object]) -> None:
    assert unpack_meta(memoryview(frames.pack_meta(content))) == content


@pytest.mark.parametrize(
    "meta",
    [
        b"\xc1",
        b"\x01",
        msgpack.packb([1, 2]),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": 1})[:-1],
        msgpack.packb({"a": 1}) + b"\x00",
        b"\xdf\xff\xff\xff\xff",  # a map of 4 G entries
        b"\x81\xa1a\xdd\xff\xff\xff\xff",  # a list of 4 G entries
        b"\x81\xa1a" + b"\x91" * 60_000,  # nested as deep as the meta is long
        msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"a": "b"}).replace(b"b", b"\xff"),
        msgpack.packb({str(number): number for number in range(65)}),
    ],
)
def test_hostile_meta_is_refused(meta: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_meta(memoryview(meta))


def test_no_meta_is_no_fields() -> None:
    assert unpack_meta(memoryview(b"")) == {}


def test_meta_has_its_bound() -> None:
    most = frames.MAX_META_BYTES - len(msgpack.packb({"a": b""})) - 1
    assert len(frames.pack_meta({"a": bytes(most)})) == frames.MAX_META_BYTES
    with pytest.raises(ProtocolError, match="65535"):
        frames.pack_meta({"a": os.urandom(most + 1)})


def every_error() -> list[type[QmqError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QmqError)]


@pytest.mark.parametrize("kind", every_error())
def test_errors_keep_their_class_over_the_wire(kind: type[QmqError]) -> None:
    frame = next(split_frames(memoryview(encode_error(9, kind("what, where, what to do"))), LIMIT))
    assert (frame.kind, frame.request) == (FrameKind.ERROR, 9)
    back = decode_error(frame)
    assert type(back) is kind
    assert str(back) == "what, where, what to do"
    assert unpack_meta(frame.meta)["retryable"] is kind.retryable


def test_each_error_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in every_error()]
    assert len(codes) == len(set(codes))


def test_an_error_of_an_unknown_code_keeps_its_text() -> None:
    meta = frames.pack_meta({"code": "from_the_future", "message": "too new", "retryable": True})
    error = decode_error(next(split_frames(memoryview(encode_frame(FrameKind.ERROR, 3, meta)), LIMIT)))
    assert type(error) is RemoteError
    assert error.retryable
    assert str(error) == "from_the_future: too new"


def test_a_long_message_is_cut_so_that_it_fits() -> None:
    frame = next(split_frames(memoryview(encode_error(1, StorageFull("x" * 100_000))), 8_192))
    assert 3_000 < len(str(decode_error(frame))) <= 4_000


@pytest.mark.parametrize("meta", [b"", msgpack.packb({"code": 5}), msgpack.packb({"message": None})])
def test_errors_without_their_fields_are_errors_even_so(meta: bytes) -> None:
    frame = Frame(FrameKind.ERROR, 0, 1, memoryview(meta), memoryview(b""))
    assert isinstance(decode_error(frame), QmqError)


def test_layouts_are_those_of_the_contract() -> None:
    assert encode_frame(FrameKind.SEND, 0x0102, b"", 4, frames.FLUSH) == bytes.fromhex(
        "14000000 02 03 0000 0201000000000000"
    )
    assert (frames.PULL.size, frames.WITHDRAW.size, frames.UNSUBSCRIBE.size, frames.SENT.size) == (28, 8, 4, 28)
    assert (frames.ACK.size, frames.ACKED.size, frames.HAND_BACK.size, frames.BACK.size, frames.HEARTBEAT.size) == (
        8,
        8,
        8,
        32,
        24,
    )
    assert struct.unpack("<I", encode_error(0, Overloaded("x"))[:4])[0] == len(encode_error(0, Overloaded("x")))
