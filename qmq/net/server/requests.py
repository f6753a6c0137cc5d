"""Decoding: frames of clients to commands for the broker. No I/O.

A ProtocolError means that the client violates docs/PROTOCOL.md, and ends the connection; any other QmqError refuses the
one request. The broker checks what the values mean, and whether names are valid.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from qmq.broker.ports import commands
from qmq.broker.ports.commands import Command, Unanswered
from qmq.errors import InvalidOption, ProtocolError, UnsupportedVersion
from qmq.format.layout import MESSAGE_ID_SIZE, PRODUCER_ID_SIZE
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind, made
from qmq.net.protocol.selection import Boundary, Selection
from qmq.net.protocol.types import KnownConsumer, cut_reason

#: The most rows in one list of subjects.
MAX_LISTED: Final = 1_000
#: The most messages of one answer to FIND, and about the most bytes.
MAX_FOUND: Final = 10_000
MAX_FOUND_BYTES: Final = 256 << 10
_MAX_CLIENT_NAME: Final = 200
_MAX_NONCE: Final = 16
_KNOWN_NUMBERS: Final = 4
_SEND: Final = int(FrameKind.SEND)


class Hello(NamedTuple):
    """The content of the first frame of a connection: the client's software, the names of connection and program, and
    its token, each empty where it is left out; and the client's batches without an answer, where it has some.
    """

    client: str
    name: str
    app: str
    token: str
    unanswered: Unanswered | None


def decode_hello(frame: Frame) -> Hello:
    """Check the first frame of a connection, and return what it says."""
    if frame.kind != FrameKind.HELLO or len(frame.payload) or frame.flags:
        raise ProtocolError("the first frame of a connection is HELLO, without flags and payload")
    fields = frames.unpack_meta(frame.meta)
    protocol = fields.get("protocol")
    if protocol != frames.PROTOCOL_VERSION:
        raise UnsupportedVersion(
            f"the client speaks version {protocol!r:.40} of the protocol, this broker version "
            f"{frames.PROTOCOL_VERSION}; use a client of the broker's version"
        )
    client, name, app = (str(fields.get(key, ""))[:_MAX_CLIENT_NAME] for key in ("client", "name", "app"))
    token = fields.get("token", "")
    if type(token) is not str:
        raise ProtocolError("HELLO has a text in token")
    return Hello(client, name, app, token, _unanswered(fields.get("unanswered")))


def _unanswered(value: object) -> Unanswered | None:
    match value:
        case None:
            return None
        case [bytes(producer_id), int(end), int(age_ms)] if (
            len(producer_id) == PRODUCER_ID_SIZE and 0 <= end < 1 << 64 and 0 <= age_ms < 1 << 53
        ):
            return Unanswered(producer_id, end, age_ms * 1_000)
    raise ProtocolError("unanswered in HELLO is a producer id, a producer sequence, and milliseconds")


def decode_request(connection: int, frame: Frame) -> Command:
    """Return the command in a frame after the first one."""
    if frame.kind == _SEND:  # by far the most frequent kind
        if frame.flags not in (0, frames.FLUSH) or len(frame.meta):
            raise ProtocolError(f"SEND has no meta, and flags 0 or {frames.FLUSH}, not {frame.flags}")
        if frame.request:
            return made(commands.Send, (connection, frame.request, frame.payload, frame.flags != 0, False, None))
    decode = _DECODERS.get(frame.kind)
    if not frame.request:
        raise ProtocolError("request number 0 stands for the connection: number requests from 1")
    if decode is None:
        raise ProtocolError(f"kind {frame.kind} is not a request that this broker knows")
    return decode(connection, frame)


def _pull(connection: int, frame: Frame) -> Command:
    if len(frame.payload) != frames.PULL.size or len(frame.meta) or frame.flags not in (0, frames.CHECK):
        raise ProtocolError(f"PULL has a payload of {frames.PULL.size} bytes, no meta, and flags 0 or {frames.CHECK}")
    subscription, most, least, size, timeout_ms, expected = frames.PULL.unpack(frame.payload)
    known = None if expected == frames.NOT_EXPECTED else expected
    numbers = connection, frame.request, subscription, most, least, size, timeout_ms
    return made(commands.Pull, (*numbers, known, bool(frame.flags)))


def _ack(connection: int, frame: Frame) -> Command:
    count, rest = divmod(len(frame.payload) - frames.ACK.size, 16)
    if rest or count < 1 or len(frame.meta) or frame.flags not in (0, frames.MAY_WAIT):
        raise ProtocolError(
            f"ACK has a subscription, pairs of delivery sequences, no meta, and flags 0 or {frames.MAY_WAIT}"
        )
    subscription, crc = frames.ACK.unpack_from(frame.payload)
    if crc32c(frame.payload[frames.ACK.size :]) != crc:
        raise ProtocolError("the delivery sequences of an ACK do not fit their checksum")
    intervals = struct.unpack_from(f"<{2 * count}Q", frame.payload, frames.ACK.size)
    return commands.Ack(connection, frame.request, subscription, intervals, bool(frame.flags))


def _hand_back(connection: int, frame: Frame) -> Command:
    count, rest = divmod(len(frame.payload) - frames.HAND_BACK.size, frames.BACK.size)
    if rest or count < 1 or frame.flags:
        raise ProtocolError(f"HAND_BACK has a subscription, then one range or more of {frames.BACK.size} bytes each")
    subscription, crc = frames.HAND_BACK.unpack_from(frame.payload)
    rows = frame.payload[frames.HAND_BACK.size :]
    if crc32c(rows) != crc:
        raise ProtocolError("the ranges of a HAND_BACK do not fit their checksum")
    reasons = frames.unpack_meta(frame.meta).get("reasons")
    if type(reasons) is not list:
        raise ProtocolError("HAND_BACK has a list of texts in reasons")
    reasons = [cut_reason(str(reason)) for reason in reasons]
    try:
        backs = [
            commands.DispositionRange(
                start, end, disposition, None if delay_us == frames.OWN_DELAY else delay_us, reasons[reason]
            )
            for start, end, delay_us, disposition, reason in frames.BACK.iter_unpack(rows)
        ]
    except IndexError:
        raise ProtocolError(f"a range of a HAND_BACK names a reason beyond its {len(reasons)} reasons") from None
    return commands.HandBack(connection, frame.request, subscription, backs)


def _hand_over(connection: int, frame: Frame) -> Command:
    if frame.flags:
        raise ProtocolError("HAND_OVER has no flags")
    fields = frames.unpack_meta(frame.meta)
    group, delay_us = fields.get("group"), fields.get("delay_us")
    if not isinstance(group, str) or not (delay_us is None or _is_count(delay_us)):
        raise ProtocolError("HAND_OVER names a group, and a delay in microseconds or none")
    attempt, disposition = fields.get("attempt"), fields.get("disposition")
    if type(attempt) is not int or type(disposition) is not int:
        raise ProtocolError("HAND_OVER has whole numbers in attempt and disposition")
    batch = memoryview(bytearray(frame.payload))
    reason = cut_reason(str(fields.get("reason", "")))
    return commands.HandOver(connection, frame.request, batch, group, attempt, disposition, delay_us, reason)


def _restore(connection: int, frame: Frame) -> Command:
    if frame.flags or len(frame.meta):
        raise ProtocolError("RESTORE has batches, and neither flags nor meta")
    return commands.Restore(connection, frame.request, memoryview(bytearray(frame.payload)))


def _administer(connection: int, frame: Frame) -> Command:
    fields = _fields(frame)
    return commands.Administer(connection, frame.request, str(fields.pop("action", "")), fields)


def _heartbeat(connection: int, frame: Frame) -> Command:
    _expect_payload(frame, frames.HEARTBEAT.size)
    return commands.Heartbeat(connection, frame.request, *frames.HEARTBEAT.unpack(frame.payload))


def _withdraw(connection: int, frame: Frame) -> Command:
    _expect_payload(frame, frames.WITHDRAW.size)
    return commands.Withdraw(connection, *frames.WITHDRAW.unpack(frame.payload))


def _unsubscribe(connection: int, frame: Frame) -> Command:
    _expect_payload(frame, frames.UNSUBSCRIBE.size)
    return commands.Unsubscribe(connection, frame.request, *frames.UNSUBSCRIBE.unpack(frame.payload))


def _last_sequence(connection: int, frame: Frame) -> Command:
    _expect_payload(frame, PRODUCER_ID_SIZE)
    return commands.LastSequence(connection, frame.request, bytes(frame.payload))


def _claim(connection: int, frame: Frame) -> Command:
    _expect_payload(frame, frames.CLAIM.size)
    return commands.Claim(connection, frame.request, *frames.CLAIM.unpack(frame.payload))


def _subscribe(connection: int, frame: Frame) -> Command:
    fields = _fields(frame)
    prefixes = fields.get("prefixes")
    if not isinstance(prefixes, list):
        raise ProtocolError("SUBSCRIBE needs a list of names in prefixes")
    start = _start_of(fields.get("start"))
    nonce, client, settings = fields.get("nonce", b""), fields.get("client", b""), fields.get("settings", {})
    if type(nonce) is not bytes or type(client) is not bytes or len(nonce) > _MAX_NONCE or len(client) > _MAX_NONCE:
        raise ProtocolError(f"SUBSCRIBE has nonce and client of up to {_MAX_NONCE} bytes")
    if type(settings) is not dict:
        raise ProtocolError("SUBSCRIBE has a map in settings")
    session = fields.get("session", 0)
    if not _is_count(session):
        raise ProtocolError("SUBSCRIBE has a whole number in session")
    return commands.Subscribe(
        connection, frame.request, fields.get("group"), tuple(prefixes), fields.get("consumer", ""), start, nonce,
        client, bool(fields.get("transient")), tuple(settings.items()), fields.get("mode", "reliable"),
        _known_of(fields), fields.get("asks", "follow"), session,
    )  # fmt: skip


def _known_of(fields: dict[str, Any]) -> KnownConsumer | None:
    """Return what the client knows of the consumer's state, or None."""
    numbers = fields.get("known")
    if numbers is None:
        return None
    if type(numbers) is not list or not all(_is_count(number) for number in numbers) or len(numbers) % 2:
        raise ProtocolError("SUBSCRIBE has an even number of whole numbers in known")
    if len(numbers) < _KNOWN_NUMBERS or frames.pack_numbers(numbers)[1] != fields.get("known_crc"):
        raise ProtocolError("known of a SUBSCRIBE has too few numbers, or does not fit its checksum")
    since_us, generation, epoch, expected, *handled = numbers
    return KnownConsumer(since_us, generation, epoch, expected, tuple(handled))


