"""Frames are decoded into commands; protocol errors differ from refused requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.ports import commands
from qmq.errors import InvalidOption, ProtocolError, QmqError, UnsupportedVersion
from qmq.net.client.consumer.in_flight import PendingDisposition
from qmq.net.client.consumer.nacks import packed
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind
from qmq.net.protocol.selection import Boundary, Selection
from qmq.net.protocol.types import Disposition, KnownConsumer
from qmq.net.server.requests import MAX_FOUND, MAX_FOUND_BYTES, MAX_LISTED, decode_hello, decode_request


def of(kind: int, payload: bytes = b"", meta: dict[str, Any] | None = None, flags: int = 0, request: int = 7) -> Frame:
    packed = b"" if meta is None else frames.pack_meta(meta)
    return Frame(kind, flags, request, memoryview(packed), memoryview(payload))


SUBSCRIBE = {"group": "g", "prefixes": ["a.", "b"], "consumer": "c", "start": None}


@pytest.mark.parametrize(
    ("frame", "command"),
    [
        (of(FrameKind.SEND, b"batch"), commands.Send(3, 7, memoryview(b"batch"), False)),
        (of(FrameKind.SEND, b"batch", flags=frames.FLUSH), commands.Send(3, 7, memoryview(b"batch"), True)),
        (of(FrameKind.PULL, frames.PULL.pack(1, 2, 3, 4, 5, 6)), commands.Pull(3, 7, 1, 2, 3, 4, 5, 6)),
        (
            of(FrameKind.PULL, frames.PULL.pack(1, 2, 3, 4, 5, 6), flags=frames.CHECK),
            commands.Pull(3, 7, 1, 2, 3, 4, 5, 6, checks=True),
        ),
        (of(FrameKind.PULL, frames.PULL.pack(1, 2, 3, 4, 5, frames.NOT_EXPECTED)), commands.Pull(3, 7, 1, 2, 3, 4, 5)),
        (of(FrameKind.WITHDRAW, frames.WITHDRAW.pack(9)), commands.Withdraw(3, 9)),
        (of(FrameKind.UNSUBSCRIBE, frames.UNSUBSCRIBE.pack(4)), commands.Unsubscribe(3, 7, 4)),
        (of(FrameKind.LAST_SEQUENCE, b"0123456789abcdef"), commands.LastSequence(3, 7, b"0123456789abcdef")),
        (of(FrameKind.CLAIM, b"p" * 16 + b"c" * 16), commands.Claim(3, 7, b"p" * 16, b"c" * 16)),
        (of(FrameKind.SUBSCRIBE, meta=SUBSCRIBE), commands.Subscribe(3, 7, "g", ("a.", "b"), "c", None)),
        (
            of(FrameKind.SUBSCRIBE, meta={**SUBSCRIBE, "group": None, "start": ["time", 5]}),
            commands.Subscribe(3, 7, None, ("a.", "b"), "c", ("time", 5)),
        ),
        (
            of(FrameKind.SUBSCRIBE, meta={**SUBSCRIBE, "start": ["sequence", 0]}),
            commands.Subscribe(3, 7, "g", ("a.", "b"), "c", ("sequence", 0)),
        ),
        (
            of(FrameKind.SUBSCRIBE, meta={**SUBSCRIBE, "asks": "look", "session": 5}),
            commands.Subscribe(3, 7, "g", ("a.", "b"), "c", None, asks="look", session=5),
        ),
        (
            of(FrameKind.SUBSCRIBE, meta={**SUBSCRIBE, "start": "new"}),
            commands.Subscribe(3, 7, "g", ("a.", "b"), "c", "new"),
        ),
        (
            of(FrameKind.REPORT, frames.REPORT.pack(5, 6, 7, 8), meta={"reason": "rot"}),
            commands.Report(3, 7, 8, 5, 6, 7, "rot"),
        ),
        (of(FrameKind.SEGMENTS, frames.SEGMENTS.pack(5, 1)), commands.ListSegments(3, 7, 1, 5)),
        (of(FrameKind.BATCHES, frames.BATCHES.pack(5, 6, 1)), commands.ListBatches(3, 7, 1, 5, 6)),
        (of(FrameKind.READ_LOG, frames.READ_LOG.pack(5, 6, 1)), commands.ReadLog(3, 7, 1, 5, 6)),
        (of(FrameKind.GET, b"0123456789abcdef"), commands.Get(3, 7, b"0123456789abcdef")),
        (of(FrameKind.FIND), commands.Find(3, 7, Selection(), max_count=MAX_FOUND)),
        (of(FrameKind.TRACE, meta={"id": bytes(16)}), commands.TraceMessage(3, 7, bytes(16))),
        (of(FrameKind.TRACE, meta={"consumer": "c"}), commands.TraceConsumer(3, 7, "c")),
        (
            of(FrameKind.TRACE, meta={"consumer": "c", "since_us": 5, "limit": 1 << 40}),
            commands.TraceConsumer(3, 7, "c", 5),
        ),
        (
            of(FrameKind.TRACE, meta={"id": bytes(16), "places": [1, 5, 2, 6]}),
            commands.TraceMessage(3, 7, bytes(16), ((1, 5), (2, 6))),
        ),
        (
            of(FrameKind.FIND, meta={"prefix": "a.", "key": "k", "since_us": 5, "until_us": 9, "newest": True}),
            commands.Find(3, 7, Selection("a.", "k", 5, 9), newest=True, max_count=MAX_FOUND),
        ),
        (
            of(FrameKind.FIND, meta={"original": b"i" * 16, "after": [5, 6], "upto_us": 7, "max_count": 0}),
            commands.Find(3, 7, Selection(original=b"i" * 16), False, Boundary(5, 6), 7, 1),
        ),
        (
            of(FrameKind.FIND, meta={"max_count": 10**9, "max_bytes": 10**9}),
            commands.Find(3, 7, Selection(), max_count=MAX_FOUND, max_bytes=MAX_FOUND_BYTES),
        ),
        (of(FrameKind.REPORT, frames.REPORT.pack(5, 0, 0, 8)), commands.Report(3, 7, 8, 5, 0, 0, "")),
        (of(FrameKind.SUBJECTS), commands.ListSubjects(3, 7, "", 0, MAX_LISTED)),
        (
            of(FrameKind.SUBJECTS, meta={"prefix": "a.", "after": 5, "limit": 9}),
            commands.ListSubjects(3, 7, "a.", 5, 9),
        ),
        (
            of(FrameKind.SUBJECTS, meta={"prefix": "", "after": 0, "limit": 10**9}),
            commands.ListSubjects(3, 7, "", 0, MAX_LISTED),
        ),
    ],
)
def test_frames_become_commands(frame: Frame, command: commands.Command) -> None:
    assert decode_request(3, frame) == command


@pytest.mark.parametrize(
    "frame",
    [
        of(FrameKind.SEND, b"batch", request=0),
        of(FrameKind.SEND, b"batch", flags=1),
        of(FrameKind.SEND, b"batch", flags=2),
        of(FrameKind.SEND, b"batch", meta={"a": 1}),
        of(FrameKind.PULL, bytes(19)),
        of(FrameKind.PULL, bytes(21)),
        of(FrameKind.PULL, bytes(20), request=0),
        of(FrameKind.PULL, bytes(20), flags=1),
        of(FrameKind.WITHDRAW),
        of(FrameKind.UNSUBSCRIBE, bytes(8)),
        of(FrameKind.LAST_SEQUENCE, bytes(15)),
        of(FrameKind.CLAIM, bytes(16)),
        of(FrameKind.SEGMENTS, bytes(9)),
        of(FrameKind.BATCHES, bytes(19)),
        of(FrameKind.READ_LOG, bytes(13)),
        of(FrameKind.GET, bytes(15)),
        of(FrameKind.GET, bytes(16), meta={"a": 1}),
        of(FrameKind.FIND, bytes(16)),
        of(FrameKind.TRACE, bytes(16)),
        of(FrameKind.TRACE, meta={"id": bytes(15)}),
        of(FrameKind.TRACE, meta={"id": bytes(16), "places": [1]}),
        of(FrameKind.TRACE, meta={"id": bytes(16), "places": [1, -1]}),
        of(FrameKind.FIND, meta={"after": [1]}),
        of(FrameKind.FIND, meta={"after": [1, -1]}),
        of(FrameKind.FIND, meta={"upto_us": "now"}),
        of(FrameKind.FIND, meta={"max_count": -1}),
        of(FrameKind.SUBSCRIBE),
        of(FrameKind.SUBSCRIBE, b"x", meta=SUBSCRIBE),
        of(FrameKind.SUBSCRIBE, meta={**SUBSCRIBE, "prefixes": "a."}),
        of(FrameKind.SUBJECTS, meta={"after": -1}),
        of(FrameKind.SUBJECTS, meta={"after": True}),
        of(FrameKind.SUBJECTS, meta={"limit": "all"}),
        of(FrameKind.HELLO, meta={"protocol": 1}),
        of(FrameKind.WELCOME),
        of(FrameKind.ERROR),
        of(0),
        of(99),
    ],
)
def test_protocol_errors_end_the_connection(frame: Frame) -> None:
    with pytest.raises(ProtocolError):
        decode_request(3, frame)


@pytest.mark.parametrize("start", ["now", 5, ["time"], ["time", -1], ["time", "x"], ["place", 5], ["first", 1], {}])
def test_a_start_that_is_none_refuses_the_one_request(start: Any) -> None:
    with pytest.raises(InvalidOption, match="start"):
        decode_request(3, of(FrameKind.SUBSCRIBE, meta={**SUBSCRIBE, "start": start}))


@given(st.integers(0, 255), st.integers(0, 255), st.binary(max_size=40), st.binary(max_size=60))
def test_no_frame_does_more_than_raise(kind: int, flags: int, meta: bytes, payload: bytes) -> None:
    try:
        command = decode_request(3, Frame(kind, flags, 7, memoryview(meta), memoryview(payload)))
    except QmqError:
        return
    assert command.connection == 3


def test_hello_gives_the_name_of_the_client() -> None:
    named = {"protocol": 1, "client": "x" * 300, "name": "billing", "app": "shop"}
    assert decode_hello(of(FrameKind.HELLO, meta=named)) == ("x" * 200, "billing", "shop", "", None)
    assert decode_hello(of(FrameKind.HELLO, meta={"protocol": 1, "of tomorrow": 5})) == ("", "", "", "", None)


@pytest.mark.parametrize("protocol", [None, 0, 2, "1", 10**9])
def test_another_version_of_the_protocol_is_named(protocol: Any) -> None:
    with pytest.raises(UnsupportedVersion, match=f"version {protocol!r}.* version 1"):
        decode_hello(of(FrameKind.HELLO, meta={"protocol": protocol}))


@pytest.mark.parametrize(
    "frame",
    [
        of(FrameKind.SEND, b"x"),
        of(FrameKind.HELLO, b"x", meta={"protocol": 1}),
        of(FrameKind.HELLO, meta={"protocol": 1}, flags=1),
        of(FrameKind.WELCOME),
    ],
)
def test_the_first_frame_is_a_hello(frame: Frame) -> None:
    with pytest.raises(ProtocolError, match="HELLO"):
        decode_hello(frame)


def ack(*numbers: int, crc: int | None = None) -> bytes:
    packed, right = frames.pack_numbers(numbers)
    return frames.ACK.pack(5, right if crc is None else crc) + packed


def test_acknowledgements_are_pairs_that_fit_their_checksum() -> None:
    assert decode_request(3, of(FrameKind.ACK, ack(1, 4, 9, 10))) == commands.Ack(3, 7, 5, (1, 4, 9, 10))
    waits = of(FrameKind.ACK, ack(1, 4), flags=frames.MAY_WAIT)
    assert decode_request(3, waits) == commands.Ack(3, 7, 5, (1, 4), may_wait=True)
    with pytest.raises(ProtocolError, match="flag"):
        decode_request(3, of(FrameKind.ACK, ack(1, 4), flags=2))
    good = ack(1, 4)
    for bit in range(8 * 4, 8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="checksum"):
            decode_request(3, of(FrameKind.ACK, bytes(bad)))
    for wrong in (ack(), ack(1), ack(1, 2, 3), good[:-1]):
        with pytest.raises(ProtocolError):
            decode_request(3, of(FrameKind.ACK, wrong))


BACKS = [
    PendingDisposition(4, 9, Disposition.NACK, None, "broke"),
    PendingDisposition(10, 11, Disposition.REJECT, None, "no"),
    PendingDisposition(20, 21, Disposition.NACK, 5, "broke"),
]


def test_nacks_in_one_frame_share_their_reasons() -> None:
    meta, payload = packed(BACKS, 5)
    assert meta == {"reasons": ["broke", "no"]}
    expected = [commands.DispositionRange(*back[:5]) for back in BACKS]
    assert decode_request(3, of(FrameKind.HAND_BACK, payload, meta=meta)) == commands.HandBack(3, 7, 5, expected)
    for bit in range(8 * 4, 8 * len(payload)):
        bad = bytearray(payload)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="checksum"):
            decode_request(3, of(FrameKind.HAND_BACK, bytes(bad), meta=meta))
    for wrong in (b"", payload[:8], payload[:-1]):
        with pytest.raises(ProtocolError, match="one range or more"):
            decode_request(3, of(FrameKind.HAND_BACK, wrong, meta=meta))
    for reasons in (None, "broke", ["broke"]):
        with pytest.raises(ProtocolError, match="reasons"):
            decode_request(3, of(FrameKind.HAND_BACK, payload, meta={"reasons": reasons}))


def test_the_known_state_fits_its_checksum() -> None:
    numbers = [1_700_000_000_000_000, 3, 2, 50, 10, 20, 30, 31]
    right = frames.pack_numbers(numbers)[1]

    def known(said: Any, crc: Any) -> KnownConsumer | None:
        command = decode_request(3, of(FrameKind.SUBSCRIBE, meta={**SUBSCRIBE, "known": said, "known_crc": crc}))
        assert isinstance(command, commands.Subscribe)
        return command.known

    assert known(numbers, right) == KnownConsumer(numbers[0], 3, 2, 50, (10, 20, 30, 31))
    assert known(numbers[:4], frames.pack_numbers(numbers[:4])[1]) == KnownConsumer(numbers[0], 3, 2, 50)
    assert known(None, None) is None
    for said, crc in (
        (numbers, right ^ 1),
        ([*numbers[:3], 51, *numbers[4:]], right),
        (numbers[:2], frames.pack_numbers(numbers[:2])[1]),
        (numbers[:5], frames.pack_numbers(numbers[:5])[1]),
        ([-1, *numbers[1:]], right),
        ("numbers", right),
    ):
        with pytest.raises(ProtocolError):
            known(said, crc)
