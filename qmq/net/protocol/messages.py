"""MESSAGES, the answer to a pull: a head of fixed fields stands in the place of meta, and batches and pieces follow it.

The head has fixed fields instead of a map because it comes with every message that is received alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

from crc32c import crc32c

from qmq.errors import ProtocolError
from qmq.net.protocol.frames import FRAME, FRAME_SIZE, MAX_META_BYTES, FrameKind, made

#: The head: crc32c u32 of the rest of the head | ranges u16 | acked u16 | left_us u64; then ``ranges`` rows of RANGE,
#: ``acked`` request numbers u64, and the tags, joined by zero bytes.
HEAD: Final = struct.Struct("<IHHQ")
#: RANGE: first delivery sequence u64 | count u32 | attempt u32
RANGE: Final = struct.Struct("<QII")
#: ``left_us`` when the answer does not say it.
NOT_LEFT: Final = (1 << 64) - 1

_KIND: Final = int(FrameKind.MESSAGES)
_CRC: Final = struct.Struct("<I")
_CRC_SIZE: Final = 4
#: The frame header and the checksum behind it.
_pack_front: Final = struct.Struct(FRAME.format + "I").pack
_REST: Final = struct.Struct("<HHQ")
#: The most frequent heads: one range, and at most one ACK that is answered, too.
_ONE: Final = struct.Struct("<HHQQII")
_ONE_ACKED: Final = struct.Struct("<HHQQIIQ")
_ONE_SIZE: Final = _CRC_SIZE + _ONE.size
_ONE_ACKED_SIZE: Final = _CRC_SIZE + _ONE_ACKED.size


class MessagesHead(NamedTuple):
    """The head of an answer to a pull.

    ``ranges`` are the (first delivery sequence, count, attempt) triples of its messages, as a flat sequence. ``acked``
    are the requests of ACKs that it answers, too. No message that was stored before ``left_us`` is still to come.
    """

    ranges: Sequence[int] = ()
    acked: Sequence[int] = ()
    left_us: int | None = None
    tags: tuple[str, ...] = ()


#: The head of an answer that says nothing about its messages.
EMPTY_HEAD: Final = MessagesHead()


def encode_messages(
    request: int,
    size: int,
    ranges: Sequence[tuple[int, int, int]] = (),
    acked: Sequence[int] = (),
    left_us: int | None = None,
    tags: Sequence[str] = (),
) -> bytes:
    """Return the frame header and the head of MESSAGES; *size* bytes of batches and pieces follow them.

    Raises ProtocolError if the head is over 65,535 bytes.
    """
    left = NOT_LEFT if left_us is None else left_us
    if len(ranges) == 1 and not tags and len(acked) < 2:
        if acked:
            rest = _ONE_ACKED.pack(1, 1, left, *ranges[0], acked[0])
        else:
            rest = _ONE.pack(1, 0, left, *ranges[0])
    else:
        packed = (_REST.pack(len(ranges), len(acked), left), *(RANGE.pack(*one) for one in ranges))
        rest = b"".join((*packed, struct.pack(f"<{len(acked)}Q", *acked), "\0".join(tags).encode()))
    head_size = _CRC_SIZE + len(rest)
    if head_size > MAX_META_BYTES:
        raise ProtocolError(f"the head of MESSAGES has {head_size} bytes; at most {MAX_META_BYTES} are allowed")
    return _pack_front(FRAME_SIZE + head_size + size, _KIND, 0, head_size, request, crc32c(rest)) + rest


def decode_head(head: memoryview) -> MessagesHead:
    """Return the fields of a head. Raises ProtocolError if it does not fit its checksum or its own sizes."""
    size = len(head)
    if size < HEAD.size or crc32c(head[_CRC_SIZE:]) != _CRC.unpack_from(head)[0]:
        raise ProtocolError(f"the head of MESSAGES, {size} bytes, does not fit its checksum")
    ranges, acked, left_us = _REST.unpack_from(head, _CRC_SIZE)
    left = None if left_us == NOT_LEFT else left_us
    if ranges == 1 and size == (_ONE_ACKED_SIZE if acked else _ONE_SIZE) and acked < 2:
        found = (_ONE_ACKED if acked else _ONE).unpack_from(head, _CRC_SIZE)
        return made(MessagesHead, (found[3:6], found[6:], left, ()))
    acked_at = HEAD.size + RANGE.size * ranges
    tags_at = acked_at + 8 * acked
    if tags_at > size:
        raise ProtocolError(f"the head of MESSAGES has {size} bytes; its {ranges} ranges and {acked} acks need more")
    try:
        tags = tuple(str(head[tags_at:], "utf-8").split("\0")) if tags_at < size else ()
    except UnicodeDecodeError:
        raise ProtocolError("the tags of MESSAGES are no text") from None
    triples = tuple(chain.from_iterable(RANGE.iter_unpack(head[HEAD.size : acked_at])))
    return MessagesHead(triples, struct.unpack_from(f"<{acked}Q", head, acked_at), left, tags)