def _subjects(connection: int, frame: Frame) -> Command:
    fields = _fields(frame)
    after, limit = fields.get("after", 0), fields.get("limit", MAX_LISTED)
    if not _is_count(after) or not _is_count(limit):
        raise ProtocolError("SUBJECTS needs whole numbers in after and limit")
    return commands.ListSubjects(connection, frame.request, fields.get("prefix", ""), after, min(limit, MAX_LISTED))


def _report(connection: int, frame: Frame) -> Command:
    if len(frame.payload) != frames.REPORT.size or frame.flags:
        raise ProtocolError(f"REPORT has a payload of {frames.REPORT.size} bytes and no flags")
    position, first, messages, partition = frames.REPORT.unpack(frame.payload)
    reason = cut_reason(str(frames.unpack_meta(frame.meta).get("reason", "")))
    return commands.Report(connection, frame.request, partition, position, first, messages, reason)


def _segments(connection: int, frame: Frame) -> Command:
    _expect_payload(frame, frames.SEGMENTS.size)
    position, partition = frames.SEGMENTS.unpack(frame.payload)
    return commands.ListSegments(connection, frame.request, partition, position)


def _batches(connection: int, frame: Frame) -> Command:
    _expect_payload(frame, frames.BATCHES.size)
    start, end, partition = frames.BATCHES.unpack(frame.payload)
    return commands.ListBatches(connection, frame.request, partition, start, end)


