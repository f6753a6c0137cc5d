"""qmq/net/server/requests.py: frames become commands; what breaks the protocol is told from what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.ports import commands
from qmq.errors import InvalidOption, ProtocolError, QmqError, UnsupportedVersion
from qmq.net.client.consumer.in_flight import Back, Verdict
from qmq.net.client.consumer.nacks import packed
from qmq.net.protocol import frames as wire
from qmq.net.protocol.frames import Frame, Kind
from qmq.net.server.requests import MAX_LISTED, decode_hello, decode_request


def of(kind: int, payload: bytes = b"", meta: dict[str, Any] | None = None, flags: int = 0, request: int = 7) -> Frame:
    packed = b"" if meta is None else wire.pack_meta(meta)
    return Frame(kind, flags, request, memoryview(packed), memoryview(payload))


SUBSCRIBE = {"group": "g", "prefixes": ["a.", "b"], "consumer": "c", "start": None}


@pytest.mark.parametrize(
    ("frame", "command"),
    [
        (of(Kind.SEND, b"batch"), commands.Send(3, 7, memoryview(b"batch"), False)),
        (of(Kind.SEND, b"batch", flags=wire.FLUSH), commands.Send(3, 7, memoryview(b"batch"), True)),
        (of(Kind.PULL, wire.PULL.pack(1, 2, 3, 4, 5, 6)), commands.Pull(3, 7, 1, 2, 3, 4, 5, 6)),
        (
            of(Kind.PULL, wire.PULL.pack(1, 2, 3, 4, 5, 6), flags=wire.CHECK),
            commands.Pull(3, 7, 1, 2, 3, 4, 5, 6, checks=True),
        ),
        (of(Kind.PULL, wire.PULL.pack(1, 2, 3, 4, 5, wire.NOT_EXPECTED)), commands.Pull(3, 7, 1, 2, 3, 4, 5)),
        (of(Kind.WITHDRAW, wire.WITHDRAW.pack(9)), commands.Withdraw(3, 9)),
        (of(Kind.UNSUBSCRIBE, wire.UNSUBSCRIBE.pack(4)), commands.Unsubscribe(3, 7, 4)),
        (of(Kind.LAST_SEQUENCE, b"0123456789abcdef"), commands.LastSequence(3, 7, b"0123456789abcdef")),
        (of(Kind.CLAIM, b"p" * 16 + b"c" * 16), commands.Claim(3, 7, b"p" * 16, b"c" * 16)),
        (of(Kind.SUBSCRIBE, meta=SUBSCRIBE), commands.Subscribe(3, 7, "g", ("a.", "b"), "c", None)),
        (
            of(Kind.SUBSCRIBE, meta={**SUBSCRIBE, "group": None, "start": ["time", 5]}),
            commands.Subscribe(3, 7, None, ("a.", "b"), "c", ("time", 5)),
        ),
        (
            of(Kind.SUBSCRIBE, meta={**SUBSCRIBE, "start": ["sequence", 0]}),
            commands.Subscribe(3, 7, "g", ("a.", "b"), "c", ("sequence", 0)),
        ),
        (
            of(Kind.SUBSCRIBE, meta={**SUBSCRIBE, "asks": "look"}),
            commands.Subscribe(3, 7, "g", ("a.", "b"), "c", None, asks="look"),
        ),
        (
            of(Kind.SUBSCRIBE, meta={**SUBSCRIBE, "start": "last"}),
            commands.Subscribe(3, 7, "g", ("a.", "b"), "c", "last"),
        ),
        (
            of(Kind.REPORT, wire.REPORT.pack(5, 6, 7, 8), meta={"reason": "rot"}),
            commands.Report(3, 7, 8, 5, 6, 7, "rot"),
        ),
        (of(Kind.SEGMENTS, wire.SEGMENTS.pack(5, 1)), commands.ListSegments(3, 7, 1, 5)),
        (of(Kind.BATCHES, wire.BATCHES.pack(5, 6, 1)), commands.ListBatches(3, 7, 1, 5, 6)),
        (of(Kind.READ_LOG, wire.READ_LOG.pack(5, 6, 1)), commands.ReadLog(3, 7, 1, 5, 6)),
        (of(Kind.REPORT, wire.REPORT.pack(5, 0, 0, 8)), commands.Report(3, 7, 8, 5, 0, 0, "")),
        (of(Kind.SUBJECTS), commands.ListSubjects(3, 7, "", 0, MAX_LISTED)),
        (
            of(Kind.SUBJECTS, meta={"prefix": "a.", "after": 5, "limit": 9}),
            commands.ListSubjects(3, 7, "a.", 5, 9),
        ),
        (
            of(Kind.SUBJECTS, meta={"prefix": "", "after": 0, "limit": 10**9}),
            commands.ListSubjects(3, 7, "", 0, MAX_LISTED),
        ),
    ],
)
def test_frames_become_commands(frame: Frame, command: commands.Command) -> None:
    assert decode_request(3, frame) == command


@pytest.mark.parametrize(
    "frame",
    [
        of(Kind.SEND, b"batch", request=0),
        of(Kind.SEND, b"batch", flags=1),
        of(Kind.SEND, b"batch", flags=2),
        of(Kind.SEND, b"batch", meta={"a": 1}),
        of(Kind.PULL, bytes(19)),
        of(Kind.PULL, bytes(21)),
        of(Kind.PULL, bytes(20), request=0),
        of(Kind.PULL, bytes(20), flags=1),
        of(Kind.WITHDRAW),
        of(Kind.UNSUBSCRIBE, bytes(8)),
        of(Kind.LAST_SEQUENCE, bytes(15)),
        of(Kind.CLAIM, bytes(16)),
        of(Kind.SEGMENTS, bytes(9)),
        of(Kind.BATCHES, bytes(19)),
        of(Kind.READ_LOG, bytes(13)),
        of(Kind.SUBSCRIBE),
        of(Kind.SUBSCRIBE, b"x", meta=SUBSCRIBE),
        of(Kind.SUBSCRIBE, meta={**SUBSCRIBE, "prefixes": "a."}),
        of(Kind.SUBJECTS, meta={"after": -1}),
        of(Kind.SUBJECTS, meta={"after": True}),
        of(Kind.SUBJECTS, meta={"limit": "all"}),
        of(Kind.HELLO, meta={"protocol": 1}),
        of(Kind.WELCOME),
        of(Kind.ERROR),
        of(0),
        of(99),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(frame: Frame) -> None:
    with pytest.raises(ProtocolError):
        decode_request(3, frame)


@pytest.mark.parametrize("start", ["now", 5, ["time"], ["time", -1], ["time", "x"], ["place", 5], ["first", 1], {}])
def test_a_start_that_is_none_refuses_the_one_request(start: Any) -> None:
    with pytest.raises(InvalidOption, match="start"):
        decode_request(3, of(Kind.SUBSCRIBE, meta={**SUBSCRIBE, "start": start}))


@given(st.integers(0, 255), st.integers(0, 255), st.binary(max_size=40), st.binary(max_size=60))
def test_no_frame_does_more_than_raise(kind: int, flags: int, meta: bytes, payload: bytes) -> None:
    try:
        command = decode_request(3, Frame(kind, flags, 7, memoryview(meta), memoryview(payload)))
    except QmqError:
        return
    assert command.connection == 3


def test_hello_gives_the_name_of_the_client() -> None:
    assert decode_hello(of(Kind.HELLO, meta={"protocol": 1, "client": "x" * 300})) == "x" * 200
    assert decode_hello(of(Kind.HELLO, meta={"protocol": 1, "of tomorrow": 5})) == ""


@pytest.mark.parametrize("protocol", [None, 0, 2, "1", 10**9])
def test_another_version_of_the_protocol_is_named(protocol: Any) -> None:
    with pytest.raises(UnsupportedVersion, match=f"version {protocol!r}.* version 1"):
        decode_hello(of(Kind.HELLO, meta={"protocol": protocol}))


@pytest.mark.parametrize(
    "frame",
    [
        of(Kind.SEND, b"x"),
        of(Kind.HELLO, b"x", meta={"protocol": 1}),
        of(Kind.HELLO, meta={"protocol": 1}, flags=1),
        of(Kind.WELCOME),
    ],
)
def test_the_first_frame_is_a_hello(frame: Frame) -> None:
    with pytest.raises(ProtocolError, match="HELLO"):
        decode_hello(frame)


def ack(*numbers: int, crc: int | None = None) -> bytes:
    packed, right = wire.pack_numbers(numbers)
    return wire.ACK.pack(5, right if crc is None else crc) + packed


def test_acknowledgements_are_pairs_that_fit_their_checksum() -> None:
    assert decode_request(3, of(Kind.ACK, ack(1, 4, 9, 10))) == commands.Ack(3, 7, 5, (1, 4, 9, 10))
    waits = of(Kind.ACK, ack(1, 4), flags=wire.MAY_WAIT)
    assert decode_request(3, waits) == commands.Ack(3, 7, 5, (1, 4), may_wait=True)
    with pytest.raises(ProtocolError, match="flag"):
        decode_request(3, of(Kind.ACK, ack(1, 4), flags=2))
    good = ack(1, 4)
    for bit in range(8 * 4, 8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="checksum"):
            decode_request(3, of(Kind.ACK, bytes(bad)))
    for wrong in (ack(), ack(1), ack(1, 2, 3), good[:-1]):
        with pytest.raises(ProtocolError):
            decode_request(3, of(Kind.ACK, wrong))


BACKS = [
    Back(4, 9, Verdict.NACK, None, "broke"),
    Back(10, 11, Verdict.REJECT, None, "no"),
    Back(20, 21, Verdict.NACK, 5, "broke"),
]


def test_what_is_handed_back_together_has_its_reasons_once() -> None:
    meta, payload = packed(BACKS, 5)
    assert meta == {"reasons": ["broke", "no"]}
    expected = [commands.Back(*back[:5]) for back in BACKS]
    assert decode_request(3, of(Kind.HAND_BACK, payload, meta=meta)) == commands.HandBack(3, 7, 5, expected)
    for bit in range(8 * 4, 8 * len(payload)):
        bad = bytearray(payload)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="checksum"):
            decode_request(3, of(Kind.HAND_BACK, bytes(bad), meta=meta))
    for wrong in (b"", payload[:8], payload[:-1]):
        with pytest.raises(ProtocolError, match="one stretch or more"):
            decode_request(3, of(Kind.HAND_BACK, wrong, meta=meta))
    for reasons in (None, "broke", ["broke"]):
        with pytest.raises(ProtocolError, match="reasons"):
            decode_request(3, of(Kind.HAND_BACK, payload, meta={"reasons": reasons}))


def test_what_a_client_knows_fits_its_checksum() -> None:
    numbers = [1_700_000_000_000_000, 3, 2, 50, 10, 20, 30, 31]
    right = wire.pack_numbers(numbers)[1]

    def known(said: Any, crc: Any) -> commands.Known | None:
        command = decode_request(3, of(Kind.SUBSCRIBE, meta={**SUBSCRIBE, "known": said, "known_crc": crc}))
        assert isinstance(command, commands.Subscribe)
        return command.known

    assert known(numbers, right) == commands.Known(numbers[0], 3, 2, 50, (10, 20, 30, 31))
    assert known(numbers[:4], wire.pack_numbers(numbers[:4])[1]) == commands.Known(numbers[0], 3, 2, 50)
    assert known(None, None) is None
    for said, crc in (
        (numbers, right ^ 1),
        ([*numbers[:3], 51, *numbers[4:]], right),
        (numbers[:2], wire.pack_numbers(numbers[:2])[1]),
        (numbers[:5], wire.pack_numbers(numbers[:5])[1]),
        ([-1, *numbers[1:]], right),
        ("numbers", right),
    ):
        with pytest.raises(ProtocolError):
            known(said, crc)
