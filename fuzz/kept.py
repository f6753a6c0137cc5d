"""What a client keeps on its own machine, changed at will: the spool, and the state file of a consumer."""

from __future__ import annotations

import os
import shutil
import struct
from typing import Any, Final

import msgpack
from crc32c import crc32c

from fuzz.target import GrowthCheck, Picks, edited, scratch_directory
from qmq.net.client.consumer.ack_file import MAGIC, StateFile
from qmq.net.client.failover.spool import SUFFIX, Spool
from qmq.net.protocol.types import KnownConsumer

#: Nothing here is longer than a few KiB.
_MOST_GROWTH_BYTES: Final = 16 << 20
_ADDRESSES: Final = ["a:1", "b:2"]
_HEADER_BYTES: Final = 16
_RECORD: Final = struct.Struct("<II")
_FIELDS: Final = {"group", "attempt", "disposition", "delay_us", "reason", "at_us", "batch", "ack"}
_STORE_ID: Final = b"store1"


def record_of(number: int) -> dict[str, Any]:
    """What a client spools: a message and the acknowledgement that is to follow it, or the latter alone."""
    late = {"store": _STORE_ID, "group": "g", "consumer": "c", "since_us": 1, "generation": 2, "handled": [0, number]}
    if number == 3:
        return {"ack": late}
    return {
        "ack": late,
        "group": "g",
        "attempt": 1 + number,
        "disposition": 1,
        "delay_us": None if number % 2 else 5_000_000,
        "reason": "broken",
        "at_us": 1_700_000_000_000_000,
        "batch": bytes([number]) * 40,
    }


class Spools:
    """Into Spool.take: records that are whole and unchanged come, others never do."""

    def __init__(self) -> None:
        self._scratch = scratch_directory()
        os.environ["QMQ_STATE_DIR"] = str(self._scratch)
        spool = Spool(_ADDRESSES)
        for number in range(4):
            spool.put(record_of(number))
        spool.close()
        self._directory = self._scratch / "spool"
        (self._path,) = self._directory.iterdir()
        self._content = self._path.read_bytes()

    def once(self, data: bytes) -> int:
        picks = Picks(data)
        seals = picks.number(1)
        content = edited(picks, self._content)
        if seals & 1:
            self._seal(content)
        self._path.write_bytes(content)
        os.environ["QMQ_STATE_DIR"] = str(self._scratch)
        spool = Spool(_ADDRESSES)
        with GrowthCheck(_MOST_GROWTH_BYTES):
            found = spool.take()
        for waiting in found:
            for record in waiting.records:
                assert record.keys() in (_FIELDS, {"ack"})
                assert seals & 1 or record in [record_of(number) for number in range(4)]
            assert waiting.is_damaged or len(waiting.records) == 4 or seals & 1 or len(content) < len(self._content)
            spool.removed(waiting)
        for path in self._directory.iterdir():
            path.unlink()
        return 1

    def _seal(self, content: bytearray) -> None:
        """Have every record fit its checksum."""
        at = _HEADER_BYTES
        while at + _RECORD.size <= len(content):
            (size, _) = _RECORD.unpack_from(content, at)
            body = bytes(content[at + _RECORD.size : at + _RECORD.size + size])
            _RECORD.pack_into(content, at, size, crc32c(body))
            at += _RECORD.size + size

    def seeds(self) -> list[bytes]:
        return [bytes([seal, how, 2, place, 0, 3]) for seal in (0, 1) for how in range(8) for place in (0, 18, 40, 90)]

    def close(self) -> None:
        shutil.rmtree(self._scratch)
        assert self._path.suffix == SUFFIX


class States:
    """Into StateFile.read: what was written, or nothing."""

    def __init__(self) -> None:
        self._scratch = scratch_directory()
        self._known = KnownConsumer(1_700_000_000_000_000, 3, 0, 70_000, (0, 5, 7, 300, 65_000, 70_000))
        self._file = StateFile.open(self._scratch, _STORE_ID, "g", "c")
        self._file.write(self._known)
        self._content = self._file.path.read_bytes()

    def once(self, data: bytes) -> int:
        picks = Picks(data)
        seals = picks.number(1)
        forged = MAGIC + bytes(4) + picks.take(picks.left) if seals & 2 else None
        content = edited(picks, self._content) if forged is None else bytearray(forged)
        start = len(MAGIC) + 4
        if seals & 1 and len(content) >= start:
            struct.pack_into("<I", content, len(MAGIC), crc32c(bytes(content[start:])))
        self._file.path.write_bytes(content)
        with GrowthCheck(_MOST_GROWTH_BYTES):
            found = self._file.read()
        if found is not None:
            assert seals or found == self._known
            numbers = [found.since_us, found.generation, found.expected, *found.handled]
            assert all(type(number) is int and number >= 0 for number in numbers)
            assert list(found.handled) == sorted(found.handled)
            assert len(found.handled) % 2 == 0
        return 1

    def seeds(self) -> list[bytes]:
        edits = [bytes([seal, how, 2, place, 0, 3]) for seal in (0, 1) for how in range(8) for place in (0, 9, 14, 40)]
        made = [[_STORE_ID, "g", "c", 1, 1, 9, handled] for handled in ([0, 5], [5, 0], [0], ["a", 1], [-1, 5], 7)]
        return edits + [b"\3" + msgpack.packb(one) for one in made]

    def close(self) -> None:
        self._file.close()
        shutil.rmtree(self._scratch)
