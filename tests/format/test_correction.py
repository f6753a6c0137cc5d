"""Headers with one bit turned over: which bit it was is found, and nothing is made of others."""

from __future__ import annotations

import random
from typing import Final

from qmq.format.batch import parse_header
from qmq.format.correction import corrected_header
from qmq.format.layout import BATCH_HEADER_SIZE, MARK_SIZE, PIECE_HEADER, PIECE_HEADER_SIZE
from qmq.format.pieces import piece_of_run
from qmq.format.run import PieceHeader
from tests.format.contents import plain, stored

#: Behind that stands the mark, which the header's checksum does not cover.
COVERED: Final = BATCH_HEADER_SIZE - MARK_SIZE


def flipped(data: bytes, *bits: int) -> memoryview:
    changed = bytearray(data)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return memoryview(changed)


def test_one_bit_of_a_header_is_turned_back() -> None:
    batch = stored([plain("a", 3), plain("b", 2)])
    header = parse_header(batch)
    piece = b"".join(piece_of_run(batch, 1, 0, 1)[0])
    for bit in range(8 * COVERED):
        assert corrected_header(flipped(bytes(batch), bit)) == header
    for bit in range(8 * PIECE_HEADER_SIZE):
        assert corrected_header(flipped(piece, bit)) == PieceHeader._make(PIECE_HEADER.unpack_from(piece))


def test_more_bits_and_other_bytes_are_left_alone() -> None:
    chance = random.Random(1)
    batch = bytes(stored([plain("a", 3), plain("b", 2)]))
    for _ in range(20):
        assert corrected_header(flipped(batch, *chance.sample(range(8 * COVERED), 2))) is None
        assert corrected_header(memoryview(chance.randbytes(chance.randrange(200)))) is None
    assert corrected_header(memoryview(batch[: BATCH_HEADER_SIZE - 1])) is None
