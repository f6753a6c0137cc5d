"""A pull's answer into the client's reader: pieces and batches, changed at will, as a bad network or broker might."""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c

from fuzz.batches import TEMPLATES
from fuzz.target import Picks
from qmq.errors import BadBatch
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, PIECE_CRC_OFFSET, PIECE_HEADER, PIECE_HEADER_SIZE, RUN_SIZE
from qmq.format.pieces import piece_of_run, read_answer, read_single
from qmq.format.run import PieceHeader, Run
from tests.format.contents import reseal, stored

_STORED: Final = tuple(stored(runs) for runs in TEMPLATES)


def _a_piece(picks: Picks) -> memoryview:
    number = picks.below(len(_STORED))
    batch, contents = _STORED[number], TEMPLATES[number]
    if picks.number(1) & 1:
        return memoryview(bytearray(batch))
    run = picks.below(len(contents))
    count = len(contents[run])
    start = picks.below(count)
    stop = start + 1 + picks.below(count - start)
    return memoryview(bytearray(b"".join(piece_of_run(batch, run, start, stop)[0])))


def _seal(part: memoryview) -> None:
    """Make the checksum of its header fit, and that of its data."""
    if bytes(part[:4]) == b"QMQp":
        header = PieceHeader._make(PIECE_HEADER.unpack_from(part))
        start = PIECE_HEADER_SIZE + header.subject_size
        if header.whole:
            struct.pack_into("<I", part, 68, crc32c(part[start : header.size]))
        seal = crc32c(part[PIECE_HEADER_SIZE:start], crc32c(part[:PIECE_CRC_OFFSET]))
        struct.pack_into("<I", part, PIECE_CRC_OFFSET, seal)
    elif len(part) >= BATCH_HEADER_SIZE + RUN_SIZE and parse_header(part).data_start <= len(part):
        reseal(part)


def read_to_the_end(run: Run) -> None:
    """Everything that a consumer may touch of a run."""
    assert len(run.bodies()) == run.count
    for index in range(min(run.count, 50)):
        assert run.body(index) is run.bodies()[index]
        run.id(index)
        try:
            run.header(index)
        except BadBatch:  # told to who asks for the header of that message
            pass


class Answers:
    """Into read_answer. What it gives as sound can be read to the end."""

    def once(self, data: bytes) -> int:
        picks, answer = Picks(data), bytearray()
        while picks.left and len(answer) < 1 << 16:
            part = _a_piece(picks)
            how = picks.number(1)
            if how & 1:
                picks.edit(part)
            if how & 6:
                _seal(part)
            if how & 8:
                part = part[: picks.below(len(part) + 1)]
            answer += part
        single = read_single(memoryview(answer))
        runs, damaged = read_answer(memoryview(answer))
        if single is not None:
            assert not damaged
            assert [(run.origin, run.subject, run.bodies()) for run in runs] == [
                (single.origin, single.subject, single.bodies())
            ]
        assert not (runs and not answer)
        for run in runs:
            read_to_the_end(run)
        assert all(damage.reason for damage in damaged)
        return 1

    def seeds(self) -> list[bytes]:
        return [
            bytes([number, 0, whole, 0, 0, 1, 0, 1, 0, how, 2, 20, 0, 3, 90, 0, 5])
            for number in range(len(_STORED))
            for whole in (0, 1)
            for how in (0, 1, 3, 9)
        ]

    def close(self) -> None:
        """Nothing is kept."""
