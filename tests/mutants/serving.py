"""Safeguards of what goes to clients, and of what their threads say."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

OF_ANSWERS: Final = (
    Mutant(
        "have a large answer written piece by piece",
        "qmq/net/server/connection.py",
        "        if self._rest.size or size > PIECE_BYTES:\n",
        "        if self._rest.size:\n",
        ("tests/net/server/test_writing.py",),
    ),
    Mutant(
        "have the last word come behind the rest of an answer",
        "qmq/net/server/connection.py",
        "            if size := self._rest.size:\n                self._send(self._rest.take(size), size)\n",
        "",
        ("tests/net/server/test_writing.py",),
    ),
    Mutant(
        "leave no acknowledgement of a thread behind",
        "qmq/net/crossing.py",
        "        self._due = False  # before it looks: who comes now may be too late for this time, and calls again\n",
        "",
        ("tests/net/test_crossing.py",),
    ),
    Mutant(
        "take no flipped bit for another durability",
        "qmq/net/server/requests.py",
        "        if frame.flags not in (0, wire.FLUSH) or len(frame.meta):\n",
        "        if frame.flags & ~wire.FLUSH or len(frame.meta):\n",
        ("tests/net/server/test_flipped_headers.py",),
    ),
)
