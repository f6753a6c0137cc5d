"""Effects of the broker to frames for clients. Without I/O.

Each function gives the bytes of an answer; the buffers of the effect follow those of MESSAGES and LOG_BYTES.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgpack
from crc32c import crc32c

from qmq.broker.ports import effects
from qmq.net.protocol import frames as wire
from qmq.net.protocol.frames import Kind

#: A SENT frame of a batch with one run, whole: what most answers are.
_SENT_ONE: Final = struct.Struct("<IBBHQQQH6sIQ")
assert _SENT_ONE.size == wire.FRAME_SIZE + wire.SENT.size + 8


#: As plain numbers: an enum is asked for its members by name.
_MESSAGES: Final = int(Kind.MESSAGES)
_SENT: Final = int(Kind.SENT)


def sent(effect: effects.Sent, store_id: bytes) -> bytes:
    """SENT: where a batch lies, when it was stored, and the first sequence of each run."""
    _, request, position, stored_at_us, partition, firsts = effect
    if isinstance(firsts, int):
        return _SENT_ONE.pack(
            _SENT_ONE.size, _SENT, 0, 0, request, position, stored_at_us, partition, store_id, 1, firsts
        )
    payload = wire.SENT.pack(position, stored_at_us, partition, store_id, len(firsts))
    payload += firsts.astype("<u8", copy=False).tobytes()
    return wire.encode_frame(Kind.SENT, request, b"", len(payload)) + payload


def messages(effect: effects.Messages, acked: Sequence[int] = ()) -> bytes:
    """The header of MESSAGES; the buffers of the effect follow. The requests *acked* are answered by it, too."""
    _, request, _, size, _, left_us, given, tags = effect
    fields: dict[str, Any] = {}
    if left_us is not None:
        fields["left_us"] = left_us
    if given:
        fields["ranges"] = ranges = given[0] if len(given) == 1 else [field for one in given for field in one]
        fields["ranges_crc"] = wire.pack_numbers(ranges)[1]
    if tags:
        fields["tags"], fields["tags_crc"] = list(tags), wire.crc_of_texts(tags)
    if acked:
        fields["acked"], fields["acked_crc"] = acked, wire.pack_numbers(acked)[1]
    return wire.encode_frame(_MESSAGES, request, wire.pack_meta(fields) if fields else b"", size)


def reported(effect: effects.Reported) -> bytes:
    """REPORTED: what was found."""
    return _with_meta(Kind.REPORTED, effect.request, {"found": effect.found})


def subscribed(effect: effects.Subscribed) -> bytes:
    """SUBSCRIBED: the number that pulls name, and when it begins, if that is a time."""
    fields: dict[str, Any] = {"subscription": effect.subscription}
    if effect.start_us is not None:
        fields["start_us"] = effect.start_us
    if effect.place is not None:
        fields["place"] = list(effect.place)
    if effect.tags:
        fields["tags"] = list(effect.tags)
    if effect.differing:
        fields["differing"] = dict(effect.differing)
    return _with_meta(Kind.SUBSCRIBED, effect.request, fields)


def unsubscribed(effect: effects.Unsubscribed) -> bytes:
    """UNSUBSCRIBED: nothing but that."""
    return wire.encode_frame(Kind.UNSUBSCRIBED, effect.request)


def acked(request: int, refused: int) -> bytes:
    """ACKED: how many were refused."""
    return wire.encode_frame(Kind.ACKED, request, b"", wire.ACKED.size) + wire.ACKED.pack(refused)


def handed_back(effect: effects.HandedBack) -> bytes:
    """HANDED_BACK: which were refused."""
    payload = struct.pack(f"<{len(effect.refused)}I", *effect.refused)
    return wire.encode_frame(Kind.HANDED_BACK, effect.request, b"", len(payload)) + payload


def handed_over(effect: effects.HandedOver) -> bytes:
    """HANDED_OVER: nothing but that."""
    return wire.encode_frame(Kind.HANDED_OVER, effect.request)


def restored(effect: effects.Restored) -> bytes:
    """RESTORED: where the logs end."""
    return _with_meta(Kind.RESTORED, effect.request, {"ends": list(effect.ends)})


def heartbeat_seen(effect: effects.HeartbeatSeen) -> bytes:
    """HEARTBEAT_SEEN: nothing but that."""
    return wire.encode_frame(Kind.HEARTBEAT_SEEN, effect.request)


def administered(effect: effects.Administered) -> bytes:
    """ADMINISTERED: fields as payload, because they may be more than a meta part holds."""
    payload: bytes = msgpack.packb(effect.fields)
    return wire.encode_frame(Kind.ADMINISTERED, effect.request, b"", len(payload)) + payload


def last_sequence(effect: effects.LastSequenceIs) -> bytes:
    """LAST_SEQUENCE_IS: the number, or None."""
    return _with_meta(Kind.LAST_SEQUENCE_IS, effect.request, {"sequence": effect.sequence})


def claimed(effect: effects.Claimed) -> bytes:
    """CLAIMED: nothing but that."""
    return wire.encode_frame(Kind.CLAIMED, effect.request)


def subject_list(effect: effects.SubjectList) -> bytes:
    """SUBJECT_LIST: rows as payload, because they may be more than a meta part holds."""
    payload: bytes = msgpack.packb({"rows": effect.rows, "after": effect.after})
    return wire.encode_frame(Kind.SUBJECT_LIST, effect.request, b"", len(payload)) + payload


def segment_list(effect: effects.SegmentList) -> bytes:
    """SEGMENT_LIST: rows as payload, because they may be more than a meta part holds."""
    payload: bytes = msgpack.packb({"partitions": effect.partitions, "rows": effect.rows, "more": effect.more})
    meta = wire.pack_meta({"crc": crc32c(payload)})
    return wire.encode_frame(Kind.SEGMENT_LIST, effect.request, meta, len(payload)) + payload


def batch_list(effect: effects.BatchList) -> bytes:
    """BATCH_LIST: records of an index, and where to go on."""
    meta = wire.pack_meta({"crc": crc32c(effect.records), "after": effect.after})
    return wire.encode_frame(Kind.BATCH_LIST, effect.request, meta, len(effect.records)) + effect.records


def log_bytes(effect: effects.LogBytes) -> bytes:
    """The header of LOG_BYTES; the data of the effect follows."""
    return wire.encode_frame(Kind.LOG_BYTES, effect.request, b"", len(effect.data))


def _with_meta(kind: Kind, request: int, fields: dict[str, Any]) -> bytes:
    return wire.encode_frame(kind, request, wire.pack_meta(fields))
