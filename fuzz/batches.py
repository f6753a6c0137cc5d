"""Batches as a client sends them: templates, changed at will, with checksums that fit the lies or do not."""

from __future__ import annotations

from typing import Final

import msgpack

from fuzz.target import Picks
from qmq.errors import BadBatch, MessageTooLarge
from qmq.format.batch import BatchLimits, check_batch, parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, RUN_SIZE
from qmq.format.pieces import read_answer
from qmq.format.source import NO_SOURCE
from tests.format.contents import Contents, batch_of, plain, reseal, rich, set_header, with_table

TEMPLATES: Final[tuple[Contents, ...]] = (
    [plain("a.b", 1)],
    [plain("a.b", 3)],
    [plain("a.c", 40, 1)],
    [rich("r.one", 1)],
    [rich("r.many", 20)],
    [plain("m.a", 2), plain("m.b", 1), plain("m.c", 3)],
    [rich("m.r", 3), plain("m.p", 1), rich("m.q", 17)],
    [plain(f"m.x{number}", 1) for number in range(40)],
    [plain("large", 2, 3_000)],
)
_BYTES: Final = tuple(bytes(batch_of(runs)) for runs in TEMPLATES)
LIMITS: Final = BatchLimits(max_message_bytes=64 << 10)


def make_batch(picks: Picks) -> memoryview:
    """A batch that an input describes."""
    view = memoryview(bytearray(_BYTES[picks.below(len(_BYTES))]))
    how = picks.number(1)
    if how & 1:
        picks.edit(view)
    if how & 2:
        header = parse_header(view)
        table = picks.take(picks.number(1)) if how & 4 else _a_table(picks)
        if header.data_start <= len(view):
            view = with_table(view, table)
    if how & 8:
        producer_id, number = picks.take(2).ljust(16, b"\0"), picks.number(2)
        # Small numbers, or some near the end of 64 bits.
        number = number if number < 0xF000 else ((number - 0xF000 << 52) - (number & 3)) & 0xFFFF_FFFF_FFFF_FFFF
        set_header(view, producer_id=producer_id, producer_sequence=number, created_at_us=number)
    if how & 16:
        view = view[: picks.below(len(view) + 1)]
    if how & 32 == 0 and len(view) >= BATCH_HEADER_SIZE + RUN_SIZE and parse_header(view).data_start <= len(view):
        reseal(view)
    return view


def _a_table(picks: Picks) -> bytes:
    names = [picks.take(picks.number(1) % 12).decode("latin-1") for _ in range(picks.number(1) % 5)]
    source = picks.take(picks.number(1) % 64) if picks.number(1) % 4 == 0 else NO_SOURCE
    packed: bytes = msgpack.packb({"source": source, "subjects": names})
    return packed


class Batches:
    """Into the broker's check. What passes must be readable to its last message, by the client's reader too."""

    def once(self, data: bytes) -> int:
        picks, batches = Picks(data), 0
        while picks.left:
            batches += 1
            view = make_batch(picks)
            try:
                checked = check_batch(view, LIMITS)
            except (BadBatch, MessageTooLarge):
                continue
            found, damaged = read_answer(view)
            assert not damaged, damaged
            assert sum(run.count for run in found) == checked.header.messages
            for run in found:
                assert sum(map(len, run.bodies())) + int(run.header_sizes().sum()) == len(run.payload)
        return batches

    def seeds(self) -> list[bytes]:
        found = [bytes([number, 0, how, 1, 20, 0, 3]) for number in range(len(_BYTES)) for how in range(0, 64, 5)]
        found.append(bytes([1, 0, 2, 3, 3]) + b"abc" + bytes([4]) + b"ab.c" + bytes([1]) + b"z")
        return found

    def close(self) -> None:
        """Nothing is kept."""
