"""Headers in an answer with one bit turned over: which bit it was, so that the place is known that they speak of.

Found by trial: a CRC-32C tells two headers of this size apart that differ in up to three bits, so that at most one
change of one bit makes a bad header fit. What is found is only ever used to ask the broker for the messages again.
"""

from __future__ import annotations

from typing import Final

from crc32c import crc32c

from qmq.format.batch import Header, header_crc_of, parse_header
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    PIECE_CRC_OFFSET,
    PIECE_HEADER,
    PIECE_HEADER_SIZE,
    PIECE_MAGIC,
)
from qmq.format.run import PieceHeader

#: Longer headers are not tried: each of 768 tries goes over all of one.
_MOST_BYTES: Final = 16 << 10


def corrected_header(rest: memoryview) -> Header | PieceHeader | None:
    """The header of the batch or piece that begins *rest*, with one bit turned back; None when that does not help."""
    copy = memoryview(bytearray(rest[:_MOST_BYTES]))
    for bit in range(8 * min(len(copy), BATCH_HEADER_SIZE)):
        copy[bit >> 3] ^= 1 << (bit & 7)
        header = _right_header(copy)
        if header is not None:
            return header
        copy[bit >> 3] ^= 1 << (bit & 7)
    return None


def _right_header(view: memoryview) -> Header | PieceHeader | None:
    magic = int.from_bytes(view[:4], "little")
    if magic == BATCH_MAGIC and len(view) >= BATCH_HEADER_SIZE:
        header = parse_header(view)
        start = header.data_start
        return header if start <= len(view) and header_crc_of(view, start) == header.header_crc else None
    if magic == PIECE_MAGIC and len(view) >= PIECE_HEADER_SIZE:
        piece = PieceHeader._make(PIECE_HEADER.unpack_from(view))
        end = PIECE_HEADER_SIZE + piece.subject_size
        crc = crc32c(view[PIECE_HEADER_SIZE:end], crc32c(view[:PIECE_CRC_OFFSET]))
        return piece if end <= len(view) and crc == piece.header_crc else None
    return None
