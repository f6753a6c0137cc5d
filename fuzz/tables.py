"""msgpack from untrusted clients: the table of a batch, the meta of a frame, the header of a message, as they come."""

from __future__ import annotations

from typing import Final

import msgpack

from fuzz.target import GrowthCheck
from qmq.errors import BadBatch, ProtocolError
from qmq.format.run import read_header
from qmq.format.source import Source, source_in, sources_of
from qmq.format.table import TABLE_BYTES, names_of
from qmq.net.protocol.frames import MAX_META_BYTES, unpack_meta

#: Nothing here is longer than 64 KiB.
_MOST_GROWTH_BYTES: Final = 16 << 20


class Tables:
    """Bytes straight into the three readers."""

    def once(self, data: bytes) -> int:
        with GrowthCheck(_MOST_GROWTH_BYTES):
            return self._read(data)

    def _read(self, data: bytes) -> int:
        try:
            names = names_of(data[: 4 * TABLE_BYTES])
            assert names
            assert all(type(name) is str for name in names)
            assert all(type(source) is Source for source in sources_of(source_in(data[: 4 * TABLE_BYTES])))
        except BadBatch:
            pass
        try:
            assert type(unpack_meta(memoryview(data)[:MAX_META_BYTES])) is dict
        except ProtocolError:
            pass
        try:
            header = read_header(data)
            assert all(type(text) is str for name in ("k", "t") for text in header.get(name, ()))
        except BadBatch:
            pass
        return 3

    def seeds(self) -> list[bytes]:
        maps: list[dict[object, object]] = [
            {},
            {"source": bytes(21), "subjects": ["a.b", "c"]},
            {"source": b"1.2.3.4", "subjects": ["a"], "n": [1, 2.5, None, True, -1, 1 << 63]},
            {"source": bytes(19) + b"\x01\x10x" + bytes(16), "subjects": ["a"]},
            {"protocol": 1, "client": "x"},
            {"group": None, "prefixes": ["a.", ""], "consumer": "c", "start": ["time", 5]},
            {"k": ["key"], "t": ["tag", "vip"], "p": {"price": "1"}},
        ]
        bombs = [
            b"\x91" * 4_000,
            b"\x81\xa1a" * 2_000,
            b"\xdf\xff\xff\xff\xff",
            b"\xdd\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\xc9\xff\xff\xff\xff\x01",
            b"\x81\xa8subjects\xdd\xff\xff\xff\xff" + b"\xa1a" * 100,
            b"\xd6\xff\x00\x00\x00\x00",
            b"\x81\xc4\x01a\x01",
            b"\xdc\x07\xd0" * 600,
        ]
        return [msgpack.packb(fields) for fields in maps] + bombs

    def close(self) -> None:
        """Nothing is kept."""