def _read_log(connection: int, frame: Frame) -> Command:
    _expect_payload(frame, frames.READ_LOG.size)
    position, size, partition = frames.READ_LOG.unpack(frame.payload)
    return commands.ReadLog(connection, frame.request, partition, position, size)


def _get(connection: int, frame: Frame) -> Command:
    _expect_payload(frame, MESSAGE_ID_SIZE)
    return commands.Get(connection, frame.request, bytes(frame.payload))


def _find(connection: int, frame: Frame) -> Command:
    fields = _fields(frame)
    max_count, max_bytes = fields.get("max_count", MAX_FOUND), fields.get("max_bytes", MAX_FOUND_BYTES)
    after, upto_us = fields.get("after"), fields.get("upto_us")
    if not _is_count(max_count) or not _is_count(max_bytes) or not (upto_us is None or _is_count(upto_us)):
        raise ProtocolError("FIND needs whole numbers in max_count, max_bytes and upto_us")
    if after is not None and (type(after) is not list or len(after) != 2 or not all(map(_is_count, after))):
        raise ProtocolError("FIND has two whole numbers in after")
    return commands.Find(
        connection, frame.request, Selection.unpacked(fields), bool(fields.get("newest")),
        None if after is None else Boundary(*after), upto_us, max(1, min(max_count, MAX_FOUND)),
        min(max_bytes, MAX_FOUND_BYTES),
    )  # fmt: skip


