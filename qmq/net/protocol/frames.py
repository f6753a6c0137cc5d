"""Frames: the wire format, without I/O. docs/PROTOCOL.md specifies it.

A frame is a header (16 bytes: size u32 of the whole frame, kind u8, flags u8, meta_size u16, request u64), a small
msgpack map ``meta`` (0 bytes if empty; in MESSAGES a head of fixed fields) and an opaque payload. An answer has the
request number of its request.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgpack
from crc32c import crc32c

from qmq import errors
from qmq.errors import ProtocolError, QmqError, RemoteError
from qmq.format.bounded_msgpack import cause_of, unpack

PROTOCOL_VERSION: Final = 1

FRAME: Final = struct.Struct("<IBBHQ")
FRAME_SIZE: Final = 16
MAX_META_BYTES: Final = 0xFFFF
#: HELLO is the first frame. It is small, as its sender is not known to be a client before.
MAX_HELLO_BYTES: Final = 4_096

#: PULL payload: subscription u32 | max_count u32 | min_count u32 | max_bytes u32 | timeout_ms u32 | expected u64
PULL: Final = struct.Struct("<IIIIIQ")
#: ``expected`` of a subscription without a group, which has no delivery sequences.
NOT_EXPECTED: Final = (1 << 64) - 1
#: ACK payload: subscription u32 | crc32c u32 of delivery sequences u64 that follow: start, end, start, end, ...
ACK: Final = struct.Struct("<II")
#: ACKED payload: count of refused ones u64
ACKED: Final = struct.Struct("<Q")
#: HAND_BACK payload: subscription u32 | crc32c u32 of the BACK records that follow, one for each range
HAND_BACK: Final = struct.Struct("<II")
#: BACK: start u64 | end u64 | delay_us u64 | disposition u32 | reason u32, its index in meta
BACK: Final = struct.Struct("<QQQII")
#: ``delay_us`` for the group's own delay of that attempt.
OWN_DELAY: Final = (1 << 64) - 1
#: HEARTBEAT payload: client 16s | stalled_us u64
HEARTBEAT: Final = struct.Struct("<16sQ")
#: CLAIM payload: producer id 16s | client 16s
CLAIM: Final = struct.Struct("<16s16s")
#: WITHDRAW payload: request u64 of the pull
WITHDRAW: Final = struct.Struct("<Q")
#: UNSUBSCRIBE payload: subscription u32
UNSUBSCRIBE: Final = struct.Struct("<I")
#: REPORT payload: position u64 of the batch | first u32 and count u32 of its damaged messages | partition u16
REPORT: Final = struct.Struct("<QIIH")
#: SENT payload: position u64 | stored_at_us u64 | partition u16 | store_id 6s | runs u32, then first_sequence u64 a run
SENT: Final = struct.Struct("<QQH6sI")

#: SEGMENTS payload: position u64 | partition u16
SEGMENTS: Final = struct.Struct("<QH")
#: BATCHES payload: start u64 | end u64 | partition u16
BATCHES: Final = struct.Struct("<QQH")
#: READ_LOG payload: position u64 | size u32 | partition u16
READ_LOG: Final = struct.Struct("<QIH")

#: SEND flags: durability flush (else append). Two bits, so that one flipped bit makes neither value.
FLUSH: Final = 3
#: ACK flags: the answer may wait some milliseconds for that of a pull. Two bits, for the same reason.
MAY_WAIT: Final = 3
#: PULL flags: check the header of each batch before its messages are sent. Two bits, for the same reason.
CHECK: Final = 3


#: One packer for all frames, as to create one takes as long as to pack a frame.
_pack: Final = msgpack.Packer().pack


class FrameKind(enum.IntEnum):
    """The kinds of frames. Requests are below 128, answers above."""

    HELLO = 1
    SEND = 2
    SUBSCRIBE = 3
    PULL = 4
    WITHDRAW = 5
    UNSUBSCRIBE = 6
    LAST_SEQUENCE = 7
    SUBJECTS = 8
    REPORT = 9
    ACK = 10
    HAND_BACK = 11
    HEARTBEAT = 12
    ADMINISTER = 13
    HAND_OVER = 14
    SEGMENTS = 15
    BATCHES = 16
    READ_LOG = 17
    RESTORE = 18
    CLAIM = 19
    GET = 20
    FIND = 21
    TRACE = 22
    WELCOME = 129
    SENT = 130
    SUBSCRIBED = 131
    MESSAGES = 132
    UNSUBSCRIBED = 134
    LAST_SEQUENCE_IS = 135
    SUBJECT_LIST = 136
    REPORTED = 137
    ACKED = 138
    HANDED_BACK = 139
    HEARTBEAT_SEEN = 140
    ADMINISTERED = 141
    HANDED_OVER = 142
    SEGMENT_LIST = 143
    BATCH_LIST = 144
    LOG_BYTES = 145
    RESTORED = 146
    CLAIMED = 147
    GOT = 148
    FOUND = 149
    TRACED = 150
    ERROR = 255


#: Makes a NamedTuple in half the time of a call of its class, for the types that every frame needs.
made: Final = tuple.__new__


class Frame(NamedTuple):
    """One frame; ``payload`` is a view into the buffer it came in."""

    kind: int
    flags: int
    request: int
    meta: memoryview
    payload: memoryview


def encode_frame(kind: int, request: int, meta: bytes = b"", payload_size: int = 0, flags: int = 0) -> bytes:
    """Return the header and meta of a frame; its payload of *payload_size* bytes follows them."""
    return FRAME.pack(FRAME_SIZE + len(meta) + payload_size, kind, flags, len(meta), request) + meta


def pack_numbers(numbers: Sequence[int]) -> tuple[bytes, int]:
    """Return whole numbers packed as u64, and the crc32c of the bytes."""
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return packed, crc32c(packed)


def pack_meta(fields: dict[str, Any]) -> bytes:
    """Return the packed meta part. Raises ProtocolError if it is over 65,535 bytes."""
    meta: bytes = _pack(fields)
    if len(meta) > MAX_META_BYTES:
        raise ProtocolError(f"the meta part of a frame has {len(meta)} bytes; at most {MAX_META_BYTES} are allowed")
    return meta


def unpack_meta(meta: memoryview) -> dict[str, Any]:
    """Return the fields of a meta part. Raises ProtocolError if it is not a map with strings as keys.

    The size of the part bounds the sizes of its fields.
    """
    if not len(meta):
        return {}
    size = len(meta)
    try:
        fields = unpack(
            meta, raw=False, max_map_len=64, max_array_len=4_096, max_str_len=size, max_bin_len=size, max_ext_len=0
        )
    except Exception as error:  # msgpack raises several kinds for invalid bytes
        raise ProtocolError(f"the meta part of a frame is not valid msgpack: {cause_of(error)}") from None
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ProtocolError("the meta part of a frame is not a map with strings as keys")
    return fields


def encode_error(request: int, error: QmqError) -> bytes:
    """Return an ERROR frame; request 0: the error concerns the connection."""
    fields = {"code": error.code, "message": str(error)[:4_000], "retryable": error.retryable}
    return encode_frame(FrameKind.ERROR, request, pack_meta(fields))


_ERRORS: Final[dict[str, type[QmqError]]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, QmqError) and "code" in vars(kind)
}


def decode_error(frame: Frame) -> QmqError:
    """Return the error of an ERROR frame, of the class with its code."""
    fields = unpack_meta(frame.meta)
    code, message = str(fields.get("code", "")), str(fields.get("message", ""))
    kind = _ERRORS.get(code)
    if kind is None:
        return RemoteError(f"{code}: {message}", bool(fields.get("retryable")))
    return kind(message)


def wrong_sizes(size: int, meta_size: int, max_frame_bytes: int) -> ProtocolError:
    """Return the error for a frame header with sizes that contradict each other or exceed *max_frame_bytes*."""
    return ProtocolError(
        f"a frame header says {size} bytes with {meta_size} of meta; "
        f"at least {FRAME_SIZE} and at most {max_frame_bytes} bytes a frame are allowed"
    )


def split_frames(view: memoryview, max_frame_bytes: int) -> Iterator[Frame]:
    """Yield the complete frames at the start of *view*, in order; the sum of their sizes is the count of used bytes.

    Raises ProtocolError at a header with sizes that contradict each other or exceed *max_frame_bytes*, after the frames
    before it.
    """
    offset, end = 0, len(view)
    while end - offset >= FRAME_SIZE:
        size, kind, flags, meta_size, request = FRAME.unpack_from(view, offset)
        if not FRAME_SIZE + meta_size <= size <= max_frame_bytes:
            raise wrong_sizes(size, meta_size, max_frame_bytes)
        if end - offset < size:
            return
        start = offset + FRAME_SIZE
        behind = start + meta_size
        yield made(Frame, (kind, flags, request, view[start:behind], view[behind : offset + size]))
        offset += size
