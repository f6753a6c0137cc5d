"""Safeguards of what goes to clients, and of what their threads say."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

OF_ANSWERS: Final = (
    Mutant(
        "have a large answer written piece by piece",
        "ClientConnection.write",
        never("size > PIECE_BYTES"),
        ("tests/net/server/test_write_queue.py",),
    ),
    Mutant(
        "have the last word come behind the rest of an answer",
        "ClientConnection.end",
        never("(size := self._unsent.size)"),
        ("tests/net/server/test_write_queue.py",),
    ),
    Mutant(
        "leave no acknowledgement of a thread behind",
        "ThreadAcks._take",
        skip("self._due = False"),
        ("tests/net/client/consumer/test_acks.py",),
    ),
    Mutant(
        "take no flipped bit for another durability",
        "decode_request",
        instead("frame.flags not in (0, frames.FLUSH)", "frame.flags & ~frames.FLUSH"),
        ("tests/net/server/test_flipped_headers.py",),
    ),
)