def _trace(connection: int, frame: Frame) -> Command:
    fields = _fields(frame)
    name = fields.get("consumer")
    if name is not None:
        since_us, limit = fields.get("since_us", 0), fields.get("limit", MAX_LISTED)
        if type(name) is not str or not _is_count(since_us) or not _is_count(limit):
            raise ProtocolError("TRACE of a consumer has its name, and whole numbers in since_us and limit")
        return commands.TraceConsumer(connection, frame.request, name, since_us, max(1, min(limit, MAX_LISTED)))
    message_id, numbers = fields.get("id"), fields.get("places", [])
    if type(message_id) is not bytes or len(message_id) != MESSAGE_ID_SIZE:
        raise ProtocolError(f"TRACE has an id of {MESSAGE_ID_SIZE} bytes")
    if type(numbers) is not list or len(numbers) % 2 or not all(_is_count(number) for number in numbers):
        raise ProtocolError("TRACE has pairs of a partition and a position in places")
    places = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    return commands.TraceMessage(connection, frame.request, message_id, places)


_DECODERS: Final[dict[int, Callable[[int, Frame], Command]]] = {
    FrameKind.SUBSCRIBE: _subscribe,
    FrameKind.PULL: _pull,
    FrameKind.WITHDRAW: _withdraw,
    FrameKind.UNSUBSCRIBE: _unsubscribe,
    FrameKind.LAST_SEQUENCE: _last_sequence,
    FrameKind.CLAIM: _claim,
    FrameKind.SUBJECTS: _subjects,
    FrameKind.REPORT: _report,
    FrameKind.ACK: _ack,
    FrameKind.HAND_BACK: _hand_back,
    FrameKind.HAND_OVER: _hand_over,
    FrameKind.RESTORE: _restore,
    FrameKind.HEARTBEAT: _heartbeat,
    FrameKind.ADMINISTER: _administer,
    FrameKind.SEGMENTS: _segments,
    FrameKind.BATCHES: _batches,
    FrameKind.READ_LOG: _read_log,
    FrameKind.GET: _get,
    FrameKind.FIND: _find,
    FrameKind.TRACE: _trace,
}


def _expect_payload(frame: Frame, size: int) -> None:
    if len(frame.payload) != size or len(frame.meta) or frame.flags:
        raise ProtocolError(
            f"{FrameKind(frame.kind).name} has a payload of {size} bytes and nothing else, "
            f"not {len(frame.payload)} with {len(frame.meta)} of meta and flags {frame.flags}"
        )


def _fields(frame: Frame) -> dict[str, Any]:
    if len(frame.payload) or frame.flags:
        raise ProtocolError(f"{FrameKind(frame.kind).name} has meta, and no payload or flags")
    return frames.unpack_meta(frame.meta)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _start_of(value: object) -> str | tuple[str, int] | None:
    if value is None or value in ("first", "new"):
        return None if value is None else str(value)
    if isinstance(value, list) and len(value) == 2 and value[0] in ("time", "sequence") and _is_count(value[1]):
        return str(value[0]), int(value[1])
    raise InvalidOption(f'start {value!r:.80} is not "first", "new", ["time", microseconds] or ["sequence", number]')
